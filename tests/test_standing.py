"""What follows from where workers stand: the protocol played through with deaths and half-finished all-gathers."""

import random
from dataclasses import dataclass, replace

import pytest

from dlion.elastic.standing import NOTHING, Standing, behind, donor, next_round, resolves

Verdict = tuple[int, int]  # the round that decided it, and on which position


def standing(version: tuple[int, int], held: int = NOTHING, checksum: int = 0) -> Standing:
    return Standing(*version, held, t=version[1], hyper=1, layout=2, checksum=checksum, seasoned=1)


def test_a_standing_travels_whole() -> None:
    said = replace(standing((7, 3), held=2**40), note={"loss": 0.25, "worker": "é"})
    assert Standing.decode(said.encode()) == said
    with pytest.raises(ValueError, match="say less"):
        replace(said, note="x" * 500).encode()


def test_who_missed_a_commit_follows_those_who_did_not() -> None:
    missed, went_on = standing((1, 5), held=2), standing((2, 6))
    assert resolves(missed, [missed, went_on])
    assert not resolves(went_on, [missed, went_on])
    other = standing((1, 5), held=3)  # the verdicts of another round: not what was applied
    assert not resolves(other, [other, went_on])
    assert behind([other, went_on]) == [0] and donor([other, went_on]) == 1


def test_a_commit_that_nobody_finished_is_finished_only_if_all_hold_it() -> None:
    holds, does_not = standing((1, 5), held=2), standing((1, 5))
    assert resolves(holds, [holds, holds])
    assert resolves(holds, [holds, holds, standing((1, 2))])  # who is behind has no say
    assert not resolves(holds, [holds, does_not])
    assert not resolves(holds, [holds, standing((1, 5), held=3)])


def test_the_donor_has_what_most_have_who_are_ahead() -> None:
    flipped, fine, old = standing((2, 6), checksum=8), standing((2, 6), checksum=9), standing((1, 9), checksum=9)
    assert donor([flipped, old, fine, fine]) == 2
    assert behind([flipped, old, fine, fine]) == [0, 1]


def test_rounds_differ_where_processes_do_and_grow() -> None:
    first = next_round([0, 0], ["a", "b"])
    assert first > 0 and first == next_round([0, 0], ["a", "b"]) != next_round([0, 0], ["a", "c"])
    assert next_round([first, 0], ["a", "b"]) > first


@dataclass
class Played:
    """A worker of the play. `history`: the verdicts that its parameters went through."""

    name: str
    version: tuple[int, int] = (NOTHING, 0)
    history: tuple[Verdict, ...] = ()
    held: int = NOTHING
    seen: int = 0

    def says(self) -> Standing:
        return standing(self.version, self.held, hash(self.history))

    def apply(self) -> None:
        self.history = (*self.history, (self.held, self.version[1]))
        self.version, self.held = (self.held, self.version[1] + 1), NOTHING


class Play:
    """Rounds of random majorities, in which any call may end for some and not for others."""

    def __init__(self, seed: int, workers: int) -> None:
        self.random = random.Random(seed)
        self.workers = [Played(f"{number}") for number in range(workers)]
        self.lives = workers

    def some(self, members: list[Played]) -> list[Played]:
        """Those for whom a call ends well: most often all."""
        return members if self.random.random() < 0.7 else [one for one in members if self.random.random() < 0.5]

    def round(self) -> None:
        size = self.random.randint(len(self.workers) // 2 + 1, len(self.workers))
        members = self.random.sample(self.workers, size)
        number = next_round([one.seen for one in members], [one.name for one in members])
        for one in members:
            one.seen = number
        if self.reunited(members):
            while self.stepped(members, number):
                assert len({(one.version, one.history) for one in members}) == 1

    def reunited(self, members: list[Played]) -> bool:
        said = [one.says() for one in members]
        finished = self.some(members)
        for one in finished:
            if resolves(one.says(), said):
                one.apply()
        if finished != members:
            return False
        said = [one.says() for one in members]
        if self.some(members) != members:
            return False
        source = members[donor(said)]
        late = [members[rank] for rank in behind(said)]
        received = self.some(late)
        for one in received:
            one.version, one.history, one.held = source.version, source.history, NOTHING
        return received == late

    def stepped(self, members: list[Played], number: int) -> bool:
        decided = self.some(members)
        for one in decided:
            one.held = number
        if decided != members:
            return False
        committed = self.some(members)
        for one in committed:
            one.apply()
        return committed == members

    def die(self) -> None:
        place = self.random.randrange(len(self.workers))
        self.lives += 1
        self.workers[place] = Played(f"{self.lives}")


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_a_version_names_one_state_whatever_is_lost(workers: int) -> None:
    committed = 0
    for seed in range(400):
        play = Play(seed, workers)
        states: dict[tuple[int, int], tuple[Verdict, ...]] = {}
        for _ in range(25):
            play.round()
            for one in play.workers:
                assert states.setdefault(one.version, one.history) == one.history, f"seed {seed}"
            if play.random.random() < 0.2:
                play.die()
        committed += max(one.version[1] for one in play.workers)
    assert committed > 400 * 10  # the plays get somewhere


def test_a_version_without_its_round_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(one: Played) -> None:
        one.history = (*one.history, (one.held, one.version[1]))
        one.version, one.held = (1, one.version[1] + 1), NOTHING

    monkeypatch.setattr(Played, "apply", apply)
    with pytest.raises(AssertionError, match="seed"):
        test_a_version_names_one_state_whatever_is_lost(3)
