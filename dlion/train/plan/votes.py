"""Rows on the wire of everything that dlion sends, byte for byte: buckets, words, padding and headers."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from dlion.train.plan.cluster import Call
from dlion.train.plan.rates import NS, Rates
from dlion.train.plan.sizes import Sizes
from dlion.train.plan.work import Piece, Work

Topology = Literal["auto", "sharded", "replicated", "server"]

# These repeat constants of the optimizer, whose files import torch; a test holds them equal.
WORD_BYTES, WORD_BITS = 8, 64
FULL_BYTES = 4
HEADER_BYTES = 16
BUCKET_BYTES, OVERLAP_BYTES = 2**20, 2**17
DEVICE_BUCKET_BYTES, DEVICE_OVERLAP_BYTES = 2**25, 2**21
REPLICATED_WORDS = 1024
GATHERED = 1024  # numbers of a question


@dataclass(frozen=True)
class Wire:
    """How a vote travels.

    Attributes:
        up, down: planes of a ballot and of a verdict, which are bits for each parameter.
        fused: whether one kernel makes a ballot, and one applies a verdict.
    """

    up: int
    down: int
    fused: bool


def longest_bucket(overlap: bool, on_device: bool) -> int:
    """Bytes of one-bit ballots that travel together unless something else was asked for."""
    if on_device:
        return DEVICE_OVERLAP_BYTES if overlap else DEVICE_BUCKET_BYTES
    return OVERLAP_BYTES if overlap else BUCKET_BYTES


def voted(
    sizes: Sizes,
    workers: int,
    wire: Wire,
    topology: Topology,
    overlap: bool,
    digests: bool,
    bucket_bytes: int,
    rates: Rates,
) -> Work:
    """A vote on every parameter.

    Args:
        digests: whether every step finds out that no gradient changed after its ballot had left.
    """
    longest = bucket_bytes // WORD_BYTES
    words = sizes.aligned(WORD_BITS) // WORD_BITS
    chosen = chosen_topology(topology, workers, words)
    ballots = 1 if chosen == "sharded" else workers  # that a worker counts: everybody's of its shard, or of all
    before, after = rates.generic, 0.0
    if wire.fused:
        before, after = rates.ballot, wire.up * ballots * rates.tally + rates.apply
    if digests:  # gradients are read again for a digest, and once more to find out whether they changed
        before, after = before + rates.copy / 2, after + rates.copy / 2
    pieces = []
    for count, length in cut(words, longest):
        share = sizes.parameters * length / max(words, 1)
        calls = _calls(chosen, wire, length, workers)
        pieces.append((count, Piece(share, calls, share * before * NS, share * after * NS)))
    if overlap:
        pieces.reverse()  # backward makes the gradients of the last layers first
    formula = sizes.parameters / 8 * _bits(chosen, wire, workers)
    return Work(tuple(pieces), "pipelined" if overlap else "none", formula=formula)


def summed(sizes: Sizes, workers: int, update: float, bucket_bytes: int | None, rates: Rates) -> Work:
    """Sums of full-precision messages: everybody's shards to their owners, who add them up in rank order and tell."""
    pieces = []
    calls: tuple[Call, ...]
    for count, length in cut(sizes.parameters, (bucket_bytes or BUCKET_BYTES) // FULL_BYTES):
        row = HEADER_BYTES + FULL_BYTES * ceil(length / workers)
        calls = (Call("all-to-all", row), Call("all-gather", row))
        if workers == 2:
            calls = (Call("all-gather", HEADER_BYTES + FULL_BYTES * length),)
        # the message is copied into rows, the rows of a shard are read once, and the verdict is written
        pieces.append((count, Piece(length, calls, rates.copied(8 * length), rates.copied(12 * length))))
    formula = 2 * (workers - 1) / workers * FULL_BYTES * sizes.parameters
    return Work(tuple(pieces), update=update, formula=formula)


def question(numbers: int, nbytes: int, workers: int) -> tuple[Call, ...]:
    """What all workers must know before ballots: so many numbers put together, each of so many bytes."""
    if workers == 2 or numbers <= GATHERED:
        return (Call("all-gather", numbers * nbytes),)
    row = nbytes * ceil(numbers / workers)
    return Call("all-to-all", row), Call("all-gather", row)


def chosen_topology(topology: Topology, workers: int, words: int) -> Topology:
    """What "auto" means."""
    if topology != "auto":
        return topology
    return "replicated" if workers == 2 or words <= REPLICATED_WORDS else "sharded"


def cut(length: int, longest: int) -> list[tuple[int, int]]:
    """Buckets as (how many, length): at least one, even of nothing."""
    whole, rest = divmod(length, longest)
    found = [(whole, longest), (1, rest)]
    return [(count, length) for count, length in found if count * length] or [(1, 0)]


def _calls(topology: Topology, wire: Wire, words: int, workers: int) -> tuple[Call, ...]:
    if topology == "sharded":
        shard = ceil(words / workers)
        return Call("all-to-all", _row(wire.up * shard)), Call("all-gather", _row(wire.down * shard))
    ballot = _row(wire.up * words)
    if topology == "replicated":
        return (Call("all-gather", ballot),)
    return Call("gather", ballot), Call("send-out", _row(wire.down * words))


def _row(words: int) -> int:
    return HEADER_BYTES + WORD_BYTES * words


def _bits(topology: Topology, wire: Wire, workers: int) -> float:
    """For each parameter, of the worker that sends most."""
    if topology == "sharded":
        return (workers - 1) / workers * (wire.up + wire.down)
    return (workers - 1) * (wire.up if topology == "replicated" else wire.down)
