"""Where the workers of an elastic group stand, and what follows: pure functions of one row from each.

A state of the parameters is named by a version (round, position): the round of the group that committed its last
step, and how many steps were committed. A round is greater than any that one of its members has seen, and ends in a
hash of its members' processes, so that no two groups have the same one. A round that failed is left for good, so it
exchanges each position at most once: a version names one state.

Why replicas stay equal. (1) A worker applies a step only when an all-gather told it that every worker concerned holds
the same verdicts: its round's (the commit), or those of all who stand where it stands in a later round
(`resolves`). (2) Who fails in that all-gather does not know whether somebody applied. It keeps its verdicts
until the next round tells: if a member is one step ahead in the round of these verdicts, they are applied now, without
a vote; if everybody at its step holds them, all apply; else nobody among the members applied them, and the ballots are
sent again. (3) Somebody who applied, and is not a member of the next round, has a version (round, position) that is
less than what the next round commits; when it comes back it receives the state of the others. Versions are unique and
grow along every history that a majority took, so whoever has the greatest one is right.

Membership changes only where a quorum of `min_workers` agrees, by default more than half of all, so that two halves of
a broken network never train apart.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dlion.errors import ExchangeError
from dlion.header import majority_value

ROW_BYTES = 512  # of a standing and its note: as quick as fewer, since one small message takes a hop whatever its size
NOTHING = 0  # no round
GREATEST = 2**62  # of rounds and steps: what comes next must still be a number of 64 bits
STRANGE = "use the same version of dlion everywhere, and look at what runs on the workers"
HASH_BITS = 20  # of a round's number
Version = tuple[int, int]


@dataclass(frozen=True)
class Standing:
    """What one worker says of itself.

    Attributes:
        round, position: the version of its parameters.
        held: the round whose verdicts on the step after `position` it holds and has not applied, or NOTHING.
        t: applied verdicts, as its optimizer counts them.
        hyper, layout: fingerprints of hyper-parameters, and of layout and options.
        checksum: of the parameters and shared state where it was asked for, else 0.
        seasoned: 1 if its momentum is its own, 0 if it needs one.
        note: of the caller, JSON of few bytes.
    """

    round: int
    position: int
    held: int
    t: int
    hyper: int
    layout: int
    checksum: int
    seasoned: int
    note: Any = None

    @property
    def version(self) -> Version:
        return self.round, self.position

    def encode(self) -> Tensor:
        """u8[ROW_BYTES].

        Raises:
            ValueError: the note is too long.
        """
        text = json.dumps(self.note, separators=(",", ":")).encode()
        numbers = torch.tensor(astuple(self)[:-1], dtype=torch.int64, device="cpu").view(torch.uint8)
        room = ROW_BYTES - numbers.numel()
        if len(text) > room:
            raise ValueError(f"the note of a step takes {len(text)} bytes as JSON, and {room} are allowed: say less")
        padded = bytearray(text.ljust(room))
        return torch.cat([numbers, torch.frombuffer(padded, dtype=torch.uint8)])

    @staticmethod
    def decode(row: Tensor) -> "Standing":
        """From u8[ROW_BYTES].

        Raises:
            ExchangeError: no worker stands so.
        """
        row = row.cpu().contiguous()
        numbers: list[int] = row[: NUMBERS * 8].clone().view(torch.int64).tolist()
        names = [one.name for one in fields(Standing)]
        try:
            note = json.loads(bytes(row[NUMBERS * 8 :].tolist()))
        except (ValueError, RecursionError) as error:
            raise ExchangeError(f"a worker sent a note that is no JSON ({error}): {STRANGE}") from None
        found = Standing(**dict(zip(names, [*numbers, note], strict=True)))
        if not all(0 <= number < GREATEST for number in (found.round, found.position, found.held, found.t)):
            raise ExchangeError(f"a worker says that it is at step {found.position} of round {found.round}: {STRANGE}")
        return found


NUMBERS = 8  # fields of a standing beside its note


def ahead(standings: Sequence[Standing]) -> Version:
    """The version that everybody goes on from.

    The greatest: with a later round goes a group that a majority of all workers belonged to, and whose members may
    have committed.
    """
    return max(standing.version for standing in standings)


def resolves(mine: Standing, standings: Sequence[Standing]) -> bool:
    """Whether the verdicts that this worker holds are to be applied now.

    Somebody has applied them already (it is one step ahead, in their round); or everybody who stands where this
    worker stands holds them too, so that this all-gather is the commit round that had failed.
    """
    if mine.held == NOTHING:
        return False
    best = ahead(standings)
    if mine.version != best:
        return (mine.held, mine.position + 1) == best
    return all(standing.held == mine.held for standing in standings if standing.version == best)


def donor(standings: Sequence[Standing]) -> int:
    """The rank whose state newcomers receive: the lowest that is ahead and has the parameters most have there."""
    best = ahead(standings)
    usual = majority_value([standing.checksum for standing in standings if standing.version == best])
    return next(r for r, s in enumerate(standings) if s.version == best and s.checksum == usual)


def behind(standings: Sequence[Standing]) -> list[int]:
    """The ranks whose parameters are not the donor's."""
    best = standings[donor(standings)]
    return [
        rank
        for rank, standing in enumerate(standings)
        if (standing.version, standing.checksum) != (best.version, best.checksum)
    ]


def next_round(seen: Sequence[int], names: Sequence[str]) -> int:
    """The number of a new round, later than all that were seen; equal for all who know the same of its members."""
    processes: int = zlib.crc32(" ".join(names).encode()) % 2**HASH_BITS
    return ((max(seen) >> HASH_BITS) + 1 << HASH_BITS) + processes
