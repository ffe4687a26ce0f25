"""Bit arithmetic on int64 words, 64 parameters at a time: packing, counting, comparing, hashing."""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = 2**64 - 1

Whole = int | Tensor  # a whole number, or i64[] of one that lies on a device and is not known here


def pack(bits: Tensor) -> Tensor:
    """bool[64*words] -> i64[words], element 64*w + j in bit j of word w."""
    x = bits.view(torch.uint8)
    for shift in (1, 2, 4):
        x = x[0::2] | (x[1::2] << shift)
    return x.view(torch.int64)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in logical order, u8[nbytes]; a view where its memory allows."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() < 2:
        flat = flat.as_strided(flat.shape, (1,))  # up to one element may have any stride, and a view as bytes needs 1
    return flat.view(torch.uint8)


CHECKED_BYTES = 2**16  # at once in `hashed`: bounds its memory, and stays in the cache


def unpack(words: Tensor) -> Tensor:
    """i64[words] -> u8[64*words] of 0 and 1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    return ((as_bytes(words)[:, None] >> shifts) & 1).view(-1)


def levels(planes: Tensor) -> Tensor:
    """i64[k, words] -> i32[64*words]: the binary number of each element, plane 0 its lowest bit."""
    total = torch.zeros(planes.shape[1] * 64, dtype=torch.int32, device=planes.device)
    for k, plane in enumerate(planes):
        total |= unpack(plane).int() << k
    return total


def count(rows: Tensor) -> list[Tensor]:
    """i64[rows, words] -> bit planes, lowest first: in how many rows each bit is set (a bit-sliced adder)."""
    planes: list[Tensor] = []
    for row in rows:
        carry = row
        for k, plane in enumerate(planes):
            planes[k], carry = plane ^ carry, plane & carry
        if len(planes) < (len(rows)).bit_length():
            planes.append(carry)
    return planes


def split(planes: list[Tensor], value: Whole) -> tuple[Tensor, Tensor]:
    """Bits set where the number in `planes` is greater than `value`, and where it is `value`."""
    more = torch.zeros_like(planes[0])
    equal = ~more
    for k in reversed(range(len(planes))):
        differs = planes[k] ^ -(value >> k & 1)  # the bit of the value, in every place of a word
        more = more | (equal & planes[k] & differs)
        equal = equal & ~differs
    return more, equal


def less_or_more(a: list[Tensor], b: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Bits set where the number in planes `a` is less, and where it is more, than the one in `b` (equal lengths)."""
    less = torch.zeros_like(a[0])
    more = torch.zeros_like(a[0])
    for x, y in zip(reversed(a), reversed(b), strict=True):
        undecided = ~(less | more)
        more = more | (undecided & x & ~y)
        less = less | (undecided & ~x & y)
    return less, more


def mix64(a: Whole, word: Whole, r: Whole) -> Tensor:
    """A 64-bit hash of (a, word, r), of each number where one is a tensor: three rounds of the splitmix64 finaliser."""
    x = mixed(a, word, r)
    # a default device of the user's would take what names none
    return x if isinstance(x, Tensor) else torch.tensor(x, device="cpu")


def mixed(a: Whole, word: Whole, r: Whole) -> Whole:
    """`mix64`; a plain number, signed as in an int64, where all three are."""
    return _mixed(_mixed(_mixed(0, a), word), r)


def _mixed(before: Whole, number: Whole) -> Whole:
    """One round; whole numbers are signed, as in an int64."""
    if isinstance(number, int) and isinstance(before, int):
        return _signed(_finalise_int(((before ^ number) + GOLDEN) & MASK))
    number = _signed(number & MASK) if isinstance(number, int) else number
    mixed: Tensor = (before ^ number) + _signed(GOLDEN)  # type: ignore[assignment]
    return _finalise(mixed)


COLUMNS = 61  # of the sums in `digest`; a prime, so that rows which change places rarely end in the same columns


def digest(tensor: Tensor) -> Tensor:
    """A cheap sign that values have not changed, to be compared by `torch.equal`: u8[at most 975].

    The sums of 61 columns of 64-bit words, and what is left over. Cheap is a pass over memory. Made against accidents
    (scaling, clipping, negation, rows that change places), not against somebody who looks for equal digests.
    """
    flat = as_bytes(tensor.detach())
    whole = flat.numel() // (8 * COLUMNS) * (8 * COLUMNS)
    words = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    return torch.cat([as_bytes(words.view(torch.int64).view(-1, COLUMNS).sum(0)), flat[whole:]])


def checksum(tensors: list[Tensor]) -> int:
    """An 8-byte hash, 0 <= hash < 2**64, of the bytes of `tensors` in logical order; 0 where all bytes are 0.

    By the compiled kernel where there is one, whatever kernels an optimizer takes: both give the same number.
    """
    return sum(map(int, _hashes(tensors).values())) & MASK


def half_checksum(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The upper 63 bits of `checksum`, i64[] on `device`: nobody waits for it."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for each in _hashes(tensors).values():
        total = total + each.to(device)
    return _shifted(total, 1)


def _hashes(tensors: list[Tensor]) -> dict[torch.device, Tensor]:
    """The sum of `hashed` over the tensors on each device."""
    totals: dict[torch.device, Tensor] = {}
    for number, tensor in enumerate(tensors):
        mixed = torch.ops.dlion.hashed(tensor.detach(), number)
        totals[mixed.device] = totals[mixed.device] + mixed if mixed.device in totals else mixed
    return totals


def hashed(tensor: Tensor, number: int) -> Tensor:
    """The sum of the 64-bit words of a tensor's bytes in logical order, each hashed with its place: i64[].

    Word w counts as `f(word) * (mix64(number, w, 0) | 1)` modulo 2**64, f the finaliser of `mix64`: a word of 0 adds
    nothing. The last one is filled up with zeros.
    """
    flat = as_bytes(tensor)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    # an accelerator's caches are no matter, and every call there costs the same however short it is
    step = CHECKED_BYTES if flat.device.type == "cpu" else CHECKED_BYTES * 512
    for first in range(0, flat.numel(), step):
        part = flat[first : first + step]
        words = torch.nn.functional.pad(part, (0, -part.numel() % 8)).view(torch.int64)
        position = torch.arange(first // 8, first // 8 + words.numel(), device=words.device)
        total = total + (_finalise(words) * (mix64(number, position, 0) | 1)).sum()
    return total


def _finalise(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(MULTIPLIERS[0])
    x = (x ^ _shifted(x, 27)) * _signed(MULTIPLIERS[1])
    return x ^ _shifted(x, 31)


def _finalise_int(x: int) -> int:
    x = (x ^ x >> 30) * MULTIPLIERS[0] & MASK
    x = (x ^ x >> 27) * MULTIPLIERS[1] & MASK
    return x ^ x >> 31


def _shifted(x: Tensor, n: int) -> Tensor:
    """Logical right shift: int64's own keeps the sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
