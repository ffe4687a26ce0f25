"""The whole measurement: build, warm up, then rounds in which every contender takes a turn."""

import gc
from dataclasses import dataclass

from dlion.train.bench.bare import BareExchange, Latencies
from dlion.train.bench.contenders import Contender, build
from dlion.train.bench.interface import Interface, interface_of
from dlion.train.bench.model import batch_of, build_gpt
from dlion.train.bench.sentence import duration, shown
from dlion.train.bench.settings import BenchConfig
from dlion.train.bench.turns import Record, Turns
from dlion.train.progress import Display
from dlion.train.ranks import Ranks

TURN_SECONDS = 0.5
TOLD_SECONDS = 10.0  # rounds that take longer are told one by one
MOST_STEPS = 5
LEAST_ROUNDS = 3
TRIALS = 5
TRIAL_SHARE = 1 / 6  # of the time, for finding the best bucket size


@dataclass
class Measured:
    """Everything that was measured, on this rank."""

    parameters: int
    contenders: dict[str, tuple[Contender, Record]]
    bare: BareExchange
    latencies: dict[str, float]
    interface: Interface | None
    rounds: int
    seconds: float


def measure(config: BenchConfig, ranks: Ranks, screen: Display) -> Measured:
    """Measure every contender in turn until the time is over; all ranks make the same decisions.

    Raises:
        Stopped: a signal came.
    """
    interface = interface_of(ranks.channel, "gloo" if ranks.device.type == "cpu" else "nccl")
    turns = Turns(ranks, batch_of(config, ranks.channel.rank, ranks.device), interface)
    model = build_gpt(config, ranks.device)
    parameters = sum(param.numel() for param in model.parameters())
    bare, latencies = BareExchange(ranks, model, config.vote), Latencies(ranks.channel)
    del model
    bare.turn(turns)
    bare.seconds.clear()  # the first makes connections
    entered = []
    for flag in config.contenders:
        chosen, estimate = _enter(build(flag, config, ranks), turns, config.seconds)
        gc.collect()  # models and buckets of those that were not chosen
        screen.say(f"{turns.elapsed:6.1f} s  {shown(chosen.name)}: warmed up, about {duration(estimate)} a step")
        entered.append((chosen, max(1, min(MOST_STEPS, int(TURN_SECONDS / estimate))), Record()))
    rounds, longest = 0, 0.0
    while rounds < LEAST_ROUNDS or turns.elapsed + longest < config.seconds:
        began = turns.elapsed
        for contender, steps, record in entered:
            turns.turn(contender, steps, record)
        bare.turn(turns)
        latencies.turn(turns)
        rounds, taken = rounds + 1, turns.elapsed - began
        longest = max(longest, taken)
        if rounds == 1 or taken > TOLD_SECONDS:
            screen.say(f"{turns.elapsed:6.1f} s  round {rounds} took {duration(taken)}")
    found = {contender.name: (contender, record) for contender, _, record in entered}
    return Measured(parameters, found, bare, latencies.medians(), interface, rounds, turns.elapsed)


def _enter(candidates: list[Contender], turns: Turns, seconds: float) -> tuple[Contender, float]:
    """Warm up the candidates for one place and choose the quickest; the contender and the seconds of its step."""
    trials = []
    for candidate in candidates:
        warm_up = Record()
        turns.turn(candidate, candidate.warm_up, warm_up)
        trials.append(Record(steps=warm_up.steps[-1:]))
    if len(candidates) > 1:
        trials = [Record() for _ in candidates]
        until = turns.elapsed + seconds * TRIAL_SHARE
        for _ in range(TRIALS):
            for candidate, trial in zip(candidates, trials, strict=True):
                turns.turn(candidate, 1, trial)
            if turns.elapsed > until:
                break
    best = min(range(len(candidates)), key=lambda k: trials[k].seconds)
    return candidates[best], trials[best].seconds
