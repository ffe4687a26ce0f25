"""Every flag that counts something refuses numbers beyond all sense, whichever command has it."""

from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

import pytest

from dlion.train.bench.settings import BenchConfig
from dlion.train.compare.settings import CompareConfig
from dlion.train.config import TrainConfig
from dlion.train.elastic_flags import ElasticFlags
from dlion.train.few_shot.settings import FewShotConfig
from dlion.train.plan.settings import PlanConfig

COMMANDS: list[Any] = [
    TrainConfig(),
    ElasticFlags(elastic=True, lighthouse="localhost:1", worker=0),
    FewShotConfig(),
    BenchConfig(),
    CompareConfig(),
    PlanConfig(parameters=1e6),
]


def counted(command: Any) -> list[tuple[str, Any]]:
    """The flags of whole numbers, each with one that is too large."""
    kinds = get_type_hints(type(command))
    found = []
    for field in fields(command):
        kind = kinds[field.name]
        several = [inner for one in (kind, *get_args(kind)) for inner in get_args(one) if inner is int]
        if kind is int or (int in get_args(kind) and type(None) in get_args(kind)):
            found.append((field.name, 2**70))
        elif several:
            found.append((field.name, (2**70,)))
    return found


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_what_is_counted_has_an_end(command: Any) -> None:
    flags = counted(command)
    assert flags
    for name, value in flags:
        with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')} must be .*, and .*{2**70}.* was given"):
            replace(command, **{name: value})


def test_counts_end_where_they_are_said_to() -> None:
    assert TrainConfig(steps=10**9).steps == 10**9
    with pytest.raises(ValueError, match=r"^--steps must be at most 1,000,000,000, and 1000000001 was given\.$"):
        TrainConfig(steps=10**9 + 1)
    with pytest.raises(ValueError, match=r"^--steps must be at most 1,000,000,000, and a number of 16610 bits"):
        TrainConfig(steps=10**5000)
