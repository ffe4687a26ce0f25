"""Trackers of experiments: where the records of a run go besides `metrics.jsonl`. Worker 0 alone has them.

Each adapter is a few lines around a package that is imported only when it is asked for. Where they keep things, and for
whom, is said by their own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR ...).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from dlion.train.config import Settled, to_flags
from dlion.train.legal import said_by
from dlion.train.optional import needed, quiet
from dlion.train.progress import Display
from dlion.train.runs import Record, RunFolder, finite

PROJECT = "dlion"
Values = Mapping[str, float]


class Tracker(Protocol):
    """One tracker's view of one run."""

    def log(self, values: Values, step: int) -> None:
        """Keep the numbers of one record."""

    def close(self) -> None:
        """The run has ended or stopped."""


class Tracked:
    """A display that gives each record to trackers too. One that fails is left out from then on, and this is said."""

    def __init__(self, display: Display, trackers: dict[str, Tracker]) -> None:
        self._display = display
        self._trackers = trackers

    def say(self, *lines: str) -> None:
        self._display.say(*lines)

    def show(self, record: Record) -> None:
        self._display.show(record)
        values = numbers_of(record)
        for name, tracker in list(self._trackers.items()):
            self._try(name, partial(tracker.log, values, record["step"]))

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._try(name, tracker.close)
        self._display.close()

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever a service on the network may raise: training goes on
            del self._trackers[name]
            reason = said_by(error)
            self.say(f"{name} failed ({reason}): it gets no more records, metrics.jsonl has them all")


def tracked(display: Display, folder: RunFolder, config: Settled, at: int) -> Display:
    """The display, with the trackers that the configuration names.

    Args:
        at: the step from which the run goes on; 0: it is new.

    Raises:
        ValueError: a tracker's package is not installed, or it refuses to begin.
    """
    trackers: dict[str, Tracker] = {name: _begun(name, folder, config, at) for name in config.track}
    return Tracked(display, trackers) if trackers else display


def check_trackers(names: Sequence[str]) -> None:
    """Raise a ValueError where a tracker's package is not installed."""
    for name in names:
        _package(name)


def numbers_of(record: Record) -> dict[str, float]:
    """The finite numbers of a record; a list's become name/0, name/1 ..., one for each worker."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        parts = {f"{name}/{rank}": part for rank, part in enumerate(value)} if isinstance(value, list) else {}
        flat |= parts or {name: value}
    kept = {name: finite(value) for name, value in flat.items() if name != "step"}
    return {name: float(value) for name, value in kept.items() if isinstance(value, int | float)}


class _TensorBoard:
    def __init__(self, module: Any, folder: RunFolder, config: Settled, at: int) -> None:
        self._writer = module.SummaryWriter(str(folder.path / "tensorboard"), purge_step=at or None)
        if not at:
            lines = [f"    {flag} = {value}" for flag, value in _flags(config).items()]
            self._writer.add_text("config", "\n".join(lines))

    def log(self, values: Values, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, module: Any, folder: RunFolder, config: Settled, at: int) -> None:
        identity = {"id": _identity(folder), "name": folder.path.name, "resume": "allow"}
        self._run = module.init(project=PROJECT, dir=str(folder.path), config=_flags(config), **identity)
        self._run.define_metric("*", step_metric="step")  # a resumed run writes some of its last steps again

    def log(self, values: Values, step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, module: Any, folder: RunFolder, config: Settled, at: int) -> None:
        name, settings = _identity(folder), _flags(config)
        self._run = module.init(project=PROJECT, name=name, config=settings, resume="allow", embed=False)

    def log(self, values: Values, step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, module: Any, folder: RunFolder, config: Settled, at: int) -> None:
        module.set_experiment(PROJECT)
        tags = {"run_of_dlion": _identity(folder)}
        same = f"tags.run_of_dlion = '{_identity(folder)}'"
        found = module.search_runs(experiment_names=[PROJECT], filter_string=same, output_format="list")
        run = found[0].info.run_id if at and found else None
        module.start_run(run_id=run, run_name=folder.path.name, tags=tags)
        if run is None:
            module.log_params(_flags(config))
        self._module = module

    def log(self, values: Values, step: int) -> None:
        self._module.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._module.end_run()


_ADAPTERS: dict[str, tuple[str, str, Callable[..., Tracker]]] = {  # name: module, package, adapter
    "tensorboard": ("torch.utils.tensorboard", "tensorboard", _TensorBoard),
    "wandb": ("wandb", "wandb", _Wandb),
    "trackio": ("trackio", "trackio", _Trackio),
    "mlflow": ("mlflow", "mlflow", _MLflow),
}


def _package(name: str) -> Any:
    module, package, _ = _ADAPTERS[name]
    return needed(module, package, f"--track {name}", f"pip install {package}")


def _begun(name: str, folder: RunFolder, config: Settled, at: int) -> Tracker:
    module = _package(name)
    try:
        with quiet():
            return _ADAPTERS[name][2](module, folder, config, at)
    except Exception as error:
        reason = said_by(error)
        raise ValueError(f"--track {name}: it cannot begin ({reason}): mend that, or leave it out.") from error


def _flags(config: Settled) -> dict[str, Any]:
    return {flag: value for flag, value in to_flags(config).items() if flag != "track"}


def _identity(folder: RunFolder) -> str:
    """The name of a run that is unique among a user's runs, and the same when it is resumed."""
    place = hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()[:8]
    return f"{folder.path.name}-{place}"
