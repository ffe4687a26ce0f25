"""Cells: the single runs that a study asks for, what each is called, and the `dlion train` that makes it."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from dlion.train.compare.axes import Flags, Value
from dlion.train.compare.study import SEED, Study
from dlion.train.config import DEFAULT_STEPS, DEFAULT_WORKERS, TrainConfig, asked_by
from dlion.train.legal import shown

Labels = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run of the training loop.

    variant, place, setting, seed: its coordinates in the study. flags: what `dlion train` is given; cells with equal
    flags are one, whatever they are called. data: where the data lie, which is no part of what a cell is (cells.jsonl
    has their SHA-256), unless a study varies it; it is then among the flags.
    """

    variant: str
    place: Labels
    setting: Labels
    seed: Any
    flags: Flags
    data: str | None = None

    @property
    def key(self) -> str:
        """Its identity."""
        return key_of(self.flags)

    @property
    def name(self) -> str:
        """Of its log and its run folder: coordinates, and a digest since labels may repeat in other studies."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:8]
        words = [self.variant, *(f"{axis}{value}" for axis, value in (self.place | self.setting).items())]
        text = "-".join([*words, f"s{self.seed}"])
        return "".join(letter if letter.isalnum() or letter in "-.+" else "_" for letter in text)[:120] + f"-{digest}"

    @property
    def words(self) -> str:
        """Its coordinates for readers."""
        places = {**self.place, **self.setting, SEED: self.seed}
        return " ".join([self.variant, *(f"{axis}={said(value)}" for axis, value in places.items())])

    @property
    def config(self) -> TrainConfig:
        """What is asked for.

        Raises:
            ValueError: a flag is unknown or has a value that it cannot have.
        """
        try:
            return asked_by(self._all_flags)
        except ValueError as error:
            raise ValueError(f"cell {shown(self.words)}: {str(error).rstrip('.')}.") from None

    @property
    def workers(self) -> int:
        """How many workers it has, real or simulated."""
        workers: int = self.flags.get("simulate") or self.flags.get("workers", DEFAULT_WORKERS)
        return workers

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Of each worker."""
        config = self.config
        return config.batch_sizes or (config.batch_size,) * self.workers

    @property
    def steps(self) -> int:
        """Its length; where that is told in epochs, by a size of the training set that is the same for all cells."""
        config = self.config
        if config.epochs:
            return config.epochs * ceil(50_000 * self.workers / (sum(self.batch_sizes) * config.accumulate))
        return config.steps or DEFAULT_STEPS

    @property
    def work(self) -> float:
        """About how long it takes, in a unit of its own: samples, where every worker is computed on one machine."""
        return float(sum(self.batch_sizes) * self.config.accumulate * self.steps)

    @property
    def arguments(self) -> list[str]:
        """The flags as `dlion train` takes them."""
        words: list[str] = []
        for flag, value in self._all_flags.items():
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            elif isinstance(value, list):
                words += [f"--{flag}", *map(str, value)]
            else:
                words += [f"--{flag}", str(value)]
        return words

    @property
    def _all_flags(self) -> Flags:
        return self.flags if self.data is None else {"data": self.data, **self.flags}


def key_of(flags: Mapping[str, Any]) -> str:
    """The identity of a cell with these flags."""
    return json.dumps(dict(sorted(flags.items())))


def said(value: Any) -> str:
    """A label for readers."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def first_stage(study: Study) -> list[Cell]:
    """The cells that search the grid: everywhere with every seed, or, in a study that tunes, where [tune] says.

    Seeds come last, so that the first pass already compares the variants.
    """
    found: list[Cell] = []
    for variant in study.variants:
        places = study.places(variant) if study.tune is None else tuned_places(study, variant)
        seeds = study.values(variant, SEED) if study.tune is None else (study.tune[SEED],)
        for place in places:
            for point in study.points(variant):
                found += [_cell(study, variant, place, point, seed) for seed in seeds]
    order = {cell.key: number for number, cell in enumerate(found)}
    seeds_in_order = list(dict.fromkeys(str(cell.seed) for cell in found))
    return _unique(sorted(found, key=lambda cell: (seeds_in_order.index(str(cell.seed)), order[cell.key])))


def second_stage(study: Study, chosen: Mapping[tuple[str, str], dict[str, Value]]) -> list[Cell]:
    """The cells that compare variants, each at its best setting: chosen[variant, words of the place that was searched].

    A variant whose setting could not be chosen has none.
    """
    found: list[Cell] = []
    for variant in study.variants:
        for place in study.places(variant):
            point = chosen.get((variant, place_words(tuned_at(study, place))))
            if point is not None:
                found += [_cell(study, variant, place, point, seed) for seed in study.values(variant, SEED)]
    seeds_in_order = list(dict.fromkeys(str(cell.seed) for cell in found))
    return _unique(sorted(found, key=lambda cell: seeds_in_order.index(str(cell.seed))))


def unchosen(study: Study) -> list[Cell]:
    """Cells like those of the second stage, each with the first setting of its grid."""
    first = {
        (variant, place_words(tuned_at(study, place))): next(study.points(variant))
        for variant in study.variants
        for place in study.places(variant)
    }
    return second_stage(study, first)


def tuned_at(study: Study, place: Mapping[str, Value]) -> dict[str, Value]:
    """Where the setting of a place is searched: there, but for the axes that [tune] names."""
    tune = study.tune or {}
    return {axis: tune.get(axis, value) for axis, value in place.items()}


def tuned_places(study: Study, variant: str) -> Iterator[dict[str, Value]]:
    """The places where the grid is searched."""
    seen = set()
    for place in study.places(variant):
        at = tuned_at(study, place)
        if place_words(at) not in seen:
            seen.add(place_words(at))
            yield at


def place_words(place: Mapping[str, Value]) -> str:
    """A place as text; empty where a study has no axes beside the compared one and the seed."""
    return ", ".join(f"{axis} {said(value.label)}" for axis, value in place.items())


def _cell(study: Study, variant: str, place: dict[str, Value], point: dict[str, Value], seed: Value) -> Cell:
    flags = dict(study.train)
    data = flags.pop("data", None)
    for value in (study.variants[variant], *place.values(), *point.values(), seed):
        flags |= value.flags
    if study.simulate:
        flags["simulate"] = flags.pop("workers", DEFAULT_WORKERS)
    return Cell(
        variant,
        {axis: value.label for axis, value in place.items()},
        {axis: value.label for axis, value in point.items()},
        seed.label,
        flags,
        data,
    )


def _unique(cells: Iterable[Cell]) -> list[Cell]:
    return list({cell.key: cell for cell in cells}.values())
