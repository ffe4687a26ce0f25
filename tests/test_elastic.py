"""Elastic workers: a death in every phase of a step, returns, and who is not like the others."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from elastic_world import SECONDS, Killed, Worker, live_together, momentum_once_a_step

from dlion.elastic import Elastic, rounds
from dlion.errors import AgreementError, ExchangeError

STEPS = 12
FATAL = 5  # position of the step in which somebody dies


def die(*_: Any, **__: Any) -> None:
    raise Killed


def before_the_ballots(optimizer: Elastic) -> None:
    optimizer._together = die  # type: ignore[method-assign]


def after_the_ballots(optimizer: Elastic) -> None:
    optimizer.exchange.consult = die  # type: ignore[method-assign, assignment]


def between_ballots_and_verdicts(optimizer: Elastic) -> None:
    assert optimizer.exchange.voting is not None
    optimizer.exchange.voting.verdicts.all_gather = die  # type: ignore[method-assign, assignment]


def before_the_commit(optimizer: Elastic) -> None:
    optimizer._commit = die  # type: ignore[method-assign]


def while_applying(optimizer: Elastic) -> None:
    apply, left = optimizer._steps.apply, [2]

    def count(*given: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        apply(*given)

    object.__setattr__(optimizer._steps, "apply", count)


PHASES = [before_the_ballots, after_the_ballots, between_ballots_and_verdicts, before_the_commit, while_applying]


def at(position: int, do: Callable[[Elastic], None]) -> Callable[[Elastic], None]:
    """Sabotage of one step, once."""
    done: list[int] = []

    def sabotage(optimizer: Elastic) -> None:
        if optimizer.position == position and not done:
            done.append(position)
            do(optimizer)

    return sabotage


@pytest.mark.wide(3)
@pytest.mark.parametrize("phase", PHASES)
def test_a_death_in_any_phase_costs_the_others_nothing_and_the_worker_comes_back(
    phase: Callable[[Elastic], None],
) -> None:
    first = Worker(1, sabotage=at(FATAL, phase))
    again = Worker(1, seed=9, begins=first.died)
    others = [Worker(0), Worker(2)]
    live_together([*others, first, again], STEPS, workers=3, min_workers=2)
    assert isinstance(first.error, Killed)
    assert [life.error for life in (*others, again)] == [None] * 3
    assert others[0].state == others[1].state == again.state
    assert others[0].state[:2] == (STEPS, STEPS)
    committed = phase is while_applying  # the others have applied that step, and notice in the next one
    for life in others:
        assert life.news[0].startswith(f"worker 1 lost at step {FATAL + 1 + committed}"), life.news
        for index in range(2):
            start = torch.zeros_like(life.momentum(index))
            assert torch.equal(life.momentum(index), momentum_once_a_step(life.number, range(STEPS), index, start))
    assert again.joined >= FATAL
    assert again.optimizer is not None and again.optimizer.luggage == {"from": 0}


def loses_the_commit(position: int, after: bool) -> Callable[[Elastic], None]:
    """This worker's connections break in the commit: `after` the others have what they need, or before."""

    def do(optimizer: Elastic) -> None:
        gather, standings = optimizer.rounds.gather, []

        def lose(standing: Any) -> Any:
            optimizer.rounds.gather = gather  # type: ignore[method-assign]
            if after:
                standings.append(gather(standing))
            raise ExchangeError("the network broke")

        optimizer.rounds.gather = lose  # type: ignore[method-assign]

    return at(position, do)


def only_in_commit(sabotage: Callable[[Elastic], None]) -> Callable[[Elastic], None]:
    """Sabotage that is set up when the commit of its step begins, not for the gathers of a reunion."""

    def set_up(optimizer: Elastic) -> None:
        commit = type(optimizer)._commit

        def begin() -> None:
            sabotage(optimizer)
            commit(optimizer)

        optimizer._commit = begin  # type: ignore[method-assign]

    return set_up


@pytest.mark.parametrize("after", [False, True])
def test_who_fails_in_the_commit_does_what_the_others_did(after: bool) -> None:
    lives = [Worker(0), Worker(1, sabotage=only_in_commit(loses_the_commit(FATAL, after))), Worker(2)]
    live_together(lives, STEPS, workers=3, min_workers=2)
    assert [life.error for life in lives] == [None] * 3
    assert len({life.state for life in lives}) == 1
    assert lives[1].state[:2] == (STEPS, STEPS)
    # who learns of a step from the next round has heard no notes with it, nor keeps older ones
    others = [0, 1, 2] if after else []
    assert [life.heard[FATAL + 1] for life in lives] == [others, [], others]
    assert all(life.heard[FATAL] == life.heard[FATAL + 2] == [0, 1, 2] for life in lives)
    for life in lives:
        assert life.optimizer is not None and life.optimizer.stats.abstentions == 0
        start = torch.zeros_like(life.momentum(0))
        assert torch.equal(life.momentum(0), momentum_once_a_step(life.number, range(STEPS), 0, start))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keeper", "phase"),
    [(True, "after the quorum"), (True, "while members connect"), (False, "while members connect")],
)
def test_a_death_while_a_new_round_forms_is_noticed_at_once(
    keeper: bool, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 0 dies; while the others form a round, its lowest worker, who keeps its store, does or another one."""
    monkeypatch.setattr(rounds, "MEETING_SECONDS", SECONDS)
    died: list[float] = []
    lives = [Worker(number, options={"timeout": SECONDS}) for number in range(5)]
    victim = lives[1 if keeper else 3]

    def forms(optimizer: Elastic) -> None:
        connect = optimizer.rounds._connect

        def dies(number: int) -> None:
            if phase == "while members connect":
                connect(number)
            optimizer.rounds._store = None  # type: ignore[assignment]
            died.append(time.monotonic())
            raise Killed

        optimizer.rounds._connect = dies  # type: ignore[method-assign]

    lives[0].sabotage = at(FATAL, before_the_commit)
    victim.sabotage = at(FATAL, forms)
    live_together(lives, STEPS, workers=5, min_workers=3)
    survivors = [life for life in lives if life not in (lives[0], victim)]
    assert [life.error for life in survivors] == [None] * 3
    assert len({life.state for life in survivors}) == 1
    assert max(life.ended for life in survivors) - died[0] < SECONDS


def test_a_newcomer_receives_the_state_and_the_mean_momentum_and_abstains_once() -> None:
    started, here = threading.Event(), threading.Event()

    def wait(optimizer: Elastic) -> None:
        started.set()
        assert here.wait(SECONDS)

    def appear(optimizer: Elastic) -> None:
        assert optimizer.rounds.round == 0  # the lighthouse knows of it from now on, and waits until it asks
        here.set()

    late = Worker(2, seed=5, sabotage=at(0, appear), begins=started, options={"lr": 0.5})
    lives = [Worker(number, sabotage=at(FATAL, wait), options={"start_timeout": 0.1}) for number in range(2)]
    live_together([*lives, late], STEPS, workers=3, min_workers=2)
    assert [life.error for life in (*lives, late)] == [None] * 3
    assert lives[0].state == lives[1].state == late.state
    assert late.optimizer is not None and late.optimizer.param_groups[0]["lr"] == 1e-2
    assert FATAL <= late.joined <= FATAL + 1
    buckets = len(late.optimizer.exchange.layout.buckets)
    assert late.optimizer.stats.abstentions == buckets  # its own, in the step that it joined in
    before = range(late.joined)
    momenta = [momentum_once_a_step(life.number, before, 0, torch.zeros_like(life.momentum(0))) for life in lives]
    mean = (momenta[0] + momenta[1]) / 2
    # it abstained in the step that it joined in, and its momentum rested
    assert torch.equal(late.momentum(0), momentum_once_a_step(2, range(late.joined + 1, STEPS), 0, mean))


def test_who_has_other_hyper_parameters_raises_alone() -> None:
    def change(optimizer: Elastic) -> None:
        optimizer.param_groups[0]["lr"] = 0.5

    lives = [Worker(0), Worker(1, sabotage=at(FATAL, change)), Worker(2)]
    live_together(lives, STEPS, workers=3, min_workers=2)
    assert isinstance(lives[1].error, AgreementError) and "hyper-parameters of worker 1" in str(lives[1].error)
    assert lives[0].error is lives[2].error is None
    assert lives[0].state == lives[2].state
    assert lives[0].optimizer is not None
    assert lives[0].optimizer.stats.abstentions == len(lives[0].optimizer.exchange.layout.buckets)


def test_who_trains_other_parameters_is_left_out() -> None:
    def freeze(optimizer: Elastic) -> None:
        optimizer.param_groups[0]["params"][0].requires_grad_(False)

    lives = [Worker(0), Worker(1, sabotage=at(FATAL, freeze)), Worker(2)]
    live_together(lives, STEPS, workers=3, min_workers=2)
    assert isinstance(lives[1].error, AgreementError) and "layout changed on worker 1" in str(lives[1].error)
    assert lives[0].error is lives[2].error is None
    assert lives[0].state == lives[2].state


@pytest.mark.parametrize("on_mismatch", ["repair", "raise"])
def test_a_flipped_bit_is_found_where_it_is(on_mismatch: str) -> None:
    def flip(optimizer: Elastic) -> None:
        param = optimizer.param_groups[0]["params"][0]
        param.detach().view(torch.int32).view(-1)[3] ^= 1

    options = {"verify_every": 4, "on_mismatch": on_mismatch}
    lives = [
        Worker(0, options=options),
        Worker(1, sabotage=at(FATAL, flip), options=options),
        Worker(2, options=options),
    ]
    live_together(lives, STEPS, workers=3, min_workers=2)
    assert lives[0].error is lives[2].error is None
    assert lives[0].state == lives[2].state
    if on_mismatch == "repair":
        assert lives[1].error is None and lives[1].state == lives[0].state
        assert lives[1].news[0] == "worker 1 found its parameters changed at step 9"
    else:
        assert "the parameters of worker 1 are not those of the others" in str(lives[1].error)
