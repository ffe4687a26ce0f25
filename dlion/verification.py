"""Are the replicas still equal? Compared now and then, and mended on request: no header sees a flipped bit."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlion.asking import Ask, Rows, at_once
from dlion.callers import warn_caller
from dlion.channel import Channel, nbytes
from dlion.comparison import told
from dlion.errors import AgreementError
from dlion.header import majority_value
from dlion.layout import local, named
from dlion.ops.bits import checksum, half_checksum
from dlion.options import Options
from dlion.replica import Replica
from dlion.stats import Stats

SHOWN = 4  # ranks that an error describes
PHASE = "verification"

Fact = tuple[str, list[int], str, int]  # of one tensor: what it is, shape, dtype, checksum


class Verification:
    """Compares parameters, and the state that a method keeps equal, between all workers.

    Args:
        channel: to the other workers; None for one worker alone, who is always right.
        options: with `verify_every` and `on_mismatch`.
        stats: counts comparisons, mended workers, and bytes as checks.
        shared_state: the part of the state that all workers must share.
    """

    def __init__(
        self, channel: Channel | None, options: Options, stats: Stats, shared_state: Callable[[Replica], list[Tensor]]
    ) -> None:
        self._channel, self._options, self._stats = channel, options, stats
        self._shared_state = shared_state

    def is_due(self, t: int) -> bool:
        """Whether the options ask for a comparison after `t` applied verdicts, a number that all workers share."""
        return self._options.verify_every > 0 and t % self._options.verify_every == 0

    def compare(self, replica: Replica, t: int, counts: bool = True, ask: Ask = at_once) -> list[int]:
        """Find out whether all workers hold the same; a collective call.

        Args:
            t: verdicts applied so far, for the error's sake.
            counts: False for a worker who takes part without having applied what the others have.
            ask: how the others' checksums are heard; where that is later, errors and repairs come later too.

        Returns:
            The ranks, in the default process group, that were mended; none where all were equal.

        Raises:
            AgreementError: they differ, and `on_mismatch` is "raise" or no strict majority is equal. It names the ranks
                and the first parameter of each that differs.
        """
        if self._channel is None:
            return []
        mended: list[int] = []
        device = self._channel.device
        tensors, shared = [local(param) for param in replica.params], self._shared_state(replica)
        sums = [half_checksum(each, device) for each in (tensors, shared)]
        mine = torch.stack([*sums, torch.full((), int(counts), device=device)])

        def judge(told: Rows) -> None:
            mended.extend(self._judged(replica, t, tensors + shared, [tuple(row) for row in told]))

        ask(self._channel, PHASE, mine, self._stats, judge)
        return mended

    def _judged(self, replica: Replica, t: int, tensors: list[Tensor], rows: list[tuple[int, ...]]) -> list[int]:
        """What `compare` does with all workers' checksums, each with whether it counts."""
        assert self._channel is not None
        self._stats.checks += 1
        counted = [row for row in rows if row[2]]
        if len(set(counted)) <= 1:
            return []
        common = majority_value(counted)
        strict = 2 * counted.count(common) > len(counted)
        different = [rank for rank, row in enumerate(rows) if row[2] and row != common]
        with self._channel.during(PHASE):
            return self._settle(replica, t, tensors, rows.index(common), different, strict)

    def _settle(
        self, replica: Replica, t: int, tensors: list[Tensor], source: int, different: list[int], strict: bool
    ) -> list[int]:
        assert self._channel is not None
        ranks = self._channel.ranks
        everyone = _checked(told(self._channel, _described(replica, tensors), self._stats), ranks)
        text = _explain(everyone, ranks, source, different, t)
        if self._options.on_mismatch == "raise":
            raise AgreementError(
                f"{text}: look for faulty memory, or code that changes parameters or state on some workers alone, and "
                "start again from the last checkpoint, or use on_mismatch='repair'"
            )
        alike = all(_forms(everyone[rank]) == _forms(everyone[source]) for rank in different)
        if not (strict and alike):
            why = "state of another form" if strict else "no strict majority of equal workers"
            raise AgreementError(
                f"{text}, and on_mismatch='repair' cannot mend {why}: start again from the last checkpoint"
            )
        wrong = [
            tensor
            for k, tensor in enumerate(tensors)
            if any(everyone[rank][k] != everyone[source][k] for rank in different)
        ]
        self._channel.broadcast_(wrong, source)
        size = sum(map(nbytes, wrong))
        self._stats.checked(*((size, 0) if self._channel.rank == source else (0, size)))
        self._stats.repairs += len(different)
        warn_caller(f"{text}; they took the values of rank {ranks[source]}")
        return [ranks[rank] for rank in different]


def _described(replica: Replica, tensors: list[Tensor]) -> list[Fact]:
    """The parameters' facts, and those of the shared state, which goes through the parameters in the same order."""
    names = [name for _, _, name, param in named(replica.param_groups) if param.requires_grad]
    each = (len(tensors) - len(names)) // max(len(names), 1)
    labels = names + [f"the state of {name}" for name in names for _ in range(each)]
    return [
        (label, list(tensor.shape), str(tensor.dtype), checksum([tensor]))
        for label, tensor in zip(labels, tensors, strict=True)
    ]


def _checked(everyone: list[Any], ranks: list[int]) -> list[list[Fact]]:
    """What all workers said, if it has the form that it must have."""
    for rank, facts in zip(ranks, everyone, strict=True):
        whole = isinstance(facts, list) and all(isinstance(fact, list) and len(fact) == 4 for fact in facts)
        if not (whole and all(isinstance(fact[0], str) for fact in facts)):
            raise AgreementError(f"rank {rank} says nothing intelligible of its replica: use one version of dlion")
    return everyone


def _forms(facts: list[Fact]) -> list[list[Any]]:
    return [list(fact[:3]) for fact in facts]


def _explain(everyone: list[list[Fact]], ranks: list[int], source: int, different: list[int], t: int) -> str:
    found = [f"on rank {ranks[rank]} {_first(everyone[rank], everyone[source])} differs" for rank in different]
    more = f"; and on {len(found) - SHOWN} more ranks" if len(found) > SHOWN else ""
    where = "; ".join(found[:SHOWN])
    return f"replicas are not equal after t={t} steps: {where}{more} (compared with rank {ranks[source]})"


def _first(mine: list[Fact], common: list[Fact]) -> str:
    """The first parameter, or state of one, that is not the common one."""
    return next((a[0] for a, b in zip(mine, common, strict=False) if a != b), "the amount of state")
