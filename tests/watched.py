"""Runs a script as it stands, and writes down what its optimizer saw: watched.py FOLDER SCRIPT ARGUMENTS..."""

import hashlib
import json
import os
import runpy
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlion import Distributed

seen: list[Distributed] = []
gradients: list[str] = []


def watch(optimizer: Optimizer, *_: Any) -> None:
    assert isinstance(optimizer, Distributed)
    seen[:] = [optimizer]
    gradients.append(digest(param.grad for param in params(optimizer) if param.grad is not None))


def params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def digest(tensors: Iterable[Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


if __name__ == "__main__":
    folder, *sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    register_optimizer_step_pre_hook(watch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runpy.run_path(sys.argv[0], run_name="__main__")
    (optimizer,) = seen
    found = {
        "gradients": gradients,
        "parameters": digest(params(optimizer)),
        "momenta": digest(optimizer.state[param]["exp_avg"] for param in params(optimizer)),
        "sizes": [param.numel() for param in params(optimizer)],
        "steps": optimizer.stats.steps,
        "bytes": optimizer.stats.bytes_sent,
        "warned": [str(warning.message) for warning in caught],
    }
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
