"""The vote, one element at a time in plain Python integers: the oracle of the codec and tally tests.

Written from the stated rules, not from the code. A word is a Python integer 0 <= word < 2**64; bit j of word
w is element 64*w + j.
"""

from collections.abc import Sequence

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(a: int, word: int, rank: int) -> int:
    """`f((f((f(a+G) ^ w)+G) ^ r)+G)` modulo 2**64, f the splitmix64 finaliser."""

    def finalise(x: int) -> int:
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 & MASK
        x ^= x >> 27
        x = x * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    x = finalise(a + GOLDEN & MASK)
    x = finalise((x ^ word) + GOLDEN & MASK)
    return finalise((x ^ rank) + GOLDEN & MASK)


def balanced_bit(t: int, word: int, bit: int, rank: int) -> int:
    """The vote of a worker whose message is exactly zero: a hashed bit, complemented when t is odd."""
    return mix64(t // 2, word, rank) >> bit & 1 ^ t % 2


def sign_ballot(message: Sequence[float], first_word: int, t: int, rank: int) -> list[int]:
    """One bit an element; padding bits are 0."""
    words = [0] * -(-len(message) // 64)
    for element, value in enumerate(message):
        word, bit = divmod(element, 64)
        vote = balanced_bit(t, first_word + word, bit, rank) if value == 0 else int(value > 0)
        words[word] |= vote << bit
    return words


def ternary_ballot(message: Sequence[float]) -> tuple[list[int], list[int]]:
    """The planes "nonzero" and "positive"."""
    nonzero, positive = ([0] * -(-len(message) // 64) for _ in range(2))
    for element, value in enumerate(message):
        word, bit = divmod(element, 64)
        nonzero[word] |= int(value != 0) << bit
        positive[word] |= int(value > 0) << bit
    return nonzero, positive


def majority(votes: Sequence[int], word: int, t: int, ties: str) -> int:
    """The verdict, -1, 0 or +1, on the votes -1, 0 or +1 of the voters for one element.

    Binary ballots are the case without zeros. A zero abstains; nobody left: 0.
    """
    total = sum(votes)
    if total != 0 or not any(votes):
        return (total > 0) - (total < 0)
    if ties == "alternate":
        return 1 if (t + word) % 2 == 0 else -1
    if ties == "zero":
        return 0
    start = (t // 2 + word) % len(votes)
    return next(vote for vote in [*votes[start:], *votes[:start]] if vote)


def bit_of(words: Sequence[int], element: int) -> int:
    return words[element // 64] >> element % 64 & 1


def number_of(planes: Sequence[Sequence[int]], element: int) -> int:
    """The binary number of one element, plane 0 its lowest bit."""
    return sum(bit_of(plane, element) << k for k, plane in enumerate(planes))
