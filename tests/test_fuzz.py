"""Bad input: a short run of bench/fuzz.py over all parsers, and that it would find what it looks for."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from fuzz import Outcome, Parser, counts_of, hunt, table
from fuzz_parsers import parsers
from mutations import EDITS, restructured, spoiled

from dlion.errors import ExchangeError

ROOT = Path(__file__).resolve().parent.parent
INPUTS = 2500


@pytest.fixture(scope="module")
def found() -> Iterator[list[Parser]]:
    with parsers() as made:
        yield made


def test_every_parser_takes_or_refuses_spoiled_input(found: list[Parser]) -> None:
    outcomes = [
        hunt(parser, range(count), seed=1) for parser, count in zip(found, counts_of(found, INPUTS), strict=True)
    ]
    faults = {outcome.name: outcome.faults for outcome in outcomes if outcome.faults}
    assert not faults, json.dumps(faults, indent=1)
    assert sum(outcome.inputs for outcome in outcomes) >= INPUTS
    assert sum(outcome.refused for outcome in outcomes) > INPUTS / 3  # they are spoiled indeed
    assert "| all |" in table(outcomes)


def test_inputs_are_functions_of_seed_and_number(found: list[Parser]) -> None:
    parser = found[0]
    assert parser.input(1, 5) == parser.input(1, 5)
    assert len({parser.input(seed, number) for seed in (1, 2) for number in range(20)}) > 20


def test_every_edit_changes_bytes_and_structures() -> None:
    random = Random(0)
    content = b'{"a": [1, 2, 3], "b": "text"}' * 3
    for edit in EDITS:
        assert any(edit(content, random) != content for _ in range(20)), edit
    assert all(isinstance(spoiled(b"", [b"x"], random), bytes) for _ in range(200))
    told = {"a": [1, {"b": 2}], "c": None}
    assert len({repr(restructured(told, random)) for _ in range(100)}) > 20 and told == {"a": [1, {"b": 2}], "c": None}


def faults_of(read: object, seeds: tuple[bytes, ...] = (b"good",), **options: float) -> Outcome:
    return hunt(Parser("toy", seeds, read, 1, **options), range(30), seed=0)  # type: ignore[arg-type]


def refuse(error: BaseException) -> object:
    def read(content: bytes) -> None:
        if content != b"good":
            raise error

    return read


@pytest.mark.parametrize(
    "error", [KeyError("a"), RuntimeError("no"), UnicodeError("a kind of ValueError"), SystemExit(1)]
)
def test_an_untyped_error_is_a_fault(error: BaseException) -> None:
    (kind,) = faults_of(refuse(error)).faults
    assert kind.startswith(type(error).__name__)


@pytest.mark.parametrize("text", ["short", "two\nlines of text", "long" * 1000, "a bell \a rings"])
def test_a_message_that_is_no_sentence_is_a_fault(text: str) -> None:
    (kind,) = faults_of(refuse(ValueError(text))).faults
    assert kind.startswith("no sentence")


def test_typed_errors_with_a_sentence_are_none() -> None:
    for error in (
        ValueError("this file is damaged: fetch it again"),
        ExchangeError("rank 1 sent no JSON at all"),
    ):
        outcome = faults_of(refuse(error))
        assert not outcome.faults and outcome.refused > 20


def test_a_good_input_that_is_refused_is_a_fault() -> None:
    outcome = faults_of(refuse(ValueError("this file is damaged: fetch it again")), seeds=(b"not so good",))
    assert any(kind.startswith("a good input is refused") for kind in outcome.faults)


def test_an_input_that_takes_too_long_is_a_fault() -> None:
    def read(content: bytes) -> None:
        while content != b"good":
            pass

    outcome = hunt(Parser("toy", (b"good",), read, 1, seconds=0.05), range(3), seed=0)
    assert list(outcome.faults) == ["takes longer than 0.05 s"]


DYING = """
import os, sys
sys.path.insert(0, "bench")
from fuzz import Parser, apart
def read(content):
    if content != b"good":
        os.abort() if len(content) % 2 else bytearray(2**34)
outcome = apart(Parser("toy", (b"good",), read, 1), range(6), seed=0)
print(outcome.inputs, sorted(kind.split(":")[0].split(" at ")[0] for kind in outcome.faults))
"""


@pytest.mark.processes
def test_a_crash_and_memory_without_bounds_are_faults_and_the_rest_is_fed() -> None:
    done = subprocess.run([sys.executable, "-c", DYING], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.split("[")[0].strip() == "6", done.stderr
    assert "MemoryError" in done.stdout and "the process died (SIGABRT)" in done.stdout
