"""The Triton kernels of headers and of what a step writes down: each is one small program.

They do what `dlion.resident.headers` and `dlion.resident.entries` specify. A program looks at many rows at once, and at
more of them one part after another. Where all rows say the same, which is nearly always, it looks at each a few times;
only where they differ is each compared with each.
"""

import triton
import triton.language as tl

from dlion.header import NOBODY, VERSION, Status
from dlion.resident.entries import Entries

ROWS = 128  # looked at at once
LAUNCH = {"num_warps": 1, "enable_fp_fusion": False}

_VERSION, _NOBODY = tl.constexpr(VERSION), tl.constexpr(NOBODY)
_KNOWN = tl.constexpr(int(max(Status)))
_OK, _SKIP, _RAISE = (tl.constexpr(int(status)) for status in (Status.OK, Status.SKIP, Status.RAISE))
_DIFFER = tl.constexpr(int(Status.HYPERPARAMETERS_DIFFER))
_CHANGED, _FINISHED = tl.constexpr(int(Status.LAYOUT_CHANGED)), tl.constexpr(int(Status.FINISHED))
_VERSION_AND_STATUS, _STATUS = tl.constexpr(0xFFFF), tl.constexpr(0xFF00)

_PLACES = {name: tl.constexpr(place) for place, name in enumerate(Entries._fields)}
_T, _STEPS, _SKIPPED, _ABSTENTIONS = (_PLACES[name] for name in ("t", "steps", "skipped", "abstentions"))
_TROUBLE, _OFFENDER, _SLOT = (_PLACES[name] for name in ("status", "offender", "slot"))
_MOVED, _SKIPS, _RAISES = (_PLACES[name] for name in ("moved", "skips", "raises"))


@triton.jit
def read(headers, stride, number, real):
    """Both words of a header, or of many; zeros where none is `real`."""
    place = headers + number * stride
    return tl.load(place, mask=real, other=0), tl.load(place + 1, mask=real, other=0)


@triton.jit
def status_of(front):
    said = front >> 8 & 0xFF
    return tl.where(said > _KNOWN, _CHANGED, said)


@triton.jit
def fields(headers, stride, number, n, usual, WHAT: tl.constexpr):
    """What is compared of a header, or of many of n: two numbers of each; and whose count.

    Args:
        usual: hyper-parameters that stand for those of workers who have finished.
        WHAT: of ballots "layout", "hyper" or "shared"; or "verdict", all but the offender.
    """
    real = number < n
    front, back = read(headers, stride, number, real)
    finished = status_of(front) == _FINISHED
    if WHAT == "layout":
        return front & 0, back & _NOBODY, real
    elif WHAT == "hyper":
        return front & 0, back >> 32 & _NOBODY, real & ~finished
    elif WHAT == "shared":
        return front & ~_STATUS, tl.where(finished, usual, back >> 32 & _NOBODY), real
    else:
        return front, back & _NOBODY, real


@triton.jit
def first_that_counts(headers, stride, n, WHAT: tl.constexpr, ROWS: tl.constexpr):
    """The number of the first header that counts, n without one."""
    first = n.to(tl.int64)
    for start in range(0, n, ROWS):
        at = start + tl.arange(0, ROWS).to(tl.int64)
        _, _, counts = fields(headers, stride, at, n, 0, WHAT)
        first = tl.minimum(first, tl.min(tl.where(counts, at, n), 0))
    return first


@triton.jit
def first_other(headers, stride, n, usual, model, WHAT: tl.constexpr, ROWS: tl.constexpr):
    """The number of the first header that counts and is not like the one of number `model`, n without one."""
    a, b, _ = fields(headers, stride, model, n, usual, WHAT)
    first = n.to(tl.int64)
    for start in range(0, n, ROWS):
        at = start + tl.arange(0, ROWS).to(tl.int64)
        x, y, counts = fields(headers, stride, at, n, usual, WHAT)
        first = tl.minimum(first, tl.min(tl.where(counts & ((x != a) | (y != b)), at, n), 0))
    return first


@triton.jit
def most_frequent(headers, stride, n, usual, WHAT: tl.constexpr, ROWS: tl.constexpr):
    """The number of the header whose like are most; at equality the first one, and n where none counts."""
    first = first_that_counts(headers, stride, n, WHAT, ROWS)
    differs = first_other(headers, stride, n, usual, first, WHAT, ROWS) < n
    best = _NOBODY - first
    for start in range(0, tl.where(differs, n, 0), ROWS):
        at = start + tl.arange(0, ROWS).to(tl.int64)
        x, y, counts = fields(headers, stride, at, n, usual, WHAT)
        alike = tl.zeros([ROWS], tl.int64)
        for other in range(n):
            a, b, heard = fields(headers, stride, other, n, usual, WHAT)
            alike += (heard & (x == a) & (y == b)).to(tl.int64)
        votes = tl.where(counts, (alike << 32) + (_NOBODY - at), 0)
        best = tl.maximum(best, tl.max(votes, 0))
    return _NOBODY - (best & _NOBODY)


@triton.jit
def first_saying(headers, stride, n, status: tl.constexpr, ROWS: tl.constexpr):
    """The number of the first header with this status, n without one; and how many have it."""
    first, number = n.to(tl.int64), (n & 0).to(tl.int64)
    for start in range(0, n, ROWS):
        at = start + tl.arange(0, ROWS).to(tl.int64)
        front, _ = read(headers, stride, at, at < n)
        says = (at < n) & (status_of(front) == status)
        first = tl.minimum(first, tl.min(tl.where(says, at, n), 0))
        number += tl.sum(says.to(tl.int64), 0)
    return first, number


@triton.jit
def complaint(headers, stride, n, ROWS: tl.constexpr):
    """The status that follows and the lowest rank that caused it; OK and NOBODY where all is well."""
    skips, _ = first_saying(headers, stride, n, _SKIP, ROWS)
    raises, _ = first_saying(headers, stride, n, _RAISE, ROWS)
    changed, _ = first_saying(headers, stride, n, _CHANGED, ROWS)
    common = most_frequent(headers, stride, n, 0, "layout", ROWS)
    layout = first_other(headers, stride, n, 0, common, "layout", ROWS)
    common = most_frequent(headers, stride, n, 0, "hyper", ROWS)
    _, back = read(headers, stride, common, common < n)
    usual = back >> 32 & _NOBODY
    common = most_frequent(headers, stride, n, usual, "shared", ROWS)
    shared = first_other(headers, stride, n, usual, common, "shared", ROWS)
    status, offender = tl.where(skips < n, _SKIP, _OK), tl.where(skips < n, skips, _NOBODY)
    status, offender = tl.where(raises < n, _RAISE, status), tl.where(raises < n, raises, offender)
    status, offender = tl.where(shared < n, _DIFFER, status), tl.where(shared < n, shared, offender)
    status, offender = tl.where(layout < n, _CHANGED, status), tl.where(layout < n, layout, offender)
    return tl.where(changed < n, _CHANGED, status).to(tl.int64), tl.where(changed < n, changed, offender)


@triton.jit
def write_roster(roster, headers, stride, n, voters, ROWS: tl.constexpr):
    """How many vote and the ranks of all: of those who vote, who said OK, and of the others; without voters of all."""
    tl.store(roster, voters)
    before = voters & 0
    for start in range(0, n, ROWS):
        at = start + tl.arange(0, ROWS).to(tl.int64)
        front, _ = read(headers, stride, at, at < n)
        votes = ((at < n) & (status_of(front) == _OK) & (voters > 0)).to(tl.int64)
        ahead = before + tl.cumsum(votes, 0) - votes
        tl.store(roster + 1 + tl.where(votes > 0, ahead, voters + at - ahead), at, mask=at < n)
        before += tl.sum(votes, 0)


@triton.jit(do_not_specialize=list(range(9)))
def ballot_header(
    header, finite, awake, clock, hyper, front: tl.int64, layout: tl.int64, bad: tl.int64, why: tl.int64
):  # fmt: skip
    """The header of a ballot.

    Args:
        header: i64[2]. finite, awake: bool[1], or None as in `headers.ballot_header`. clock: i64[1], t. hyper: i64[1].
        front: version and bucket, in their places. layout: 32 bits. bad, why: statuses.
    """
    status = why
    if finite is not None:
        status = tl.where(tl.load(finite), _OK, bad)
        if awake is not None:
            status = tl.where(tl.load(awake), status, why)
    tl.store(header, front | status << 8 | (tl.load(clock) & _NOBODY) << 32)
    tl.store(header + 1, layout | tl.load(hyper) << 32)


@triton.jit(do_not_specialize=list(range(6)))
def judge(header, roster, headers, own, stride: tl.int64, workers: tl.int32, ROWS: tl.constexpr):
    """From everybody's ballot headers to a verdict's, and to the roster.

    Args:
        header: i64[2]. roster: i64[1 + workers]. headers: i64, two words every `stride`. own: i64[2].
        ROWS: of headers looked at at once.
    """
    status, offender = complaint(headers, stride, workers, ROWS)
    _, fine = first_saying(headers, stride, workers, _OK, ROWS)
    voters = tl.where(status == _OK, fine, 0)
    tl.store(header, tl.load(own) & ~_VERSION_AND_STATUS | _VERSION | status << 8)
    tl.store(header + 1, voters | (workers - fine) << 16 | offender << 32)
    write_roster(roster, headers, stride, workers, voters, ROWS)


@triton.jit
def worst(headers, stride, owners, workers, ROWS: tl.constexpr):
    """Of the verdict header that decides: the status, and the second word."""
    best = (owners & 0).to(tl.int64)
    for start in range(0, owners, ROWS):
        at = start + tl.arange(0, ROWS).to(tl.int64)
        front, _ = read(headers, stride, at, at < owners)
        found = tl.where(at < owners, (status_of(front) << 32) + (_NOBODY - at), 0)
        best = tl.maximum(best, tl.max(found, 0))
    status, first = best >> 32, _NOBODY - (best & _NOBODY)
    _, back = read(headers, stride, first, first < owners)
    common = most_frequent(headers, stride, owners, 0, "verdict", ROWS)
    odd = first_other(headers, stride, owners, 0, common, "verdict", ROWS)
    contradicted = (status == _OK) & ((odd < owners) | ((back & 0xFFFF) > workers))
    accused = tl.where(odd < owners, odd, _NOBODY) << 32
    return tl.where(contradicted, _DIFFER, status), tl.where(contradicted, accused, back)


@triton.jit(do_not_specialize=list(range(6)))
def enter(entries, voters, headers, stride: tl.int64, owners: tl.int32, workers: tl.int32, ROWS: tl.constexpr):
    """Write down what follows from the verdict headers of a bucket, and how many voters' verdict may be applied.

    Args:
        entries: i64, in the order of `Entries`. voters: i64[1]. headers: i64, two words every `stride`.
        ROWS: of headers looked at at once.
    """
    status, back = worst(headers, stride, owners, workers, ROWS)
    well = tl.load(entries + _TROUBLE) == _OK
    refused = well & (status >= _DIFFER)
    tl.store(entries + _OFFENDER, back >> 32 & _NOBODY, mask=refused)
    tl.store(entries + _SLOT, -1, mask=refused)
    tl.store(entries + _TROUBLE, status, mask=refused)
    votes = tl.where(well & ~refused, back & 0xFFFF, 0)
    abstained = tl.where(well & ~refused, back >> 16 & 0xFFFF, 0)
    tl.store(entries + _ABSTENTIONS, tl.load(entries + _ABSTENTIONS) + abstained)
    tl.store(entries + _MOVED, tl.load(entries + _MOVED) | (votes > 0).to(tl.int64))
    tl.store(entries + _SKIPS, tl.load(entries + _SKIPS) | (status == _SKIP).to(tl.int64))
    tl.store(entries + _RAISES, tl.load(entries + _RAISES) | (status == _RAISE).to(tl.int64))
    tl.store(voters, votes)


@triton.jit
def close(entries):
    """The step is over: count it if it was not refused. entries: i64, in the order of `Entries`."""
    well = (tl.load(entries + _TROUBLE) == _OK).to(tl.int64)
    moved = tl.load(entries + _MOVED) * well
    tl.store(entries + _T, tl.load(entries + _T) + moved)
    tl.store(entries + _STEPS, tl.load(entries + _STEPS) + well)
    tl.store(entries + _SKIPPED, tl.load(entries + _SKIPPED) + (well - moved))
