"""An exchange whose host starts steps and hears of each when the next one begins."""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dlion import agreement
from dlion.comparison import GUARDED_EVERY, GUARDED_STEPS
from dlion.diagnosis import raise_unheard
from dlion.errors import OverlapError
from dlion.exchange import Decision, Exchange, Reading
from dlion.header import Status
from dlion.layout import Bucket, local, named
from dlion.ops.kept import is_captured
from dlion.resident import headers
from dlion.resident.choice import refuse_new_in_graph
from dlion.resident.entries import Entries
from dlion.resident.lane import lane_for
from dlion.resident.later import Later
from dlion.resident.ledger import Ledger
from dlion.resident.scalars import ResidentMoment, first_not_finite, scalars
from dlion.resident.tally import ResidentTally
from dlion.waited import changed

ON_DEVICE = {"steps": "on the device"}  # all workers must take them there: an error reaches them a step later


class ResidentExchange(Exchange):
    """The workers of one group, as an optimizer sees them whose parameters and rows lie on one accelerator.

    Headers are written and judged there, and a ledger there keeps t, the counts and the first trouble; after trouble no
    step writes parameters. `look` reads what the ledger was after the step before, never of the one that has just been
    started: all workers look at the same step, so that they can find out together what was wrong. With overlap some
    ballots have left when a step begins, other ones on each worker: the step before is looked at when this one closes.
    """

    _slot = _accused = -1  # see `Entries`: slot, changed

    def __init__(self, kernels: ModuleType, *args: Any) -> None:
        self.kernels = kernels
        self.ask = self._later = Later()
        super().__init__(*args)
        self.device = local(self.replica.params[0]).device
        self.t = int(self.param_groups[0]["t"])
        self.ledger = Ledger(self.t, self.device, kernels)
        self.lane = lane_for(self.options.overlap, self.device)
        self._counted = self.ledger.now()
        self._unheard = self._replayed = False
        self._counts = True
        self._begun = 0
        self._of_graph: Sequence[int] = (0, 0, 0)  # traffic of a step
        self._as_applied: list[dict[str, Any]] | None = None

    def terms(self) -> dict[str, Any]:
        return super().terms() | ON_DEVICE

    def look(self, now: bool = False) -> None:
        """Hear of the last step, if there was one, and then compare what is due after it: collective calls.

        Args:
            now: also wait for what a graph has done since.

        Raises:
            AgreementError, NonFiniteGradientError: as `receive` and `decide` on the host, a step later.
        """
        if not (is_captured(self.device) or (self.options.overlap and not now)):
            self._hear(now)
            self._refuse_accused()

    def count(self) -> None:
        self._count(self.ledger.now())

    def refuse_trouble(self) -> None:
        found = self.ledger.now()
        raise_unheard(found.status, found.t)

    def begin_anew(self) -> None:
        self.t = int(self.param_groups[0]["t"])
        self._unheard = False
        self._as_applied = None

    def settle(self) -> None:
        """As on the host; without overlap everything was read when the step began."""
        if self.options.overlap:
            now = scalars(self.param_groups, self.keys, self.device)
            self.moment = ResidentMoment(self.ledger.t, self.rank, self.workers, now.applied)
            self._as_applied = now.given

    def rest_where(self, overflowed: Tensor) -> None:
        self.replica.awake = ~overflowed.to(self.device)

    def gradient_is_there(self) -> None:
        self.lane.follow()

    def compares_gradients(self) -> bool:
        """In a few steps of many: each parameter's takes several launches."""
        return self._begun % GUARDED_EVERY < GUARDED_STEPS

    def refuse_changed(self, names: Sequence[str], before: Sequence[Tensor], now: Sequence[Tensor]) -> None:
        """As on the host, a step later."""
        slots = {name: slot for slot, (_, _, name, _) in enumerate(named(self.param_groups))}
        yes = torch.ones((), dtype=torch.bool, device=self.device)
        differ = [(a != b).any() if a.shape == b.shape else yes for a, b in zip(before, now, strict=True)]
        slot = torch.full((), -1, dtype=torch.int64, device=self.device)
        for name, differs in zip(reversed(names), reversed(differ), strict=True):
            slot = slot.masked_fill(differs, slots[name])
        self.ledger.accuse(slot)

    def send(self, bucket: Bucket, planes: Tensor, finite: Tensor) -> None:
        """As on the host; `finite` is a bool[]."""
        self._leave(bucket, planes, finite)

    def abstain(self, bucket: Bucket) -> None:
        planes = torch.zeros(self.wire.count.ballot_planes, bucket.words, dtype=torch.int64, device=self.device)
        self._leave(bucket, planes, None)

    def advance(self) -> None:
        self.lane.advance(self.flight)

    def receive(self) -> Reading:
        """The verdict on the oldest bucket under way, and in the place of its header how many may apply it, i64[].

        It raises nothing: what the headers say is entered in the ledger.
        """
        bucket, rows, verdict = self._received()
        return bucket, verdict, self.ledger.enter(rows, self.workers)

    def _received(self) -> tuple[Bucket, Tensor, Tensor]:
        with self.lane.taking():
            consulted = self.flight.receive()
        assert consulted.result is not None
        rows, verdict = consulted.result
        self.lane.give(rows, verdict)
        return consulted.bucket, rows, verdict

    def decide(self, readings: Iterator[Reading]) -> Iterator[Decision]:
        """The verdicts, each with the number of those whose votes count, i64[]: 0 where nobody may apply it."""
        yield from readings if self.options.nonfinite == "abstain" else self._decided(list(readings))

    def close(self, counts: bool = True) -> None:
        """The step was started; whether it went well is for `look` to find out."""
        self._counts = counts
        self.ledger.close()
        if is_captured(self.device):
            self._put_into_graph()
            return
        try:
            if self.options.overlap:
                self._announced, last = self._announced_before, self._announced
                self._hear()  # of the step before
                self._announced = last
        finally:
            self.ledger.send()
            self._unheard = True
        self.checks.gradients(self.replica, self.t)
        self._refuse_accused()

    def _put_into_graph(self) -> None:
        """The step that has been started is taken when a graph runs, and nobody will say how often."""
        self._replayed = True
        self.ledger.repeat()
        moved = [now - before for now, before in zip(self.stats.traffic(), self._before, strict=True)]
        self.stats.add_traffic(-1, moved)
        self._of_graph = moved

    def announce_layout_change(self) -> bool:
        """As on the host, in the rows of a whole step; whoever has not changed hears of it a step later.

        Returns:
            Whether all have announced it, so that they can begin anew; if not, this was a step in which nobody moves.
        """
        if self.voting is None:
            self.look(now=True)
            return True
        self.begin()
        self.rest(Status.LAYOUT_CHANGED)
        silent = True
        try:
            for bucket in self.unsent():
                self.abstain(bucket)
                _, rows, _ = self._received()
                self.ledger.enter(rows, self.workers)
                silent &= int(headers.abstentions_of(headers.worst(rows, self.workers))) == self.workers
        finally:
            self.end()
        self.close(counts=False)
        if silent:
            self.look(now=True)
        return silent

    def _hear(self, now: bool = False) -> None:
        if not (self._unheard or now or self._replayed):
            return
        self._later.deliver()
        found = self.ledger.now() if now or self._replayed else self.ledger.heard()
        ended, self._unheard = self._unheard, False
        self._count(found)
        self.t = found.t
        if found.status != Status.OK:
            self._tell(found)
        elif ended and not self._replayed:
            # by what the device knew then: a worker that has loaded a state since knows another t
            self.checks.after(self.replica, found.began, found.t > found.began, self._counts)
        if now:
            self._later.deliver()
        if found.changed >= 0:
            self._accused = found.changed
            self.ledger.acquit()

    def _refuse_accused(self) -> None:
        """Raise, here alone and so after all that the workers do together, where a gradient was another one."""
        slot, self._accused = self._accused, -1
        if slot >= 0:
            raise OverlapError(changed(self._name(slot) or "a parameter"))

    def _decided(self, held: list[Reading]) -> list[Decision]:
        """All verdicts of a step that one bucket can forbid."""
        slot = None
        if self.options.nonfinite == "raise":
            slot = first_not_finite(self.param_groups, self.device)
            if self.replica.awake is not None:
                slot = slot.masked_fill(~self.replica.awake, -1)
        go = self.ledger.forbid(slot)
        return [(bucket, verdict, voters * go) for bucket, verdict, voters in held]

    def _read(self) -> None:
        given = self.param_groups[0]["t"]
        self._refuse_capture()
        if given is not self.ledger.t:
            refuse_new_in_graph(self.device)
            self.ledger.t.fill_(int(given))
            if not self._unheard:  # else it is that of the last step heard of, on all workers
                self.t = int(given)
        for group in self.param_groups:
            group["t"] = self.ledger.t
        self.ledger.begin()
        self.lane.begin()
        groups = self.param_groups
        if self._as_applied is not None:  # compared is how verdicts were applied the last time
            groups = agreement.with_those(groups, self._as_applied)
        found = scalars(groups, self.keys, self.device)
        self.moment = ResidentMoment(self.ledger.t, self.rank, self.workers, found.applied)
        self._announced_before = self._announced
        self._announced, self._fingerprint_of_hypers = found.hypers, found.fingerprint
        self.replica.hypers, self.replica.awake = self._announced, None
        self._begun += 1
        self._before = self.stats.traffic()

    def _leave(self, bucket: Bucket, planes: Tensor, finite: Tensor | None) -> None:
        """Let ballots leave; without `finite` they are blanks."""
        bad = Status[self.options.nonfinite.upper()]
        told = (bucket.number, self.ledger.t, self.fingerprint, self._fingerprint_of_hypers)
        shard_words = -(-planes.shape[1] // self.topology.shards)
        # what a graph repeats nobody would take up
        observer = None if is_captured(self.device) else self.checks.sample(bucket, self.t, len(self.layout.buckets))
        where = (bucket.first_word, shard_words, observer)
        reads = [tensor for tensor in (planes, finite, self.replica.awake) if tensor is not None]
        with self.lane.taking(*reads):
            own = self.kernels.ballot_header(finite, self.replica.awake, bad, self._why, *told)
            tally = ResidentTally(self.kernels, self.wire.count, own, self.ledger.t, *where)
            self.flight.send(bucket, Status.OK, self.topology.consult(own, planes, tally))
            self.lane.sent(self.flight)
        self._sent += 1

    def _count(self, found: Entries) -> None:
        """Bring into the statistics what has been counted since the last time."""
        for _ in range(found.steps - self._counted.steps):
            self.stats.stepped(self.layout.numel, self.workers)
        self.stats.add_traffic(found.repeated - self._counted.repeated, self._of_graph)
        self.stats.skipped += found.skipped - self._counted.skipped
        self.stats.abstentions += found.abstentions - self._counted.abstentions
        self._counted = found

    def _tell(self, found: Entries) -> None:
        """Find out with the others what was wrong; steps go on when it is known."""
        self._slot = found.slot
        try:
            self._diagnose(Status(found.status), self._why, found.offender)
        finally:
            self.ledger.forgive()

    def _report(self, status: Status) -> agreement.Report:
        said = super()._report(status)
        return said | {"not_finite": self._name(self._slot)}

    def _name(self, slot: int) -> str | None:
        names = [name for _, _, name, _ in named(self.param_groups)]
        return names[slot] if 0 <= slot < len(names) else None

    def _refuse_capture(self) -> None:
        if is_captured(self.device) and self.options.nonfinite == "raise":
            raise ValueError(
                "nonfinite='raise' cannot be captured in a graph, which would go on without a word: use "
                "nonfinite='abstain' or 'skip', or call step() outside a graph"
            )
