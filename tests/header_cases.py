"""Headers as workers, faulty ones too, may send them, for the tests of what judges them."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from dlion.header import NOBODY, BallotHeader, Status, VerdictHeader

MOODS = (
    (Status.OK,),
    (Status.OK, Status.ABSTAIN),
    (Status.OK, Status.FINISHED),
    (Status.OK, Status.OK, Status.SKIP),
    (Status.OK, Status.OK, Status.RAISE),
    tuple(Status),
)


def ballot_header(chance: random.Random, few: int, mood: Sequence[Status] = tuple(Status)) -> BallotHeader:
    """Of few different values, so that some agree; at times with the greatest ones."""
    pick = [0, 1, 2**16 - 1, 2**31, NOBODY][:few]
    return BallotHeader(
        chance.choice(mood),
        chance.choice(pick) & 0xFFFF,
        chance.choice(pick),
        chance.choice(pick),
        chance.choice(pick),
        chance.choice([1, 1, 1, 255][: few + 1]),
    )


def verdict_header(chance: random.Random, few: int) -> VerdictHeader:
    pick = [0, 1, 2, 2**16 - 1, NOBODY][:few]
    return VerdictHeader(
        chance.choice([Status.OK] * 9 + [*Status]),
        chance.choice(pick) & 0xFFFF,
        chance.choice(pick),
        chance.choice(pick) & 0xFFFF,
        chance.choice(pick) & 0xFFFF,
        chance.choice(pick),
        chance.choice([1] * 9 + [7]),
    )


def noise(chance: random.Random) -> Tensor:
    """Sixteen bytes of anybody's."""
    return torch.tensor([chance.getrandbits(64) - 2**63 for _ in range(2)])


def ballot_rows(chance: random.Random, workers: int) -> list[Tensor]:
    """What all workers say: all alike, or some with other fields, or bytes of anybody's among them."""
    few, noisy, mood = chance.choice([1, 1, 2, 5]), chance.choice([0, 0, 0.2]), chance.choice(MOODS)
    odd = chance.randrange(2 * workers)  # a rank of other fields than the others have
    return [
        noise(chance) if chance.random() < noisy else ballot_header(chance, 5 if rank == odd else few, mood).encode()
        for rank in range(workers)
    ]


def verdict_rows(chance: random.Random, owners: int) -> list[Tensor]:
    """What all owners of shards say, mostly the same."""
    few = chance.choice([1, 1, 2, 5])
    one = verdict_header(chance, few)
    return [
        noise(chance)
        if chance.random() < 0.02
        else (one if chance.random() < 0.8 else verdict_header(chance, few)).encode()
        for _ in range(owners)
    ]
