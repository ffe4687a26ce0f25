"""The files for launchers: they parse, and what they start is a torchrun command with a dlion command inside."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from dlion.cli import app

LAUNCH = Path(__file__).resolve().parent.parent / "examples/launch"
SET = {"SLURM_NNODES": "4", "SLURM_JOB_ID": "7", "SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": "0", "first": "host"}


def read(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text(encoding="utf-8"))


def started(script: str) -> list[str]:
    """The arguments of the one torchrun in a shell script, its variables filled in."""
    (command,) = re.findall(
        r"torchrun ((?:.*\\\n)*.*)", "\n".join(line for line in script.splitlines() if "#" not in line)
    )
    for name, value in SET.items():
        command = command.replace(f"${name}", value)
    return shlex.split(command.replace("\\\n", " ").replace('"${what[@]}"', "--task text --name my-run"))


def commands() -> dict[str, list[str]]:
    job = read("trainjob.yaml")["spec"]["trainer"]
    assert job["command"] == ["torchrun"]
    return {
        "slurm": started((LAUNCH / "slurm.sbatch").read_text(encoding="utf-8")),
        "kubernetes": [str(word) for word in job["args"]],
        "skypilot": started(read("skypilot.yaml")["run"]),
    }


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes", "skypilot"])
def test_it_starts_dlion_under_torchrun(launcher: str) -> None:
    parsed = get_args_parser().parse_args(commands()[launcher])
    assert parsed.module and parsed.training_script == "dlion"
    assert launcher == "kubernetes" or (parsed.nnodes, parsed.nproc_per_node) == ("4", "1")
    app.parse_args(parsed.training_script_args, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("script", ["slurm.sbatch", "skypilot.yaml"])
def test_the_shell_can_read_it(script: str) -> None:
    text = (LAUNCH / script).read_text(encoding="utf-8")
    parts = [text] if script.endswith("sbatch") else [read(script)["setup"], read(script)["run"]]
    for part in parts:
        assert subprocess.run(["bash", "-n"], input=part, text=True, capture_output=True).stderr == ""


def test_the_trainjob_has_the_fields_of_its_kind() -> None:
    job = read("trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    known = {"image", "numNodes", "numProcPerNode", "command", "args", "env", "resourcesPerNode"}
    assert job["spec"]["trainer"].keys() <= known and job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    assert all(isinstance(entry["value"], str) for entry in job["spec"]["trainer"]["env"])  # Kubernetes refuses numbers
    assert all(isinstance(word, str) for word in job["spec"]["trainer"]["args"])
