"""What dlion reads back from its own files, and from the user's configurations."""

import json
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import tomli_w
from cyclopts import CycloptsError
from fuzz import Parser
from mutations import restructured, spoiled, spoiled_json, spoiled_lines

from dlion.cli import app, sentence
from dlion.train.compare.cells import first_stage
from dlion.train.compare.command import check_metric, settle
from dlion.train.compare.folder import StudyFolder
from dlion.train.compare.results import Results
from dlion.train.compare.study import Study, read_study, toml_of
from dlion.train.compare.table import section
from dlion.train.config import TrainConfig, to_flags
from dlion.train.config import settle as settled
from dlion.train.recipes import built_in, locate, read_recipe
from dlion.train.runs import RunFolder

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ["--data", "here", "--pretrained", "there"]  # by some recipes
STUDIES = ("text", "heterogeneity", "quality-text")  # of docs/results


def spoiled_toml(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """A document of TOML with its structure changed, or any other edit of its bytes."""
    if random.random() < 0.4:
        return spoiled(content, others, random)
    try:
        return tomli_w.dumps(restructured(tomllib.loads(content.decode()), random)).encode()
    except (TypeError, ValueError, AttributeError):  # TOML has no word for it, such as null
        return spoiled(content, others, random)


def written(path: Path, read: Callable[[], object]) -> Callable[[bytes], None]:
    """Reads an input as the file at `path`."""

    def take(content: bytes) -> None:
        path.write_bytes(content)
        read()

    return take


def one_config() -> bytes:
    config = settled(TrainConfig(betas=(0.9, 0.99)), model="conv", workers=4, steps_per_epoch=10)
    return tomli_w.dumps(to_flags(config)).encode()


def configurations(folder: Path) -> Iterator[Parser]:
    """TOML: of runs, recipes, studies, and through the command line."""
    run = RunFolder(folder / "run")
    run.path.mkdir()
    configs = [one_config(), tomli_w.dumps({**tomllib.loads(one_config().decode()), "simulate": 3}).encode()]
    yield Parser("toml of a run", configs, written(run.config_file, run.read_config), 12, spoiled_toml)
    recipes = [locate(name).read_bytes() for name in built_in()]
    recipe = folder / "recipe.toml"

    def follow() -> None:
        read = read_recipe(recipe)
        read.flags_of(None), read.flags_of("dlion-mavo"), read.title
        read.missing(read.needs)

    yield Parser("toml of a recipe", recipes, written(recipe, follow), 5, spoiled_toml)
    study = folder / "study.toml"
    texts = [path.read_bytes() for path in sorted((ROOT / "docs" / "studies").glob("*.toml"))]

    def plan() -> None:
        read = read_study(study)
        toml_of(read)
        for cell in first_stage(read)[:50]:
            _ = cell.config, cell.work, cell.name, cell.words

    yield Parser("toml of a study", texts, written(study, plan), 0.5, spoiled_toml)
    config = folder / "flags.toml"

    def ask() -> None:
        try:
            app.parse_args(["train", *NEEDED, "--config", str(config)], exit_on_error=False, print_error=False)
        except CycloptsError as error:  # the command says it so
            raise ValueError(sentence(error)) from None

    yield Parser("toml of --config", [*configs, *recipes], written(config, ask), 0.3, spoiled_toml)


def runs(folder: Path) -> Iterator[Parser]:
    """The other files of a run's folder."""
    run = RunFolder(folder / "metrics")
    run.path.mkdir()
    numbers = {"bytes_sent": 5000, "ratio": 31.5, "seconds": 0.5, "loss": 2.3, "lr": 0.001}
    lines = b"".join(json.dumps({"step": step, "val_loss": 2.0, **numbers}).encode() + b"\n" for step in (0, 10, 20))

    def rewind() -> None:
        run.records()
        run.forget_from(15)

    yield Parser("metrics.jsonl", [lines], written(run.metrics_file, rewind), 12, spoiled_lines)
    told = {"task": "text", "steps": 20, "best_step": 10, "threads": 1, "device": "cpu", "val_loss": 2.0, **numbers}
    summary = json.dumps({**told, "data": {"name": "x", "sha256": "ab" * 32}}, indent=2).encode()
    yield Parser("summary.json", [summary], written(run.summary_file, run.read_summary), 12, spoiled_json)


def studies(folder: Path) -> Iterator[Parser]:
    """cells.jsonl, and the tables that are made of it."""
    kept = StudyFolder(folder / "study")
    kept.path.mkdir()
    source = StudyFolder(ROOT / "docs" / "results" / STUDIES[0])
    shutil.copy(source.study_file, kept.study_file)
    few = source.cells_file.read_bytes().splitlines(keepends=True)[::25]
    cells = [b"".join(few[:4]), b"".join(few[4:6])]
    study: Study = settle(read_study(kept.study_file), None)
    check_metric(first_stage(study)[:1], study.metric or "")

    def show() -> None:
        section(Results(study, kept.records()))

    yield Parser("cells.jsonl", cells, written(kept.cells_file, show), 2, spoiled_lines)


def files(folder: Path) -> Iterator[Parser]:
    """All of them."""
    yield from configurations(folder)
    yield from runs(folder)
    yield from studies(folder)
