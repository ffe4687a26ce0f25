"""The command `dlion`. Importing this file, `--help` and `--version` do not import torch."""

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import dlion

NEEDS_EXTRA = 'dlion: the command needs more than the library does: pip install "dlion[train]"'

try:
    from cyclopts import App, CycloptsError, Parameter
    from cyclopts.config import Dict
except ModuleNotFoundError:
    print(NEEDS_EXTRA, file=sys.stderr)
    raise SystemExit(2) from None

from dlion.train.bench.settings import BenchConfig  # noqa: E402
from dlion.train.compare.settings import CompareConfig, study_of  # noqa: E402
from dlion.train.compare.study import read_study  # noqa: E402
from dlion.train.config import INSTEAD, TrainConfig, given_in, read_toml, unknown_name  # noqa: E402 (it needs cyclopts)
from dlion.train.few_shot.settings import FewShotConfig  # noqa: E402
from dlion.train.plan.settings import PlanConfig  # noqa: E402

USER_ERROR = 2
INTERRUPTED = 130
UNREAD = 141


def from_files(app: App, commands: tuple[str, ...], arguments: Any) -> None:
    """Fill in the flags that were not given from the file of --config, or from the run of --resume."""
    if commands != ("train",):
        return
    given = {argument.name: argument.tokens for argument in arguments if argument.tokens}
    paths = [Path(given[flag][0].value) for flag in ("--config", "--resume") if flag in given]
    if len(paths) > 1:
        raise ValueError("--config and --resume contradict each other: a resumed run has its own configuration.")
    if not paths:
        return
    path = paths[0] / "config.toml" if "--resume" in given else paths[0]
    if "--resume" in given and not path.is_file():
        raise ValueError(
            f"{paths[0]} holds no run (it has no config.toml): give the folder that `dlion train` reported."
        )
    values = read_toml(path)
    flags = {argument.name.removeprefix("--") for argument in arguments} - {"*", "config", "resume"}
    for key in values:
        if key.replace("_", "-") not in flags:
            raise unknown_name("configuration key", key, sorted(flags))
    for one, other in INSTEAD.items():
        for mine, theirs in ((one, other), (other, one)):
            if f"--{mine}" in given:
                values = {key: value for key, value in values.items() if key.replace("_", "-") != theirs}
    Dict(values, source=str(path), use_commands_as_keys=False)(app, commands, arguments)


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
    name: str | None = None,
    out: Path = Path("runs"),
    config: Path | None = None,
    resume: Path | None = None,
) -> int:
    """Train a model with several workers on this machine, or as a worker of torchrun or another launcher.

    Parameters
    ----------
    name
        Name of the run: TASK-METHOD-nWORKERS-sSEED unless given, with a number when that is taken.
    out
        Folder in which the run gets its own.
    config
        TOML file with flags as keys, such as the config.toml of a run. Flags on the command line win.
    resume
        Folder of a run to continue from its last checkpoint. --steps lengthens it.
    """
    from dlion.train.jobs import Place
    from dlion.train.launch import run

    if resume is not None and name is not None:
        raise ValueError("--resume and --name contradict each other: a resumed run keeps its folder.")
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
    study = None if goes_on else read_study(config) if config else study_of(settings, train_flags)
    return run(settings, study, out or DEFAULT_OUT / (config.stem if config else settings.task), table_only=table)


def _train_flags(words: Sequence[str]) -> dict[str, Any]:
    """What flags of `dlion train` say, under the names that they have in its TOML files."""
    _, bound, _ = app.parse_args(["train", *words], exit_on_error=False, print_error=False)
    strange = sorted(bound.arguments.keys() - {"settings"})
    if strange:
        raise ValueError(f"--{strange[0]} cannot be given to runs of a comparison: leave it out.")
    return given_in(bound.arguments.get("settings", TrainConfig()))


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
        print(f"dlion: {' '.join(str(error).split())}", file=sys.stderr)
    return USER_ERROR
