"""The command `dlion`. Importing this file, `--help` and `--version` do not import torch."""

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import dlion
from dlion.quoting import one_line

NEEDS_EXTRA = 'dlion: the command needs more than the library does: pip install "dlion[train]"'

try:
    from cyclopts import App, CycloptsError, Parameter
except ModuleNotFoundError:
    print(NEEDS_EXTRA, file=sys.stderr)
    raise SystemExit(2) from None

from dlion.train.bench.settings import BenchConfig  # noqa: E402
from dlion.train.compare.settings import CompareConfig, study_of  # noqa: E402
from dlion.train.config import TrainConfig, given_in  # noqa: E402 (it needs cyclopts)
from dlion.train.config_files import from_files, study_named  # noqa: E402
from dlion.train.elastic_flags import ElasticFlags  # noqa: E402
from dlion.train.few_shot.settings import FewShotConfig  # noqa: E402
from dlion.train.plan.settings import PlanConfig  # noqa: E402
from dlion.train.recipes import built_in, locate, read_recipe  # noqa: E402

USER_ERROR = 2
INTERRUPTED = 130
UNREAD = 141
LONGEST = 1000  # letters of a message


app = App(
    name="dlion",
    help="Train with Distributed Lion: workers exchange one bit per parameter.",
    version=dlion.__version__,
    config=from_files,
    exit_on_error=False,
    print_error=False,
    help_on_error=False,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)


@app.command
def train(
    settings: Annotated[TrainConfig, Parameter(name="*")] = TrainConfig(),  # noqa: B008 (frozen)
    *,
    elastic: Annotated[ElasticFlags, Parameter(name="*")] = ElasticFlags(),  # noqa: B008 (frozen)
    name: str | None = None,
    out: Path = Path("runs"),
    config: Path | None = None,
    resume: Path | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train a model with several workers on this machine, or as a worker of torchrun or another launcher.

    Parameters
    ----------
    name
        Name of the run: TASK-METHOD-nWORKERS-sSEED unless given, with a number when that is taken.
    out
        Folder in which the run gets its own.
    config
        TOML file with flags as keys, such as the config.toml of a run, or the name of one of `dlion recipes`. Flags on
        the command line win.
    resume
        Folder of a run to continue from its last whole checkpoint. --steps lengthens it; with another number of
        workers, all start from the mean of the saved momenta.
    dry_run
        Train nothing: print the size of the model, steps, tokens, and bytes for each worker.
    """
    if dry_run:
        from dlion.train.dry_run import show

        return show(settings, read_recipe(locate(str(config))) if config is not None else None)
    from dlion.train.jobs import Place
    from dlion.train.launch import run

    if resume is not None and name is not None:
        raise ValueError("--resume and --name contradict each other: a resumed run keeps its folder.")
    if elastic.elastic:
        from dlion.train import elastic_launch

        return elastic_launch.run(settings, Place(out, name, resume), elastic)
    return run(settings, Place(out, name, resume))


@app.command(name="eval")
def evaluate(run: Path, *, data: str | None = None) -> int:
    """Print the validation metrics of a finished run again, computed from its saved models.

    Parameters
    ----------
    run
        Folder of the run.
    data
        Other data to evaluate on.
    """
    from dlion.train.evaluation import print_metrics

    print_metrics(run, data)
    return 0


@app.command
def bench(
    settings: Annotated[BenchConfig, Parameter(name="*")] = BenchConfig(),  # noqa: B008 (frozen)
    *,
    out: Path | None = None,
) -> int:
    """Measure whether voting pays on this group of workers: dlion beside DDP, its fp16 hook and PowerSGD.

    Works on local workers, or as a worker of torchrun or another launcher, to measure a real network. Writes
    bench.json and index.html.

    Parameters
    ----------
    out
        Folder for the results: a new one in bench-runs unless given.
    """
    from dlion.train.bench.command import run

    return run(settings, out)


@app.command
def compare(
    *flags: Annotated[str, Parameter(allow_leading_hyphen=True)],
    settings: Annotated[CompareConfig, Parameter(name="*")] = CompareConfig(),  # noqa: B008 (frozen)
    config: Path | None = None,
    out: Path | None = None,
    table: bool = False,
) -> int:
    """Train the same task by several methods, search each one's best setting, and show what each reaches.

    Every run is one `dlion train`, recorded in cells.jsonl when it is finished and not run again: the same command goes
    on after an interruption, also in another checkout. Writes table.md, table.csv, report.json and report.html.

    Parameters
    ----------
    flags
        Flags of `dlion train` for every run, after `--`.
    config
        TOML file with the study, instead of flags; docs/compare.md says what it may hold.
    out
        Folder of the study: compare-runs/NAME unless given. One that holds a study is gone on with.
    table
        Run nothing: write the tables and the report of what is recorded.
    """
    from dlion.train.compare.command import DEFAULT_OUT, run

    train_flags = _train_flags(flags)
    asked = [f"--{name.replace('_', '-')}" for name in settings.asked] + [f"--{flag}" for flag in train_flags]
    if config is not None and asked:
        raise ValueError(f"--config and {asked[0]} contradict each other: the file describes the whole study.")
    goes_on = config is None and out is not None and (out / "study.toml").is_file() and not asked
    study = None if goes_on else study_named(config) if config else study_of(settings, train_flags)
    return run(settings, study, out or DEFAULT_OUT / (config.stem if config else settings.task), table_only=table)


def _train_flags(words: Sequence[str]) -> dict[str, Any]:
    """What flags of `dlion train` say, under the names that they have in its TOML files."""
    _, bound, _ = app.parse_args(["train", *words], exit_on_error=False, print_error=False)
    strange = sorted(bound.arguments.keys() - {"settings"})
    if strange:
        raise ValueError(f"--{strange[0].replace('_', '-')} cannot be given to runs of a comparison: leave it out.")
    return given_in(bound.arguments.get("settings", TrainConfig()))


@app.command
def recipes(name: str | None = None) -> int:
    """List the paper's experiments, which `dlion train --config NAME` runs; or print one, with its comments.

    Parameters
    ----------
    name
        The recipe to print.
    """
    if name is not None:
        print(locate(name).read_text("utf-8"), end="")
        return 0
    for one in built_in():
        print(f"{one:24} {read_recipe(locate(one)).title}")
    return 0


@app.command(name="few-shot")
def few_shot(
    model: Path,
    settings: Annotated[FewShotConfig, Parameter(name="*")] = FewShotConfig(),  # noqa: B008 (frozen)
    *,
    out: Path | None = None,
) -> int:
    """Ask a language model the seven tasks of the paper's Table 3, through the LM Evaluation Harness.

    Needs pip install "dlion[few-shot]". Writes few-shot.json.

    Parameters
    ----------
    model
        Folder of a run (its model after the last step counts), or of a model of transformers.
    out
        File for the results: few-shot.json in the folder of the run, or here, unless given.
    """
    from dlion.train.few_shot.command import run

    return run(model, settings, out)


@app.command
def plan(
    settings: Annotated[PlanConfig, Parameter(name="*")] = PlanConfig(),  # noqa: B008 (frozen)
    *,
    out: Path | None = None,
) -> int:
    """Predict seconds and bytes of a step for every method on a cluster: dlion, DDP, PowerSGD and sparse methods.

    By a model of latencies and bandwidths (docs/plan.md), from figures that you give; it measures nothing.

    Parameters
    ----------
    out
        Folder for plan.json and index.html, with drawings; without it nothing is written.
    """
    from dlion.train.plan.command import run

    return run(settings, out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (training failed), 2 (a mistake of the user), or
    128 + the number of the signal that ended it.

    A mistake of the user is answered by one sentence on standard error.
    """
    _say_anything()
    try:
        status = app(sys.argv[1:] if arguments is None else arguments)
        if sys.stdout is not None:  # it was closed, as by `>&-`
            sys.stdout.flush()
    except CycloptsError as error:
        return _complain(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "dlion":
            raise
        print(f"{NEEDS_EXTRA} ({error.name} is missing)", file=sys.stderr)
        return USER_ERROR
    except ValueError as error:
        return _complain(error)
    except BrokenPipeError:  # nobody reads on, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return UNREAD
    except OSError as error:
        return _complain(f"{error.strerror or error}: {error.filename}" if error.filename else error)
    except KeyboardInterrupt:
        print("dlion: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status if isinstance(status, int) else 0


def _say_anything() -> None:
    """Let what standard output cannot encode appear as escapes: a name or a path is no reason to fail."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _complain(error: object) -> int:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # under a launcher, one voice on each machine is enough
        print(f"dlion: {sentence(error)}", file=sys.stderr)
    return USER_ERROR


def sentence(error: object) -> str:
    """What an error says, on one line, without the end of a value that is longer than a screen."""
    return one_line(str(error), LONGEST)
