"""The 16 bytes before every row on the wire, and what a worker concludes from everybody's.

Ballot header: version, status, bucket, t, layout fingerprint, hyper-parameter fingerprint. Verdict header: version,
status, bucket, t, voters, abstentions, first offending rank. Both are two little-endian int64 words.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

VERSION = 1
NBYTES = 16
NOBODY = 2**32 - 1

T = TypeVar("T")


class Status(IntEnum):
    """What a row says beside its votes; where several hold, the greatest decides.

    FINISHED stands in ballots alone: an abstention of a worker without data, whose hyper-parameters do not matter.
    """

    OK = 0
    ABSTAIN = 1
    SKIP = 2
    RAISE = 3
    HYPERPARAMETERS_DIFFER = 4
    LAYOUT_CHANGED = 5
    FINISHED = 6


@dataclass(frozen=True)
class BallotHeader:
    """`bucket` and `t` modulo 2**16 and 2**32; fingerprints of 32 bits."""

    status: Status
    bucket: int
    t: int
    layout: int
    hyper: int
    version: int = VERSION

    def encode(self) -> Tensor:
        """i64[2]."""
        return _words(_front(self), self.layout | self.hyper << 32)

    @staticmethod
    def decode(words: Sequence[int]) -> "BallotHeader":
        """From two int64 words."""
        a, b = _unsigned(words)
        return BallotHeader(_status(a), a >> 16 & 0xFFFF, a >> 32, b & NOBODY, b >> 32, a & 0xFF)


@dataclass(frozen=True)
class VerdictHeader:
    """`voters` and `abstentions` of 16 bits; `offender` is the lowest rank that caused the status, or NOBODY."""

    status: Status
    bucket: int
    t: int
    voters: int
    abstentions: int
    offender: int
    version: int = VERSION

    def encode(self) -> Tensor:
        """i64[2]."""
        return _words(_front(self), self.voters | self.abstentions << 16 | self.offender << 32)

    @staticmethod
    def decode(words: Sequence[int]) -> "VerdictHeader":
        """From two int64 words."""
        a, b = _unsigned(words)
        return VerdictHeader(_status(a), a >> 16 & 0xFFFF, a >> 32, b & 0xFFFF, b >> 16 & 0xFFFF, b >> 32, a & 0xFF)


def judge(headers: Sequence[BallotHeader], own: BallotHeader) -> tuple[VerdictHeader, list[int]]:
    """The verdict header that follows from every worker's ballot header, and the ranks whose ballots count.

    Priority: layout changed > hyper-parameters (also t, version, bucket) differ > raise > skip. An abstention needs no
    status of its own.
    """
    status, offender = _complaint(headers)
    voters = [rank for rank, header in enumerate(headers) if header.status == Status.OK]
    if status != Status.OK:
        voters = []
    abstentions = sum(header.status != Status.OK for header in headers)
    verdict = VerdictHeader(status, own.bucket, own.t, len(voters), abstentions, offender)
    return verdict, voters


def judge_tolerantly(
    headers: Sequence[BallotHeader], own: BallotHeader
) -> tuple[VerdictHeader, list[int], BallotHeader]:
    """As `judge`, for workers that come and go: a row that is not like the majority's counts as abstaining.

    Returns:
        The verdict header, whose `offender` is the lowest rank with such a row; the ranks whose ballots count; and a
        header with the fields that the majority shares.
    """
    shared = [(header.layout, header.hyper, header.t, header.version, header.bucket) for header in headers]
    common = majority_value(shared)
    usual = headers[shared.index(common)]
    strange = [
        fields != common or header.status >= Status.HYPERPARAMETERS_DIFFER
        for fields, header in zip(shared, headers, strict=True)
    ]
    fine = [rank for rank, odd in enumerate(strange) if not odd]
    skipped = any(headers[rank].status in (Status.SKIP, Status.RAISE) for rank in fine)
    voters = [] if skipped else [rank for rank in fine if headers[rank].status == Status.OK]
    abstentions = sum(odd or header.status != Status.OK for odd, header in zip(strange, headers, strict=True))
    offender = strange.index(True) if any(strange) else NOBODY
    status = Status.SKIP if skipped else Status.OK
    verdict = VerdictHeader(status, usual.bucket, usual.t, len(voters), abstentions, offender)
    return verdict, voters, usual


def worst(headers: Sequence[VerdictHeader], workers: int) -> VerdictHeader:
    """The verdict header that decides for the bucket: every shard's owner wrote one.

    Where they contradict each other, or count more votes than there are workers, it asks for a diagnosis.
    """
    first = max(headers, key=lambda header: header.status)
    said = [replace(header, offender=NOBODY) for header in headers]
    if first.status == Status.OK and (len(set(said)) > 1 or first.voters > workers):
        common = majority_value(said)
        odd = next((owner for owner, header in enumerate(said) if header != common), NOBODY)
        return VerdictHeader(Status.HYPERPARAMETERS_DIFFER, first.bucket, first.t, 0, 0, odd)
    return first


def majority_value(values: Sequence[T]) -> T:
    """The most frequent value; at equality the one that comes first."""
    counts = Counter(values)
    return max(values, key=lambda value: counts[value])


def _complaint(headers: Sequence[BallotHeader]) -> tuple[Status, int]:
    said = [header.status for header in headers]
    layouts = [header.layout for header in headers]
    agreed = _to_agree_on(headers)
    for status, different in (
        (Status.LAYOUT_CHANGED, [s == Status.LAYOUT_CHANGED for s in said]),
        (Status.LAYOUT_CHANGED, [layout != majority_value(layouts) for layout in layouts]),
        (Status.HYPERPARAMETERS_DIFFER, [fields != majority_value(agreed) for fields in agreed]),
        (Status.RAISE, [s == Status.RAISE for s in said]),
        (Status.SKIP, [s == Status.SKIP for s in said]),
    ):
        if any(different):
            return status, different.index(True)
    return Status.OK, NOBODY


def _to_agree_on(headers: Sequence[BallotHeader]) -> list[tuple[int, int, int, int]]:
    """(hyper-parameters, t, version, bucket) of each; who has finished does not apply, and has the common ones."""
    compared = [header.hyper for header in headers if header.status != Status.FINISHED]
    common = majority_value(compared) if compared else 0
    return [
        (common if header.status == Status.FINISHED else header.hyper, header.t, header.version, header.bucket)
        for header in headers
    ]


def _front(header: BallotHeader | VerdictHeader) -> int:
    return header.version | header.status << 8 | (header.bucket & 0xFFFF) << 16 | (header.t & NOBODY) << 32


def _status(front: int) -> Status:
    value = front >> 8 & 0xFF
    return Status(value) if value in Status._value2member_map_ else Status.LAYOUT_CHANGED


def _words(a: int, b: int) -> Tensor:
    return torch.tensor([x - 2**64 if x >= 2**63 else x for x in (a, b)], dtype=torch.int64, device="cpu")


def _unsigned(words: Sequence[int]) -> tuple[int, int]:
    return words[0] % 2**64, words[1] % 2**64
