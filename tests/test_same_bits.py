"""The bits of parameters and momenta follow from the votes alone, not from how they are computed and travel."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from odd_tensors import make_model, same, set_gradients
from torch import Tensor
from world import succeed, world

from dlion import Distributed
from dlion.ops import library

WORKERS, STEPS = 4, 3  # an even number, so that there are ties
REFERENCE = "reference"
VOTES: list[dict[str, Any]] = [
    {"ties": "rotate"},
    {"zeros": "exact", "ties": "alternate"},
    {"method": "dlion-avg"},
    {"method": "dlion-avg", "zeros": "exact"},
    {"method": "d-signum-mavo"},
]
NUMBERS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.float32, {"momentum_dtype": torch.bfloat16}),
    (torch.bfloat16, {}),
    (torch.float16, {"rounding": "nearest"}),
    (torch.float64, {}),
]
TOPOLOGIES = ("sharded", "replicated", "server")
BUCKETS = (8, 40, 2**20)  # bytes: a word, five words, more than all
PARTS = 16  # of all ways, one for each kind of votes and numbers in turn: each way is tried with some of them


def instruction_sets() -> list[str]:
    """The reference, and the compiled kernels on every instruction set that runs here."""
    found = [REFERENCE]
    for path in library.PATHS[1:] if library.available() else ():
        try:
            library.use_path(path)
        except ValueError:
            continue
        found.append(path)
    if library.available():
        library.use_path("auto")
    return found


PATHS = instruction_sets()
WAYS = list(itertools.product(PATHS, TOPOLOGIES, BUCKETS, (False, True)))
KINDS = list(itertools.product(VOTES, NUMBERS))


@pytest.fixture
def own_path() -> Iterator[None]:
    yield
    if library.available():
        library.use_path("auto")


def trained(rank: int, group: Any, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """A worker's parameters and momenta after each step: votes of random numbers, of zeros and of no gradients."""
    model, source = make_model(dtype), make_model(dtype)
    optimizer = Distributed(model.named_parameters(), lr=1e-3, weight_decay=0.1, process_group=group, **options)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        set_gradients(source, rank, step)
        pairs = [
            (p, s.grad) for p, s in zip(model.parameters(), source.parameters(), strict=True) if s.grad is not None
        ]
        # no abstentions: their unit is the bucket, so that they depend on its size
        sum(((p * grad.nan_to_num(0, 1, -1)).sum() for p, grad in pairs), torch.zeros((), dtype=dtype)).backward()
        optimizer.step()
        seen += [p.detach().clone() for p in model.parameters()]
        seen += [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    return seen


@pytest.mark.wide(12)
@pytest.mark.parametrize("number", range(len(KINDS)), ids=lambda number: str(KINDS[number]))
def test_the_bits_depend_on_nothing_but_the_votes(number: int, own_path: None) -> None:
    votes, (dtype, precision) = KINDS[number]
    plain = {"kernels": REFERENCE, "topology": "replicated", "bucket_bytes": 2**20}
    wanted = succeed(world(WORKERS, lambda r, g: trained(r, g, dtype, **votes, **precision, **plain)))
    assert not all(map(torch.equal, wanted[0], wanted[1]))  # momenta are each worker's own
    for path in PATHS:
        ways = [way for way in WAYS[number % PARTS :: PARTS] if way[0] == path]
        kernels = REFERENCE if path == REFERENCE else "native"
        if path != REFERENCE:
            library.use_path(path)
        options = [
            {"kernels": kernels, "topology": topology, "bucket_bytes": size, "overlap": overlap}
            for _, topology, size, overlap in ways
        ]

        def work(rank: int, group: Any, options: list[dict[str, Any]] = options) -> list[list[Tensor]]:
            return [trained(rank, group, dtype, **votes, **precision, **each) for each in options]

        found = succeed(world(WORKERS, work))
        for rank, results in enumerate(found):
            for way, result in zip(ways, results, strict=True):
                assert all(map(same, result, wanted[rank])), (rank, way)


def test_every_pair_of_choices_is_tried() -> None:
    tried = {way for number in range(len(KINDS)) for way in WAYS[number % PARTS :: PARTS]}
    assert tried == set(WAYS)
    for votes in VOTES:
        numbers = [number for number, (kind, _) in enumerate(KINDS) if kind is votes]
        with_these = {way for number in numbers for way in WAYS[number % PARTS :: PARTS]}
        for axis in range(4):
            assert {way[axis] for way in with_these} == {way[axis] for way in WAYS}
