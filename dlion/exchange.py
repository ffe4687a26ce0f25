"""One optimizer's dealings with the other workers: agreement, buckets out and verdicts in, diagnosis.

It is made at the first step and again whenever the layout changes on all workers.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dlion import agreement
from dlion.channel import Channel
from dlion.checks import Checks
from dlion.codecs import Moment
from dlion.comparison import told
from dlion.copies import carried
from dlion.diagnosis import agree, raise_in_step
from dlion.flight import Flight
from dlion.header import NOBODY, BallotHeader, Status, VerdictHeader, worst
from dlion.layout import Bucket, Layout
from dlion.options import Options
from dlion.phases import Phases
from dlion.pipeline import Wire
from dlion.replica import Replica
from dlion.resident import choice
from dlion.sharding import trained
from dlion.stats import Stats
from dlion.survey import Survey
from dlion.tallies import Tally
from dlion.topology import Tally as Counting
from dlion.topology import choose_topology
from dlion.voting import Voting, siblings, voting_groups
from dlion.waited import Waited

APPLYING = ("lr", "weight_decay")  # the hyper-parameters that no ballot depends on

Reading = tuple[Bucket, Tensor, Any]  # a verdict, and its header
Decision = Reading  # a verdict to apply, and how many voted


class Exchange(Waited):
    """The workers of one group as one optimizer sees them.

    Args:
        group: all workers; None for one worker alone.
        owner: of groups for this exchange alone; None shares them, while no two exchanges are under way at once.
        options: as given to the optimizer.
        wire: codecs and counting for a group of this size.
        param_groups: of the optimizer.
        keys: the hyper-parameters that must be equal on all workers in every step.
        stats: counts what is moved.
        phases: times it.
        shared_state: the part of the state that all workers must share.

    Raises:
        AgreementError: layouts, options, parameters or shared state differ. ExchangeError: a worker did not come.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        owner: object | None,
        options: Options,
        wire: Wire,
        param_groups: list[dict[str, Any]],
        keys: Iterable[str],
        state: Any,
        stats: Stats,
        phases: Phases,
        shared_state: Callable[[Replica], list[Tensor]],
    ) -> None:
        self._group = weakref.ref(group) if group is not None else None
        self.options = options
        self.wire = wire
        self.keys = tuple(sorted(set(keys)))
        self.stats = stats
        self.voting = voting_groups(group, options.timeout) if group is not None and group.size() > 1 else None
        self.rank, self.workers = (self.voting.ballots.rank, self.voting.ballots.size) if self.voting else (0, 1)
        self.bind(param_groups, state)
        self.fingerprint = self._fingerprint(param_groups)
        self._applied: list[dict[str, Any]] | None = None
        if group is not None and self.voting:
            with self.voting.ballots.during("agreement"):
                self._agree(self.voting, shared_state(self.replica))
            self.voting = voting_groups(group, options.timeout, owner)
        words = sum(bucket.words for bucket in self.layout.buckets)
        self.topology = choose_topology(options.topology, self.voting, stats, words, wire.replicate)
        channel = self.voting.ballots if self.voting else None
        self.survey, self.flight, self.begun = Survey(channel, stats, phases), Flight(phases), False
        others = channel, siblings(trained(param_groups), options.timeout), not self.topology.tallied_by_all
        self.checks = Checks(*others, options, wire, stats, shared_state, self.workers, self.ask)

    def bind(self, param_groups: list[dict[str, Any]], state: Any) -> None:
        """Take up these parameters and this state; the layout that others know stays as agreed."""
        self.param_groups = param_groups
        self.layout = Layout.of(param_groups, self.wire.bucket_elements(self.options.bucket_bytes), self.wire.up.align)
        # backward makes the gradients of the last layers first
        self.order = self.layout.buckets[::-1] if self.options.overlap else self.layout.buckets
        self.replica = Replica(param_groups, state)
        self._announced = agreement.hyper_parameters(param_groups, self.keys)

    def serves(self, group: dist.ProcessGroup | None) -> bool:
        """Whether this is the exchange among the workers of `group`."""
        return group is (self._group() if self._group is not None else None)

    def fits(self, param_groups: list[dict[str, Any]]) -> bool:
        """Whether these parameters have the layout that was agreed."""
        return self._fingerprint(param_groups) == self.fingerprint

    def begin(self) -> None:
        """Read t and the hyper-parameters of the step that starts now; nothing to do where it has started."""
        if self.begun:
            return
        self._read()
        if self.voting is not None:
            self.voting.ballots.roll_call.t = self.t
        self._sent, self.moved = 0, False
        self.replica.resting, self._why = False, Status.ABSTAIN
        self.begun = True

    def _read(self) -> None:
        self.t = int(self.param_groups[0]["t"])
        self.moment = Moment(self.t, self.rank, self.workers)
        self._announced = self.replica.hypers = agreement.hyper_parameters(self.param_groups, self.keys)
        if self._applied is not None and self.options.overlap:
            # ballots may leave before step() says how verdicts are applied: compared is how they were the last time
            self._announced = agreement.with_those(self._announced, self._applied)
        self._hyper = agreement.hyper_fingerprint(self._announced)

    def settle(self) -> None:
        """Read what only applying needs: learning rates and weight decay, as they are in `step()`.

        Groups that came after ballots had left (not strict) have their first step next time.
        """
        self._applied = agreement.hyper_parameters(self.param_groups, APPLYING)
        self.replica.hypers = [now | then for now, then in zip(self.replica.hypers, self._applied, strict=False)]

    def begin_anew(self) -> None:
        """All workers have received the same hyper-parameters: how verdicts were applied the last time is past."""
        self._applied = None

    def end(self) -> None:
        """The step is over, well or not."""
        self.begun = False
        self.flight.clear()

    def close(self, counts: bool = True) -> None:
        """Count a step that went well, and see now and then whether all workers are alike: else an AgreementError.

        Args:
            counts: False for a worker who has not applied its verdicts with the others.
        """
        self.stats.stepped(self.layout.numel, self.workers)
        self.stats.skipped += not self.moved
        for group in self.param_groups:
            group["t"] = self.t + self.moved
        self.checks.gradients(self.replica, self.t)
        self.checks.after(self.replica, self.t, self.moved, counts)

    def rest(self, why: Status = Status.ABSTAIN) -> None:
        """Take part in the step that has begun without a vote of one's own: every bucket must be abstained from.

        Call it before the survey of the step: this worker answers it with what changes no answer, and what is its own
        stays as it is. It counts the others' ballots as ever, and may apply the verdicts.

        Args:
            why: what its ballots say of it.
        """
        self.replica.resting, self._why = True, why

    def rest_where(self, overflowed: Tensor) -> None:
        """`rest` where this worker's gradients overflowed under a gradient scaler, bool[]."""
        if bool(overflowed):
            self.rest()

    def unsent(self) -> Iterator[Bucket]:
        """The buckets of this step whose ballots have not left, in the order that all workers send them.

        Whoever iterates sends each bucket before asking for the next one, or stops.
        """
        while self._sent < len(self.order):
            yield self.order[self._sent]

    def send(self, bucket: Bucket, planes: Tensor, finite: Any) -> None:
        """Let the ballots of the next bucket leave.

        Args:
            planes: T[ballot planes, n], the encoded message.
            finite: whether the gradients behind it were.
        """
        self._send(bucket, planes, Status.OK if finite else Status[self.options.nonfinite.upper()])

    def abstain(self, bucket: Bucket) -> None:
        """Let ballots of the next bucket leave that are as long as everybody's and do not count, in a step at `rest`.

        Nothing of this worker moves, and the bucket's verdict is received as ever.
        """
        self._send(bucket, self.wire.up.blank(bucket, self.survey.answers), self._why)

    def advance(self) -> None:
        """Let buckets under way go on as far as they can without waiting, and as far as every worker does."""
        if self.voting is None or not choice.is_accelerator(self.voting.ballots.device):
            self.flight.advance()  # by arrival; two groups of NCCL on one device hang where orders differ

    def receive(self) -> Reading:
        """The verdict on the oldest bucket under way.

        Returns:
            The bucket, its verdict T[verdict planes, n] and the verdict's header, equal on all workers.

        Raises:
            AgreementError: layouts, hyper-parameters or t differ.
        """
        consulted = self.flight.receive()
        assert consulted.result is not None
        headers, verdict = consulted.result
        header = worst([VerdictHeader.decode(row) for row in headers.tolist()], self.workers)
        if header.status >= Status.HYPERPARAMETERS_DIFFER:
            while self.flight:  # the diagnosis takes the same groups
                self.flight.receive()
            self._diagnose(header.status, consulted.status, header.offender)
        else:
            self.stats.abstentions += header.abstentions
        return consulted.bucket, verdict, header

    def decide(self, readings: Iterator[Reading]) -> Iterator[Decision]:
        """The verdicts to apply: with `nonfinite="skip" | "raise"` all are in before the first parameter is written.

        Raises:
            NonFiniteGradientError: some worker's gradients are not finite, and the policy is "raise".
        """
        for bucket, verdict, header in readings if self.options.nonfinite == "abstain" else self._held(readings):
            if header.voters:
                self.moved = True
                yield bucket, verdict, header.voters
            del verdict  # or the next bucket's buffers come on top of it

    def _held(self, readings: Iterator[Reading]) -> list[Reading]:
        held = list(readings)
        if Status.RAISE in (statuses := {header.status for _, _, header in held}):
            self._diagnose(Status.RAISE, Status.RAISE, NOBODY)
        return [] if Status.SKIP in statuses else held

    def announce_layout_change(self) -> bool:
        """Tell the others, in as many rows as without, that the layout changed here; an AgreementError if not there."""
        if self.voting is None:
            return True
        self.begin()
        try:
            answers = self.survey.take_part()
            for bucket in self.order if self.options.overlap else self.order[:1]:
                self._send(bucket, self.wire.up.blank(bucket, answers), Status.LAYOUT_CHANGED)
            self.receive()
        finally:
            self.end()
        return True

    def terms(self) -> dict[str, Any]:
        """What all workers must have chosen alike."""
        return self.options.agreed(self.workers)

    def _fingerprint(self, param_groups: list[dict[str, Any]]) -> int:
        return agreement.layout_fingerprint(param_groups, self.terms())

    def _send(self, bucket: Bucket, planes: Tensor, status: Status) -> None:
        own = BallotHeader(status, bucket.number & 0xFFFF, self.t & NOBODY, self.fingerprint & NOBODY, self._hyper)
        device = self.voting.ballots.device if self.voting else planes.device
        shard_words = -(-planes.shape[1] // self.topology.shards)
        tally = self.tally(own, bucket, shard_words)
        consultation = self.topology.consult(own.encode().to(device), carried(planes, device), tally)
        self.flight.send(bucket, status, consultation)
        self._sent += 1

    def tally(self, own: BallotHeader, bucket: Bucket, shard_words: int) -> Counting:
        """The counting of one bucket's ballots, of which this worker's has the header `own`."""
        observer = self.checks.sample(bucket, self.t, len(self.layout.buckets))
        return Tally(self.wire.count, own, bucket.first_word, shard_words, observer)

    def _agree(self, voting: Voting, shared: list[Tensor]) -> None:
        """Compare layout, parameters and shared state with the other workers', once for each layout."""
        facts = voting, self.options, self.fingerprint, self.replica.params, shared, self.stats
        agree(*facts, lambda: self._reports(voting.ballots, Status.OK))

    def _diagnose(self, status: Status, own: Status, offender: int) -> None:
        """Find out together what is wrong, and raise it; return only if every worker announced a new layout."""
        if self.voting is None:
            reports, ranks = [self._report(own)], [0]
        else:
            with self.voting.ballots.during("diagnosis"):
                reports, ranks = self._reports(self.voting.ballots, own), self.voting.ballots.ranks
        raise_in_step(status, offender, reports, ranks, self.t, self.options.overlap)

    def _reports(self, channel: Channel, status: Status) -> list[agreement.Report]:
        return agreement.checked_reports(told(channel, self._report(status), self.stats), channel.ranks)

    def _report(self, status: Status) -> agreement.Report:
        own = agreement.report(self.param_groups, self.terms(), self._announced, status)
        return own | {"not_finite": None} if self.replica.resting else own  # its gradients are not what this is about
