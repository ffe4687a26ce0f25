"""The Triton kernels that count ballots: never unpacked, by a carry-save adder over words, 64 elements in each.

A program takes a run of words of all ballots, four ballots at a time, 16 bytes at a time where they lie at multiples of
that. Kernels are compiled once for each number of planes that a count needs: for up to 7 workers, 15, 31 and so on. t
and who votes are read from device memory: a roster is the number of voters, and then the rows of their ballots. Where
nobody votes every verdict is zeros.
"""

import triton
import triton.language as tl

WORDS = 256  # of a program: 16 bytes for each of its 128 threads
LAUNCH = {"WORDS": WORDS, "num_warps": 4, "enable_fp_fusion": False}


def planes_for(rows: int) -> int:
    """How many a count of so many takes, and three at least, which adding four at a time fills."""
    return max(3, rows.bit_length())


@triton.jit
def row(words, number, stride, start, ALIGNED: tl.constexpr):
    """Pointer to word `start` of a row."""
    first = words + (number * stride + start)
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first


@triton.jit
def nobody(at, PLANES: tl.constexpr):
    """A count of nothing."""
    zero = tl.zeros_like(at).to(tl.int64)
    planes = (zero,)
    for _ in tl.static_range(1, PLANES):
        planes = planes + (zero,)
    return planes


@triton.jit
def summed(a, b, c):
    """sum, carry: a + b + c = sum + 2*carry, in every bit."""
    half = a ^ b
    return half ^ c, (a & b) | (half & c)


@triton.jit
def counted(planes, a, b, c, d, PLANES: tl.constexpr):
    """A count with four rows more."""
    ones, first = summed(planes[0], a, b)
    ones, second = summed(ones, c, d)
    twos, carry = summed(planes[1], first, second)
    more = (ones, twos)
    for k in tl.static_range(2, PLANES):
        more = more + (planes[k] ^ carry,)
        carry = planes[k] & carry
    return more


@triton.jit
def rows_of(ranks, k, voters):
    """The rows of voters k to k + 3; where there are fewer, any."""
    a = tl.load(ranks + k)
    b = tl.load(ranks + k + 1, mask=k + 1 < voters, other=0)
    c = tl.load(ranks + k + 2, mask=k + 2 < voters, other=0)
    d = tl.load(ranks + k + 3, mask=k + 3 < voters, other=0)
    return a, b, c, d


@triton.jit
def one(words, number, real, stride, start, at, length, NONE: tl.constexpr, WHOLE: tl.constexpr):
    """Words of a row; all NONE where it is not `real`."""
    return tl.load(row(words, number, stride, start, WHOLE) + at, mask=at < tl.where(real, length, 0), other=NONE)


@triton.jit
def four(words, rows, k, voters, stride, start, at, length, NONE: tl.constexpr, WHOLE: tl.constexpr):
    """Words of voters k to k + 3, which lie in these rows."""
    a = one(words, rows[0], k < voters, stride, start, at, length, NONE, WHOLE)
    b = one(words, rows[1], k + 1 < voters, stride, start, at, length, NONE, WHOLE)
    c = one(words, rows[2], k + 2 < voters, stride, start, at, length, NONE, WHOLE)
    d = one(words, rows[3], k + 3 < voters, stride, start, at, length, NONE, WHOLE)
    return a, b, c, d


@triton.jit
def count_of(words, ranks, voters, stride, start, at, length, PLANES: tl.constexpr, WHOLE: tl.constexpr):
    """In how many voters' ballots each bit is set, in planes, lowest first."""
    planes = nobody(at, PLANES)
    for k in range(0, voters, 4):
        a, b, c, d = four(words, rows_of(ranks, k, voters), k, voters, stride, start, at, length, 0, WHOLE)
        planes = counted(planes, a, b, c, d, PLANES)
    return planes


@triton.jit
def counts_of(
    nonzero, positive, ranks, voters, stride, start, at, length,
    ZEROS: tl.constexpr, PLANES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """How many voted for each element; and how many against, or with ZEROS how many said zero."""
    ayes, others = nobody(at, PLANES), nobody(at, PLANES)
    for k in range(0, voters, 4):
        rows = rows_of(ranks, k, voters)
        a, b, c, d = four(positive, rows, k, voters, stride, start, at, length, 0, WHOLE)
        e, f, g, h = four(nonzero, rows, k, voters, stride, start, at, length, -1 if ZEROS else 0, WHOLE)
        ayes = counted(ayes, a, b, c, d, PLANES)
        if ZEROS:
            others = counted(others, ~e, ~f, ~g, ~h, PLANES)
        else:
            others = counted(others, e & ~a, f & ~b, g & ~c, h & ~d, PLANES)
    return ayes, others


@triton.jit
def split(planes, value, PLANES: tl.constexpr):
    """Bits where the number in the planes is more than, and where it is, `value`."""
    more = tl.zeros_like(planes[0])
    equal = ~more
    for plane in tl.static_range(PLANES - 1, -1, -1):
        wanted = (0 - (value >> plane & 1)).to(tl.int64)
        more |= equal & planes[plane] & ~wanted
        equal &= ~(planes[plane] ^ wanted)
    return more, equal


@triton.jit
def compared(a, b, PLANES: tl.constexpr):
    """Bits where the number in planes `a` is more than, and where it is, the one in planes `b`."""
    more = tl.zeros_like(a[0])
    equal = ~more
    for plane in tl.static_range(PLANES - 1, -1, -1):
        more |= equal & a[plane] & ~b[plane]
        equal &= ~(a[plane] ^ b[plane])
    return more, equal


@triton.jit
def alternating(t, word):
    """All bits of every second word and step."""
    return ((t + word) % 2) - 1


@triton.jit
def majority_words(
    ballots, ranks, verdict, t, voters, row_stride, plane_stride, words, first_word, start,
    TERNARY: tl.constexpr, TIES: tl.constexpr, PLANES: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, WORDS)
    length = WORDS if WHOLE else tl.minimum(words - start, WORDS).to(tl.int32)
    real = at < length
    some = tl.maximum(voters, 1)
    turn = (((t // 2 + first_word + start) % some).to(tl.int32) + at) % some
    if TERNARY:
        positive = ballots + plane_stride
        ayes, nays = counts_of(ballots, positive, ranks, voters, row_stride, start, at, length, False, PLANES, WHOLE)
        more, tied = compared(ayes, nays, PLANES)
        somebody, decider = tl.zeros_like(tied), tl.zeros_like(tied)
        if TIES != "zero":
            for _ in range(voters):
                open = real & (tied & ~somebody != 0)
                theirs = start + tl.load(ranks + turn, mask=open, other=0) * row_stride + at
                decider |= tl.load(positive + theirs, mask=open, other=0) & ~somebody
                somebody |= tl.load(ballots + theirs, mask=open, other=0)
                turn = tl.where(turn + 1 < voters, turn + 1, 0)
        if TIES == "alternate":
            decider = alternating(t, first_word + start + at) & somebody
        tl.store(row(verdict, 0, words, start, WHOLE) + at, ~tied | somebody, mask=real)
        tl.store(row(verdict, 1, words, start, WHOLE) + at, more | (tied & decider), mask=real)
    else:
        ayes = count_of(ballots, ranks, voters, row_stride, start, at, length, PLANES, WHOLE)
        more, tied = split(ayes, voters // 2, PLANES)
        tied = tl.where((voters % 2 == 0) & (voters > 0), tied, 0)
        if TIES == "rotate":
            open = real & (tied != 0)
            theirs = start + tl.load(ranks + turn, mask=open, other=0) * row_stride + at
            decider = tl.load(ballots + theirs, mask=open, other=0)
        else:
            decider = alternating(t, first_word + start + at)
        tl.store(row(verdict, 0, words, start, WHOLE) + at, more | (tied & decider), mask=real)


@triton.jit(do_not_specialize=list(range(8)))
def majority(
    ballots, roster, verdict, row_stride: tl.int64, plane_stride: tl.int64, words: tl.int64,
    clock, first_word: tl.int64,
    TERNARY: tl.constexpr, TIES: tl.constexpr, PLANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The verdict of most ballots.

    Args:
        ballots: i64, a row of words every `row_stride`; with TERNARY two, `plane_stride` apart.
        roster: i64[1 + rows]. verdict: i64[1 or 2, words].
        clock: i64[1], t. first_word: as in `reference.tally_majority`.
        TIES: "rotate", "alternate" or, with TERNARY, "zero". PLANES: of a count. WORDS: of a program.
    """
    start = tl.program_id(0).to(tl.int64) * WORDS
    t, voters = tl.load(clock), tl.load(roster).to(tl.int32)
    places = (ballots.to(tl.int64) | verdict.to(tl.int64)) % 16 + (row_stride | plane_stride | words) % 2
    if (start + WORDS <= words) & (places == 0):
        majority_words(
            ballots, roster + 1, verdict, t, voters, row_stride, plane_stride, words, first_word, start,
            TERNARY, TIES, PLANES, WORDS, True,
        )  # fmt: skip
    else:
        majority_words(
            ballots, roster + 1, verdict, t, voters, row_stride, plane_stride, words, first_word, start,
            TERNARY, TIES, PLANES, WORDS, False,
        )  # fmt: skip


@triton.jit
def put(
    planes, verdict, words, start, at, real, USED: tl.constexpr, WANTED: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Write so many planes as are wanted; those that no number needs are 0."""
    for k in tl.static_range(WANTED):
        bits = planes[k] if k < USED else tl.zeros_like(planes[0])
        tl.store(row(verdict, k, words, start, WHOLE) + at, bits, mask=real)


@triton.jit
def count_words(
    ballots, ranks, verdict, voters, row_stride, plane_stride, words, start,
    TERNARY: tl.constexpr, WANTED: tl.constexpr, PLANES: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, WORDS)
    length = WORDS if WHOLE else tl.minimum(words - start, WORDS).to(tl.int32)
    real = at < length
    if TERNARY:
        positive = ballots + plane_stride
        ayes, zeros = counts_of(ballots, positive, ranks, voters, row_stride, start, at, length, True, PLANES, WHOLE)
        total = (zeros[0],)  # the sum of the votes plus the number of voters: twice those in favour, and once the zeros
        carry = tl.zeros_like(zeros[0])
        for k in tl.static_range(1, PLANES):
            both, carry = summed(zeros[k], ayes[k - 1], carry)
            total = total + (both,)
        total = total + (ayes[PLANES - 1] ^ carry,)
        put(total, verdict, words, start, at, real, PLANES + 1, WANTED, WHOLE)
    else:
        ayes = count_of(ballots, ranks, voters, row_stride, start, at, length, PLANES, WHOLE)
        put(ayes, verdict, words, start, at, real, PLANES, WANTED, WHOLE)


@triton.jit(do_not_specialize=list(range(6)))
def count(
    ballots, roster, verdict, row_stride: tl.int64, plane_stride: tl.int64, words: tl.int64,
    TERNARY: tl.constexpr, WANTED: tl.constexpr, PLANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """How many voted +1; with TERNARY the sum of the votes plus the number of voters.

    Args:
        ballots, roster, row_stride, plane_stride: as in `majority`. verdict: i64[WANTED, words], lowest plane first.
        PLANES: of a count. WORDS: of a program.
    """
    start = tl.program_id(0).to(tl.int64) * WORDS
    voters = tl.load(roster).to(tl.int32)
    places = (ballots.to(tl.int64) | verdict.to(tl.int64)) % 16 + (row_stride | plane_stride | words) % 2
    if (start + WORDS <= words) & (places == 0):
        count_words(
            ballots, roster + 1, verdict, voters, row_stride, plane_stride, words, start,
            TERNARY, WANTED, PLANES, WORDS, True,
        )  # fmt: skip
    else:
        count_words(
            ballots, roster + 1, verdict, voters, row_stride, plane_stride, words, start,
            TERNARY, WANTED, PLANES, WORDS, False,
        )  # fmt: skip
