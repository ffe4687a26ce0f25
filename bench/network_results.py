"""Results of network.py: one file for each finished experiment, with its configuration, environment and figures."""

import json
import os
import platform
import subprocess
import tomllib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from documents import write_whole
from network_experiments import ROOT, Experiment, Record


class ResultsError(Exception):
    """A sentence for the user."""


def environment() -> Record:
    """What the figures depend on beside the configuration: versions and the machine, without its name."""
    return {
        "dlion": tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"],
        "commit": _commit(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": 1,
        "tcp": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "iproute2": _said_by("tc", "-V").removeprefix("tc utility, iproute2-").split(",")[0],
    }


def _commit() -> str:
    """With a plus if the code is not what was committed. Results and documents change while this runs."""
    git = ("git", "-C", str(ROOT))
    changed = _said_by(*git, "status", "--porcelain", "--", "dlion", "bench", ":(exclude)bench/results")
    return _said_by(*git, "rev-parse", "--short", "HEAD") + ("+" if changed else "")


def _said_by(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def file_of(folder: Path, experiment: Experiment) -> Path:
    return folder / f"{experiment.name}.json"


def keep(folder: Path, experiment: Experiment, runs: list[Record]) -> None:
    """Write the finished experiment, whole."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "config": experiment.config,
        "made_by": f"python bench/network.py --only {experiment.name}",
        "environment": environment(),
        "figures": {"runs": runs},
    }
    write_whole(file_of(folder, experiment), json.dumps(record, indent=1) + "\n")


def read(folder: Path, experiments: Iterable[Experiment]) -> dict[str, Record]:
    """The finished experiments by name. One that was configured otherwise is not the same, and left out.

    Raises: ResultsError for a damaged file.
    """
    found = {}
    for experiment in experiments:
        path = file_of(folder, experiment)
        if not path.exists():
            continue
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            same = record["config"] == experiment.config
            for run in [record["figures"]["runs"][0], *record["figures"]["runs"]]:
                run["contenders" if "contenders" in run else "ranks"]
            record["environment"], record["made_by"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ResultsError(f"{path} is damaged ({error!r}): remove it and measure again.") from None
        if same:
            found[experiment.name] = record
    return found
