"""`dlion.ops.reference`'s counting of ballots where only the device knows who votes, and when.

Ballots of all workers come, i64[workers, ...] in rank order; `voting`, bool[workers], says whose count. Each function
gives the bits of its namesake on the ballots of those alone, and zeros where nobody votes. t is an i64[].
"""

import torch
from torch import Tensor

from dlion.ops.bits import count, less_or_more, split
from dlion.ops.reference import alternating, padded


def tally_majority(ballots: Tensor, voting: Tensor, first_word: int, t: Tensor, ties: str) -> Tensor:
    """i64[workers, words] -> i64[words]."""
    counted, voters = _those_of(ballots, voting), voting.sum()
    won, tied = split(count(counted), voters // 2)
    words = torch.arange(first_word, first_word + ballots.shape[1], device=ballots.device)
    if ties == "rotate":
        decider = counted.gather(0, _turn(voting, voters, t // 2 + words)[None])[0]
    else:
        decider = alternating(words, t)
    even = (voters > 0) & (voters % 2 == 0)
    return won | (tied & decider & _everywhere(even))


def tally_majority_ternary(ballots: Tensor, voting: Tensor, first_word: int, t: Tensor, ties: str) -> Tensor:
    """i64[workers, 2, words] -> i64[2, words]."""
    nonzero, positive = _those_of(ballots, voting).unbind(1)
    less, more = less_or_more(count(positive), count(nonzero & ~positive))
    tied = ~(less | more)
    if ties == "zero":
        return torch.stack([~tied, more])
    words = torch.arange(first_word, first_word + ballots.shape[2], device=ballots.device)
    voters = voting.sum()
    somebody, decider = torch.zeros_like(tied), torch.zeros_like(tied)
    for k in range(len(ballots)):  # once all have been asked, to ask again changes nothing
        row = _turn(voting, voters, t // 2 + words + k)[None]
        decider = decider | (positive.gather(0, row)[0] & ~somebody)
        somebody = somebody | nonzero.gather(0, row)[0]
    if ties == "alternate":
        decider = alternating(words, t) & somebody
    return torch.stack([~tied | somebody, more | (tied & decider)])


def tally_count(ballots: Tensor, voting: Tensor, planes: int) -> Tensor:
    """i64[workers, words] -> i64[planes, words]."""
    return padded(count(_those_of(ballots, voting)), planes)


def tally_count_ternary(ballots: Tensor, voting: Tensor, planes: int) -> Tensor:
    """i64[workers, 2, words] -> i64[planes, words]."""
    nonzero, positive = ballots.unbind(1)
    addends = [_those_of(each, voting) for each in (positive, positive, ~nonzero)]
    return padded(count(torch.cat(addends)), planes)


def _those_of(ballots: Tensor, voting: Tensor) -> Tensor:
    """The ballots, with zeros in the place of those that do not count."""
    return ballots & _everywhere(voting).view(-1, *[1] * (ballots.dim() - 1))


def _turn(voting: Tensor, voters: Tensor, turn: Tensor) -> Tensor:
    """The rank of voter `turn mod voters`, i64[words]; some rank where nobody votes."""
    ranks = torch.arange(len(voting), device=voting.device)
    beyond = len(voting)  # a place for those who do not vote
    places = (voting.cumsum(0) - 1).masked_fill(~voting, beyond)
    return ranks.new_zeros(beyond + 1).scatter(0, places, ranks)[turn % voters.clamp(min=1)]


def _everywhere(flags: Tensor) -> Tensor:
    """bool[...] -> i64[...], all bits of a word."""
    return -flags.long()
