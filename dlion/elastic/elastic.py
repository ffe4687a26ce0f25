"""Workers that are killed, come and go: a step that nobody applies unless all who survive it do.

A lighthouse (torchft's) knows who is there. Workers train in rounds: a round is a fixed set of workers with process
groups of its own. Whenever a call fails, a worker closes its connections, so that everybody else in the round fails
at once, and asks the lighthouse for a quorum; the next round begins with what `dlion/elastic/reunion.py` does.

One step, and what a death costs the others, by phase (each is a function that a test can wrap):

    ``Elastic._together``            before the ballots. Momenta have not moved; the step begins again without the dead.
    ``ElasticExchange.ballots``      the rule runs: momentum moves, once a step whatever happens later.
    ``ElasticExchange.consult``      all-to-all, tally, all-gather. Nobody has applied anything: the ballots that were
                                     kept are sent again in the next round, and the dead worker's no longer count.
    ``Elastic._commit``              the verdicts are held. An all-gather of "I hold the verdicts of this step".
    ``Elastic.apply_held``           the parameters move.
Why replicas stay equal: see `dlion/elastic/standing.py`.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from dlion import agreement
from dlion.elastic.outsiders import changed, is_usual, what_is_strange
from dlion.elastic.quorum import Lighthouse, changes
from dlion.elastic.reunion import exchange_among, reunite, set_hyper_parameters
from dlion.elastic.rounds import Patience, Rounds
from dlion.elastic.standing import NOTHING, Standing
from dlion.elastic.terms import Terms, check_elastic
from dlion.elastic.tolerance import Ballots, ElasticExchange, Held
from dlion.errors import AgreementError, ExchangeError
from dlion.header import Status
from dlion.layout import layout_key, local
from dlion.ops.bits import checksum
from dlion.optim import Distributed
from dlion.replica import Replica
from dlion.scaling import unscaled


class Elastic(Distributed):
    """`dlion.Distributed` for workers that may be killed at any moment, come back, or join later.

    Used as `Distributed` is: the same methods, options and `step()`. A worker that joins receives parameters, t,
    hyper-parameters and `luggage` in its first `step()`, in which it tallies and abstains; its own gradient counts
    from the next one on. Its first learning rate and batch therefore do not matter; `position` and `luggage` say
    afterwards where the others are.

    Args:
        params, method, lr, betas, weight_decay, options: as of `Distributed`. Methods whose ballots need nothing but
            the gradients of their bucket ("dlion-*", "d-signum-*", "signsgd-mavo", "g-lion", "g-adamw").
        lighthouse: HOST:PORT of the lighthouse (`torchft_lighthouse`, or `dlion train --elastic`).
        worker: number of this worker, 0 to workers - 1; whoever takes the place of one that died takes its number.
        workers: how many there are when all are there.
        min_workers: train on while so many are there; None: more than half. With fewer, two halves of a broken
            network would both train on.
        module: of the parameters; its buffers and frozen parameters are sent to newcomers too.
        quorum_every: steps between two questions at the lighthouse whether somebody waits to join, about a millisecond
            each. After a loss it is asked at once.
        timeout: seconds that each call waits for the others: longer than they differ in reaching `step()`. A worker
            that died is noticed at once; one that stopped, after so long.
        quorum_timeout: seconds to wait for enough workers.
        start_timeout: seconds to wait for all workers, in a run where none has trained yet.
        verify_every: steps between two comparisons of all workers' parameters; 0 never compares them.
        on_mismatch: what a worker does whose parameters are not the majority's: "repair" receives them anew, "raise"
            raises, there alone.

    Attributes:
        position: committed steps, equal on all workers. Unlike t it counts steps that moved nothing.
        luggage: of the caller, JSON: a newcomer's becomes that of the worker whose state it receives.
        note: of the caller, JSON of few bytes, sent with the next step's commit; notes: everybody's, by worker, of the
            last commit that this worker took part in, else empty.
        news: one sentence for each change of the membership; the caller takes them away.
        workers_here: numbers of the workers of the round, empty before the first one.
        leader: the lowest of them that trained before the round: who is to write files, for instance.

    Raises:
        ValueError: at construction.
        QuorumError: from `step()`: too few workers, no lighthouse, or torchft is missing. `step()` may be called again.
        AgreementError: from `step()`, on a worker whose layout, t or hyper-parameters are not the majority's: the
            others go on without it.
    """

    def __init__(
        self,
        params: ParamsT,
        method: str = "dlion-mavo",
        lr: float | Tensor | None = None,
        betas: tuple[float, float] | None = None,
        weight_decay: float = 0.0,
        *,
        lighthouse: str,
        worker: int,
        workers: int,
        min_workers: int | None = None,
        module: nn.Module | None = None,
        quorum_every: int = 10,
        timeout: float = 30.0,
        quorum_timeout: float = 300.0,
        start_timeout: float = 60.0,
        verify_every: int | None = 100,
        on_mismatch: str = "repair",
        **options: Any,
    ) -> None:
        patience = Patience(timeout, quorum_timeout, start_timeout)
        self.terms = Terms.checked(lighthouse, worker, workers, min_workers, quorum_every, patience)
        check_elastic(method, options)
        options |= {"timeout": timeout, "verify_every": verify_every, "on_mismatch": on_mismatch}
        super().__init__(params, method, lr, betas, weight_decay, **options)
        self.keys = (*self.rule.defaults(), "weight_decay", "maximize")
        self.luggage: Any = None
        self.note: Any = None
        self.notes: dict[int, Any] = {}
        self.news: list[str] = []
        self.seasoned = False
        self.module = module
        self._rounds: Rounds | None = None
        self._exchange: ElasticExchange | None = None
        self._held: Held | None = None
        self._ballots: Ballots | None = None
        self._mates: list[str] = []
        self._asked = -1

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Vote, hold the verdicts, commit, apply: gradient -> ballots -> verdicts -> all hold them -> parameters.

        Returns:
            What the closure returned, else None.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        if not self.state and all(float(group["lr"]) == 0 for group in self.param_groups):
            self.rule.allocate(Replica(self.param_groups, self.state))
            return loss

        self.notes, self._done, self._stale, self._began = {}, False, not unscaled(self), time.perf_counter()
        while not self._done:
            try:
                exchange = self._together()  # the round of now; one that is new may bring this step to its end
                if not self._done:
                    self._held = self._decide(exchange)
                    self._commit()
                    self.apply_held()
            except ExchangeError:
                self.rounds.part()  # so that nobody waits for this worker; the next attempt asks for a quorum
        return loss

    def _together(self) -> ElasticExchange:
        """The exchange with the workers of now: a quorum where one is due, and one state for a new round."""
        due = self.position % self.terms.quorum_every == 0 and self.position != self._asked
        if due or not self.rounds.round:
            if self.rounds.renew():
                self._exchange, self._steps = exchange_among(self)
                self._key, self._fits = layout_key(self.param_groups, self.state), True
                reunite(self)
                self._tell()
            self._asked = self.position
        self._follow_layout()
        return self.exchange

    def _decide(self, exchange: ElasticExchange) -> Held:
        exchange.begin()
        exchange.settle()
        if self._ballots is None:
            with self.phases("ballot"):
                self._ballots = self._votes(exchange)
        readings = exchange.consult(self._ballots)
        return Held(self.rounds.round, readings, self._steps, exchange.moment, exchange.replica.hypers)

    def _votes(self, exchange: ElasticExchange) -> Ballots:
        if not self._fits:
            return exchange.blanks(Status.LAYOUT_CHANGED)
        return exchange.blanks(Status.ABSTAIN) if self._stale else exchange.ballots(self._steps)

    def _commit(self) -> None:
        """Tell all members that this worker holds the verdicts; return when all have said so."""
        every = self.options.verify_every
        checked = every > 0 and self.position % every == 0
        standings = self.rounds.gather(self.standing(checked))
        self.notes = {self.rounds.numbers[rank]: standing.note for rank, standing in enumerate(standings)}
        mine = standings[self.rounds.rank]
        if said := what_is_strange(self.terms.worker, mine, standings, self.hyper_parameters(), self._fits):
            self.rounds.leave()
            raise AgreementError(said)
        self._verify([standing.checksum for standing in standings], mine.checksum)

    def apply_held(self) -> None:
        """Do with the parameters what was decided, and end the step."""
        held = self._held
        assert held is not None
        with self.phases("apply"):
            moved = held.apply(self.exchange.replica)
        self.exchange.end()
        self.stats.stepped(self.exchange.layout.numel, self.exchange.workers)
        self.stats.skipped += not moved
        self._mark(held.moment.t + moved, self.position + 1, held.round)
        self._held = self._ballots = None
        self._done = True

    def standing(self, checked: bool = False) -> Standing:
        """What this worker says of itself; `checked`: with a checksum of its parameters."""
        replica, options = self.exchange.replica, self.options.agreed(self.terms.workers)
        shared = [local(param) for param in replica.params] + self.rule.shared_state(replica)
        return Standing(
            round=self.round,
            position=self.position,
            held=self._held.round if self._held is not None else NOTHING,
            t=int(self.param_groups[0]["t"]),
            hyper=agreement.hyper_fingerprint(self.hyper_parameters()),
            layout=agreement.layout_fingerprint(self.param_groups, options),
            checksum=checksum(shared) >> 1 if checked else 0,
            seasoned=int(self.seasoned),
            note=self.note,
        )

    def hyper_parameters(self) -> list[dict[str, Any]]:
        """Those that all workers must share, of each group."""
        return agreement.hyper_parameters(self.param_groups, self.keys)

    def take_over(self, told: dict[str, Any]) -> None:
        """Become what another worker told, whose tensors were received: the gradient at hand is not of these."""
        set_hyper_parameters(self.param_groups, told["hyper"])
        self._mark(told["t"], told["position"], told["round"])
        self.luggage = told["luggage"]
        self._held = self._ballots = None
        self._stale = True

    @property
    def rounds(self) -> Rounds:
        """This worker among the others; made when it is first needed, since from then on the others wait for it."""
        if self._rounds is None:
            terms = self.terms
            lighthouse = Lighthouse(terms.lighthouse, terms.worker, terms.patience.call)
            self._rounds = Rounds(lighthouse, terms.workers, terms.min_workers, terms.patience)
            self._rounds.seen = max(self.round, NOTHING)
        return self._rounds

    @property
    def exchange(self) -> ElasticExchange:
        assert self._exchange is not None
        return self._exchange

    @property
    def position(self) -> int:
        return int(self.param_groups[0].get("position", self.param_groups[0]["t"]))

    @property
    def round(self) -> int:
        """The round that committed the last step; with `position` it names the state of the parameters."""
        return int(self.param_groups[0].get("round", NOTHING))

    @property
    def workers_here(self) -> list[int]:
        return self._rounds.numbers if self._rounds is not None else []

    @property
    def leader(self) -> int | None:
        return self._rounds.leader if self._rounds is not None else None

    def close(self) -> None:
        """Leave the others, who train on."""
        if self._rounds is not None:
            self._rounds.leave()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an elastic optimizer is one worker among others and cannot be copied or pickled: use state_dict()"
        )

    def _mark(self, t: int, position: int, round: int) -> None:
        for group in self.param_groups:
            group.update(t=t, position=position, round=round)

    def _follow_layout(self) -> None:
        key = layout_key(self.param_groups, self.state)
        if key != self._key:
            self._fits = self.exchange.fits(self.param_groups)
            if self._fits:
                self.exchange.bind(self.param_groups, self.state)
                self.rule.allocate(self.exchange.replica)
                self._key = layout_key(self.param_groups, self.state)

    def _verify(self, checksums: Sequence[int], mine: int) -> None:
        if is_usual(checksums, mine):
            return
        if self.options.on_mismatch == "raise":
            self.rounds.leave()
            raise AgreementError(changed(self.terms.worker))
        self.news.append(f"worker {self.terms.worker} found its parameters changed at step {self.position + 1}")
        self._mark(int(self.param_groups[0]["t"]), 0, NOTHING)  # what nobody goes on from
        self._held = self._ballots = None
        raise ExchangeError("this worker needs the parameters of the others")

    def _tell(self) -> None:
        before, self._mates = self._mates, [member.name for member in self.rounds.members]
        seconds = time.perf_counter() - self._began
        self.news += changes(before, self._mates, self.position + (not self._done), seconds)
