"""Small numbers that all workers compare, and the first of them: hashes of gradients that should differ."""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlion import agreement
from dlion.asking import Ask, Rows, row, told_to_all
from dlion.callers import warn_caller
from dlion.channel import Channel
from dlion.errors import AgreementError
from dlion.header import NOBODY, Status
from dlion.layout import local, named
from dlion.ops.bits import half_checksum
from dlion.quoting import one_line
from dlion.replica import Replica
from dlion.stats import Stats

RUNS = 64  # of neighbouring parameters whose gradients get one hash
SHOWN = 300  # letters of the names of parameters
GUARDED_STEPS = 3  # in a row whose gradients are compared, to find gradients that were averaged before
GUARDED_EVERY = 100  # applied steps; then again, since averaging may be switched on later
ORPHANED = -1  # stands for the hash of gradients where no parameter has one
OWN_LOOP = "call dlion.local_gradients(model) on the DDP module"
OF_FRAMEWORKS = {  # those built on others first
    "lightning": "VotingStrategy",
    "transformers": "local_gradients(trainer)",
    "accelerate": "local_gradients(accelerator)",
}
WITHOUT_GRADIENTS = (
    f"no parameter of the optimizer had a gradient on any worker in {GUARDED_STEPS} steps in a row, so nothing is "
    "trained: call fully_shard(model), and whatever else replaces a model's parameters, before the optimizer is made, "
    "and backward() before step()"
)


def gathered(channel: Channel, numbers: list[int], stats: Stats) -> list[list[int]]:
    """Every worker's `numbers`, 63 bits each, in rank order; one call, counted as a check."""
    rows: list[list[int]] = told_to_all(channel, None, row(numbers, channel.device), stats).tolist()
    return rows


def told(channel: Channel, value: Any, stats: Stats) -> list[Any]:
    """Every worker's `value`, of any length as JSON, in rank order; two calls, counted as a check."""
    everyone = channel.gather_json(value)
    sizes = [len(str(said)) for said in everyone]  # near enough: these bytes only have to be kept apart
    stats.checked(sizes[channel.rank], sum(sizes) - sizes[channel.rank])
    return everyone


class Guard:
    """Finds out, at first and later again, whether gradients had been averaged already or there are none at all.

    Parameters are looked at in runs of neighbours, so that what travels is short: a model may be averaged in part.

    Of a worker that is several ranks, each with shards, it finds out too whether all take the same step.

    Args:
        channel: to the other workers; None for one worker alone.
        siblings: to the other ranks of this worker; None where there are none.
        stats: where the bytes are counted, as checks.
        ask: how the others' hashes are heard.
    """

    def __init__(self, channel: Channel | None, siblings: Channel | None, stats: Stats, ask: Ask) -> None:
        self._channel, self._siblings, self._stats, self._ask = channel, siblings, stats, ask
        self._steps = 0
        self._seen: list[list[list[int]]] = []  # int[steps][workers][runs]

    def look(self, replica: Replica, t: int) -> None:
        """Compare the gradients of a step; a collective call in the steps that are looked at. Who rests has none.

        Args:
            t: verdicts applied before that step, a number that all workers share.

        Raises:
            AgreementError: on all ranks of a worker that have other hyper-parameters or another t.
        """
        place = self._steps if self._steps < GUARDED_STEPS else t % GUARDED_EVERY
        if place >= GUARDED_STEPS or not replica.params:  # who trains nothing has nothing to send
            return
        runs = _runs(len(replica.params))
        self._steps += 1
        own = self._hashes(replica, runs)
        self._ask(self._channel, "comparing gradients", own, self._stats, partial(self._take, replica, runs, place, t))

    def _take(self, replica: Replica, runs: list[range], place: int, t: int, hashes: Rows) -> None:
        """Keep the hashes of all workers in a step, and say what is wrong after the last of a few."""
        if place == 0 or len(self._seen[0][0]) != len(hashes[0]):  # other parameters are trained now
            self._seen.clear()
        self._seen = [*self._seen[1 - GUARDED_STEPS :], hashes]  # t rests while nobody votes
        if self._siblings is not None and place == 0:
            self._compare_siblings(self._siblings, replica, t)
        if place == GUARDED_STEPS - 1 and len(self._seen) >= GUARDED_STEPS and (wrong := self._wrong(replica, runs)):
            warn_caller(wrong)

    def _compare_siblings(self, siblings: Channel, replica: Replica, t: int) -> None:
        """Each votes with those that hold the same shard, so nothing else compares them."""
        with siblings.during("comparing the ranks of one worker"):
            facts = gathered(siblings, [t, agreement.hyper_fingerprint(replica.hypers)], self._stats)
            if any(each != facts[0] for each in facts):
                own = agreement.report(replica.param_groups, {}, replica.hypers, Status.OK)
                reports = agreement.checked_reports(told(siblings, own, self._stats), siblings.ranks)
                raise AgreementError(agreement.explain_hyper_parameters(reports, siblings.ranks, NOBODY))

    def _hashes(self, replica: Replica, runs: list[range]) -> Tensor:
        """Of the gradients of each run, i64[runs]; one worker alone has nothing to compare."""
        grads = [[replica.params[slot].grad for slot in run] for run in runs]
        found = [[local(grad) for grad in run if grad is not None] for run in grads]
        if self._channel is None:
            return row([0 if run else ORPHANED for run in found])
        device = self._channel.device
        orphaned = torch.full((), ORPHANED, device=device)
        votes = torch.ones_like(orphaned) if replica.awake is None else replica.awake
        return torch.stack(
            [half_checksum([] if replica.resting else run, device) * votes if run else orphaned for run in found]
        )

    def _wrong(self, replica: Replica, runs: list[range]) -> str | None:
        """What the steps that were seen say against the gradients."""
        workers = len(self._seen[0])
        columns = [[[row[run] for row in step] for step in self._seen] for run in range(len(runs))]
        if columns and all(value == ORPHANED for column in columns for step in column for value in step):
            return WITHOUT_GRADIENTS
        if workers == 1:
            return None
        telling = [column for column in columns if any(step[0] not in (0, ORPHANED) for step in column)]
        equal = [_is_equal(column) for column in telling]
        if telling and all(equal):
            return _averaged(f"gradients were equal on all {workers} workers")
        # what is equal by itself, as under a loss that is linear in a parameter, is equal in all steps too
        partly = [run for run, column in zip(runs, columns, strict=True) if _is_equal(column) and _changes(column)]
        if not partly:
            return None
        names = [name for _, _, name, param in named(replica.param_groups) if param.requires_grad]
        which = ", ".join(names[slot] for run in partly for slot in run)
        return _averaged(
            f"gradients of some parameters were equal on all {workers} workers ({one_line(which, SHOWN)}; a penalty "
            "that reads no data makes such too)"
        )


def _runs(count: int) -> list[range]:
    """At most `RUNS` ranges, of equal lengths but for the last ones, that together are range(count)."""
    length = max(1, -(-count // RUNS))
    return [range(first, min(first + length, count)) for first in range(0, count, length)]


def _is_equal(column: list[list[int]]) -> bool:
    """Whether all workers had the same gradients in every step, and some that were not 0."""
    return all(step[0] not in (0, ORPHANED) and len(set(step)) == 1 for step in column)


def _changes(column: list[list[int]]) -> bool:
    return len({step[0] for step in column}) == len(column) > 1


def _advice() -> str:
    """What switches averaging off: a framework that wraps models has a call of its own, which keeps momenta too."""
    here = [name for name in OF_FRAMEWORKS if name in sys.modules]
    if not here:
        return OWN_LOOP
    calls = ", ".join(f"with {name} use dlion.integrations.{name}.{OF_FRAMEWORKS[name]}" for name in here)
    return f"{calls}, in a loop of your own {OWN_LOOP}"


def _averaged(what: str) -> str:
    return (
        f"{what} in {GUARDED_STEPS} steps in a row, so they seem to be averaged already, or all workers read the "
        f"same data: votes then carry no information; {_advice()}, or give ranks their own data"
    )
