"""Feed spoiled input to everything that dlion parses: each is taken, or refused by a typed error with one sentence.

    python bench/fuzz.py                               # 200,000 inputs over all parsers
    python bench/fuzz.py --inputs 2000 --only toml     # fewer, and only of parsers whose name holds "toml"
    python bench/fuzz.py --keep fuzz-found             # write inputs that show a fault into this folder

An input is a function of the seed, the parser and its number. Each parser runs in a process of its own, whose memory is
limited: a crash, an input that takes longer than its limit, memory without bounds, and any other exception than
ValueError and those of dlion.errors count as faults. So does a message that is no sentence. The exit status is 1 when
there are any.
"""

import argparse
import contextlib
import json
import mmap
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from mutations import spoiled

import dlion.errors

TYPED = (ValueError, *(kind for kind in vars(dlion.errors).values() if isinstance(kind, type)))
SECONDS = 5.0  # for one input, unless its parser says otherwise
MEMORY = 2**30  # bytes that a parser may take on top of what its process began with
LONGEST = 1200  # of a message: a sentence, with a path or two in it
LARGEST = 2**22  # bytes of an input

Spoil = Callable[[bytes, Sequence[bytes], Random], bytes]


@dataclass(frozen=True)
class Parser:
    """One thing that is parsed.

    Attributes:
        seeds: good inputs. read: takes one; returns, or raises one of TYPED.
        share: of all inputs, relative to the others'. spoil: makes a bad input of the seeds.
        seconds: that an input may take.
    """

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    share: float
    spoil: Spoil = spoiled
    seconds: float = SECONDS

    def input(self, seed: int, number: int) -> bytes:
        """One bad input."""
        random = Random(f"{seed} {self.name} {number}")
        return self.spoil(random.choice(self.seeds), self.seeds, random)[:LARGEST]


@dataclass
class Outcome:
    """What became of the inputs of a parser. faults: kind of fault -> number of the first input that showed it."""

    name: str
    inputs: int = 0
    taken: int = 0
    refused: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    slowest: float = 0.0

    def fault(self, kind: str, number: int) -> None:
        """Note a fault."""
        self.faults.setdefault(kind, number)
        self.counts[kind] += 1


class TooLong(BaseException):
    """An input took longer than its limit; no `except Exception` may take it for damage."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooLong in the main thread when what is inside takes longer."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def complaint(error: BaseException) -> str | None:
    """What is wrong with an exception as an answer to bad input; None when nothing is."""
    place = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    where = f" at {Path(place.filename).name}:{place.lineno}" if place else ""
    if type(error) not in TYPED:
        return f"{type(error).__name__}{where}: {str(error)[:90]}"
    text = str(error)
    if len(text) < 10 or len(text) > LONGEST or "\n" in text.strip() or not text.isprintable():
        return f"no sentence{where}: {ascii(text)[:90]}"
    return None


def hunt(parser: Parser, numbers: range, seed: int, see: Callable[[int, bytes], object] | None = None) -> Outcome:
    """Feed the inputs with these numbers to a parser. see: is shown each before it is read."""
    outcome = Outcome(parser.name)
    began = time.perf_counter()
    for good in parser.seeds if numbers.start == 0 else ():
        try:
            parser.read(good)
        except Exception as error:
            outcome.fault(f"a good input is refused: {ascii(error)[:200]}", 0)
    for number in numbers:
        content = parser.input(seed, number)
        if see is not None:
            see(number, content)
        outcome.inputs += 1
        start = time.perf_counter()
        try:
            with limited(parser.seconds), warnings.catch_warnings():
                warnings.simplefilter("error")
                parser.read(content)
            outcome.taken += 1
        except TooLong:
            outcome.fault(f"takes longer than {parser.seconds:g} s", number)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            kind = complaint(error)
            if kind is None:
                outcome.refused += 1
            else:
                outcome.fault(kind, number)
        outcome.slowest = max(outcome.slowest, time.perf_counter() - start)
    outcome.seconds = time.perf_counter() - began
    return outcome


def apart(parser: Parser, numbers: range, seed: int) -> Outcome:
    """The same in a process of its own: one that dies is a fault of the input at hand, and the next one goes on."""
    outcome = Outcome(parser.name)
    while numbers:
        part, last = _forked(parser, numbers, seed)
        died = part.inputs < len(numbers)
        outcome.inputs += part.inputs
        outcome.taken, outcome.refused = outcome.taken + part.taken, outcome.refused + part.refused
        outcome.faults = part.faults | outcome.faults
        outcome.counts += part.counts
        outcome.seconds, outcome.slowest = outcome.seconds + part.seconds, max(outcome.slowest, part.slowest)
        numbers = range(last + 1, numbers.stop) if died else range(0)
    return outcome


def _forked(parser: Parser, numbers: range, seed: int) -> tuple[Outcome, int]:
    """What a child found, and the number of its last input."""
    at = mmap.mmap(-1, 8)
    at[:] = numbers.start.to_bytes(8, "little")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what packages print
            os.dup2(1, 2)
            _limit_memory()

            def see(number: int, content: bytes) -> None:
                at[:] = number.to_bytes(8, "little")

            told = json.dumps(vars(hunt(parser, numbers, seed, see))).encode()
            with os.fdopen(writer, "wb") as file:
                file.write(told)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        told = file.read()
    _, status = os.waitpid(child, 0)
    last = int.from_bytes(at[:], "little")
    if status == 0 and told:
        found: dict[str, Any] = json.loads(told)
        return Outcome(**{**found, "counts": Counter(found["counts"])}), last
    outcome = Outcome(parser.name, inputs=last - numbers.start + 1)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    outcome.fault(f"the process died ({signal.Signals(number).name if number else f'status {status >> 8}'})", last)
    return outcome, last


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def table(outcomes: Sequence[Outcome]) -> str:
    """For readers."""
    lines = ["| parser | inputs | taken | refused | faults | slowest, ms | inputs/s |", "|---|---|---|---|---|---|---|"]
    total = Outcome("all")
    for one in [*outcomes, total]:
        if one is not total:
            total.inputs, total.taken = total.inputs + one.inputs, total.taken + one.taken
            total.refused, total.counts = total.refused + one.refused, total.counts + one.counts
            total.seconds, total.slowest = total.seconds + one.seconds, max(total.slowest, one.slowest)
        rate = one.inputs / one.seconds if one.seconds else 0.0
        cells = [f"{number:,}" for number in (one.inputs, one.taken, one.refused, one.counts.total())]
        lines.append(f"| {one.name} | {' | '.join(cells)} | {1000 * one.slowest:,.0f} | {rate:,.0f} |")
    return "\n".join(lines)


def counts_of(parsers: Sequence[Parser], inputs: int) -> list[int]:
    """How many inputs each gets: its share, and at least one."""
    total = sum(parser.share for parser in parsers)
    counts = [max(1, round(inputs * parser.share / total)) for parser in parsers]
    counts[0] += max(0, inputs - sum(counts))
    return counts


def main(arguments: list[str]) -> int:
    from fuzz_parsers import parsers  # it imports torch

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--inputs", type=int, default=200_000, help="in all (default 200,000)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="", help="parsers whose name holds this")
    options.add_argument("--keep", type=Path, help="folder for inputs that show a fault")
    told = options.parse_args(arguments)
    outcomes = []
    with parsers() as found:
        chosen = [parser for parser in found if told.only in parser.name]
        if not chosen:
            names = ", ".join(parser.name for parser in found)
            print(f"fuzz.py: no parser has {told.only!r} in its name: there are {names}", file=sys.stderr)
            return 2
        for parser, count in zip(chosen, counts_of(chosen, told.inputs), strict=True):
            outcome = apart(parser, range(count), told.seed)
            outcomes.append(outcome)
            state = f"{outcome.counts.total()} faults" if outcome.faults else "no fault"
            print(f"{parser.name}: {outcome.inputs:,} inputs, {state}, {outcome.seconds:.1f} s", file=sys.stderr)
            for kind, number in outcome.faults.items():
                print(f"  {outcome.counts[kind]} x {kind} (first: input {number})", file=sys.stderr)
                if told.keep is not None:
                    told.keep.mkdir(parents=True, exist_ok=True)
                    name = parser.name.replace(" ", "-").replace("/", "-")
                    (told.keep / f"{name}-{number}").write_bytes(parser.input(told.seed, number))
    print(table(outcomes))
    return 1 if any(outcome.faults for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
