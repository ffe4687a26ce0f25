"""`dlion.header` on the device: who may vote and what decides, from rows of headers that no host reads.

Every function gives, for every input, the bits of its namesake there. Headers are i64[2], laid out as there.
"""

import torch
from torch import Tensor

from dlion.header import NOBODY, VERSION, Status
from dlion.resident.counting import roster_of

BYTE = 0xFF
STATUS = BYTE << 8  # its place in the first word
KNOWN = max(Status)


def encode(status: Tensor, bucket: int, t: Tensor, layout: int, hyper: Tensor) -> Tensor:
    """The header of a ballot, i64[2].

    Args:
        status, t: i64[]. bucket, layout: what the host knows; their lowest 16 and 32 bits count.
        hyper: i64[], fingerprint of the hyper-parameters, 32 bits.
    """
    front = (VERSION | (bucket & 0xFFFF) << 16) | status << 8 | (t & NOBODY) << 32
    return torch.stack([front, layout & NOBODY | hyper << 32])


def ballot_header(
    finite: Tensor | None,
    awake: Tensor | None,
    bad: Status,
    why: Status,
    bucket: int,
    t: Tensor,
    layout: int,
    hyper: Tensor,
) -> Tensor:
    """The header of this worker's ballot, i64[2].

    Args:
        finite: bool[], whether its gradients were, else the status is `bad`; None where it abstains, because of `why`.
        awake: bool[], whether it does not abstain because of `why`; None where it does not.
        bucket, t, layout, hyper: as in `encode`.
    """
    status = torch.full_like(t, why if finite is None else bad)
    if finite is not None:
        status = status.masked_fill(finite, Status.OK)
        if awake is not None:
            status = status.masked_fill(~awake, why)
    return encode(status, bucket, t, layout, hyper)


def judge(headers: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """What follows from every worker's ballot header, i64[workers, 2]: the verdict's, and the roster of who votes.

    Args:
        own: i64[2], this worker's.

    Returns:
        i64[2], and i64[1 + workers] as in `dlion.resident.counting`.
    """
    said = status_of(headers)
    status, offender = _complaint(headers, said)
    voting = (said == Status.OK) & (status == Status.OK)
    abstentions = (said != Status.OK).sum()
    front = own[0] & ~(STATUS | BYTE) | VERSION | status << 8
    return torch.stack([front, voting.sum() | abstentions << 16 | offender << 32]), roster_of(voting)


def worst(headers: Tensor, workers: int) -> Tensor:
    """The verdict header that decides for the bucket, i64[2], from those of all owners of shards, i64[owners, 2]."""
    said = status_of(headers)
    first = _at(headers, _first_most(said))
    status = said.amax()
    what = torch.stack([headers[:, 0], headers[:, 1] & NOBODY], 1)  # without offenders
    odd, owner = _differing(what)
    contradiction = (status == Status.OK) & (odd | (voters_of(first) > workers))
    plain = first[0] & ~STATUS | status << 8
    accused = first[0] & ~(STATUS | BYTE) | VERSION | Status.HYPERPARAMETERS_DIFFER << 8
    return torch.stack([torch.where(contradiction, accused, plain), torch.where(contradiction, owner << 32, first[1])])


def status_of(headers: Tensor) -> Tensor:
    """i64[..., 2] -> i64[...]; an unknown one counts as a changed layout."""
    said = headers[..., 0] >> 8 & BYTE
    return said.masked_fill(said > KNOWN, Status.LAYOUT_CHANGED)


def voters_of(verdicts: Tensor) -> Tensor:
    """i64[..., 2] -> i64[...]."""
    return verdicts[..., 1] & 0xFFFF


def abstentions_of(verdicts: Tensor) -> Tensor:
    """i64[..., 2] -> i64[...]."""
    return verdicts[..., 1] >> 16 & 0xFFFF


def offender_of(verdicts: Tensor) -> Tensor:
    """i64[..., 2] -> i64[...], NOBODY where nobody is one."""
    return verdicts[..., 1] >> 32 & NOBODY


def _complaint(headers: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
    """The status that follows and the lowest rank that caused it; OK and NOBODY where all is well."""
    layout, hyper = headers[:, 1] & NOBODY, headers[:, 1] >> 32 & NOBODY
    finished = said == Status.FINISHED
    everybody = torch.ones_like(finished)
    common = _at(hyper, _common(hyper[:, None], ~finished)).masked_fill(finished.all(), 0)
    shared = torch.stack([headers[:, 0] & ~STATUS, torch.where(finished, common, hyper)], 1)
    found = torch.stack(
        [
            said == Status.LAYOUT_CHANGED,
            layout != _at(layout, _common(layout[:, None], everybody)),
            (shared != _at(shared, _common(shared, everybody))).any(1),
            said == Status.RAISE,
            said == Status.SKIP,
            everybody,
        ]
    )
    # the first two say LAYOUT_CHANGED, 5; then come 4, 3, 2, and the last says that all is well
    place = _first_most(found.any(1).long())
    well = place == 5
    first = _first_most(_at(found, place).long())
    return (6 - place.clamp(min=1)).masked_fill(well, Status.OK), first.masked_fill(well, NOBODY)


def _differing(values: Tensor) -> tuple[Tensor, Tensor]:
    """Of i64[n, k], whether some row is not the most frequent one, bool[]; and the first such or NOBODY, i64[]."""
    everybody = torch.ones_like(values[:, 0], dtype=torch.bool)
    odd = (values != _at(values, _common(values, everybody))).any(1)
    some = odd.any()
    return some, _first_most(odd.long()).masked_fill(~some, NOBODY)


def _common(values: Tensor, among: Tensor) -> Tensor:
    """The place of the most frequent row of i64[n, k] among those of bool[n]; at equality the first one. i64[]."""
    equal = (values[:, None] == values[None]).all(2) & among
    return _first_most(equal.sum(1) * among)


def _first_most(values: Tensor) -> Tensor:
    """The first place of the largest of i64[n], which are not negative, i64[]."""
    n = len(values)
    return (values * n - torch.arange(n, device=values.device)).argmax()


def _at(values: Tensor, place: Tensor) -> Tensor:
    """`values[place]` for an i64[]; Python's own brackets would read it."""
    return values.index_select(0, place.view(1)).squeeze(0)
