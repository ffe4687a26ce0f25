"""`dlion.ops.reference`'s counting of ballots where only the device knows who votes, and when.

Ballots of all workers come, i64[workers, ...] in rank order. A roster, i64[1 + workers], says whose count: the number
of voters, then the ranks of those who vote, then those of the others, both in order. Each function gives the bits of
its namesake on the ballots of those who vote, and zeros where nobody does. t is an i64[].
"""

import torch
from torch import Tensor

from dlion.ops.bits import count, less_or_more, split
from dlion.ops.reference import alternating, padded


def roster_of(voting: Tensor) -> Tensor:
    """bool[workers] of who votes -> the roster."""
    return torch.cat([voting.sum()[None], voting.logical_not().byte().argsort(stable=True)])


def voting_of(roster: Tensor) -> Tensor:
    """The roster -> bool[workers] of who votes, in rank order."""
    ranks = roster[1:]
    return torch.zeros_like(ranks, dtype=torch.bool).scatter(0, ranks, _places(roster) < roster[0])


def tally_majority(ballots: Tensor, roster: Tensor, first_word: int, t: Tensor, ties: str) -> Tensor:
    """i64[workers, words] -> i64[words]."""
    counted, voters = _voters_first(ballots, roster), roster[0]
    won, tied = split(count(counted), voters // 2)
    words = torch.arange(first_word, first_word + ballots.shape[1], device=ballots.device)
    if ties == "rotate":
        decider = counted.gather(0, ((t // 2 + words) % voters.clamp(min=1))[None])[0]
    else:
        decider = alternating(words, t)
    even = (voters > 0) & (voters % 2 == 0)
    return won | (tied & decider & _everywhere(even))


def tally_majority_ternary(ballots: Tensor, roster: Tensor, first_word: int, t: Tensor, ties: str) -> Tensor:
    """i64[workers, 2, words] -> i64[2, words]."""
    nonzero, positive = _voters_first(ballots, roster).unbind(1)
    less, more = less_or_more(count(positive), count(nonzero & ~positive))
    tied = ~(less | more)
    if ties == "zero":
        return torch.stack([~tied, more])
    words = torch.arange(first_word, first_word + ballots.shape[2], device=ballots.device)
    somebody, decider = torch.zeros_like(tied), torch.zeros_like(tied)
    for k in range(len(ballots)):  # once all have been asked, to ask again changes nothing
        row = ((t // 2 + words + k) % roster[0].clamp(min=1))[None]
        decider = decider | (positive.gather(0, row)[0] & ~somebody)
        somebody = somebody | nonzero.gather(0, row)[0]
    if ties == "alternate":
        decider = alternating(words, t) & somebody
    return torch.stack([~tied | somebody, more | (tied & decider)])


def tally_count(ballots: Tensor, roster: Tensor, planes: int) -> Tensor:
    """i64[workers, words] -> i64[planes, words]."""
    return padded(count(_voters_first(ballots, roster)), planes)


def tally_count_ternary(ballots: Tensor, roster: Tensor, planes: int) -> Tensor:
    """i64[workers, 2, words] -> i64[planes, words]."""
    nonzero, positive = ballots.unbind(1)
    addends = [_voters_first(each, roster) for each in (positive, positive, ~nonzero)]
    return padded(count(torch.cat(addends)), planes)


def _voters_first(ballots: Tensor, roster: Tensor) -> Tensor:
    """The ballots of those who vote, in their order, and zeros in the place of the others'."""
    voting = _everywhere(_places(roster) < roster[0])
    return ballots.index_select(0, roster[1:]) & voting.view(-1, *[1] * (ballots.dim() - 1))


def _places(roster: Tensor) -> Tensor:
    """i64[workers]: 0, 1, 2 and so on."""
    return torch.arange(len(roster) - 1, device=roster.device)


def _everywhere(flags: Tensor) -> Tensor:
    """bool[...] -> i64[...], all bits of a word."""
    return -flags.long()
