"""What test_ray.py has each of Ray's workers do around a training function; it writes down what optimizers saw."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.train
import torch
from ranks import gradients, told
from ray.train.torch import prepare_model
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from watched import digest, params

import dlion

Train = Callable[[dict[str, Any]], None]
LOST = 5  # steps after which rank 1 is lost, once


def watched(train: Train, folder: Path, config: dict[str, Any]) -> None:
    """Train without interruption; then from the start until a worker is lost. Ray calls this again, to go on."""
    rank = ray.train.get_context().get_world_rank()
    if ray.train.get_checkpoint() is None:
        write(folder, "whole", rank, seen(train, config | {"save_every": config["steps"] + 1}))
        seen(train, config, lost_after=LOST if rank == 1 else None)
        raise AssertionError("nobody was lost")
    write(folder, "again", rank, seen(train, config))
    write(folder, "averaging", rank, averaging(rank))


def seen(train: Train, config: dict[str, Any], lost_after: int | None = None) -> dict[str, Any]:
    each: list[str] = []
    used: list[Any] = []

    def before(optimizer: Any, *_: Any) -> None:
        used[:] = [optimizer]
        each.append(digest(param.grad for param in params(optimizer)))

    def after(*_: Any) -> None:
        if len(each) == lost_after:
            raise RuntimeError("this worker is lost, once")

    said: list[str] = []
    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        with told(said):
            train(config)
    finally:
        for hook in hooks:
            hook.remove()
    (optimizer,) = used
    return {
        "gradients": each,
        "parameters": digest(params(optimizer)),
        "momenta": digest(optimizer.state[param]["exp_avg"] for param in params(optimizer)),
        "words": sum(-(-param.numel() // 64) for param in params(optimizer)),
        "bytes": optimizer.stats.bytes_sent,
        "said": said,
    }


def averaging(rank: int) -> dict[str, Any]:
    """What happens to who forgets `local_gradients`."""
    model, said, each = prepare_model(nn.Linear(5, 3)), [], []
    optimizer = dlion.DistributedLion(model.parameters(), lr=0.01)
    with told(said):
        for step in range(4):
            optimizer.zero_grad()
            noise = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(4, 5, generator=noise)).square().mean().backward()
            each.append(gradients(model))
            optimizer.step()
    return {"gradients": each, "said": said}


def write(folder: Path, what: str, rank: int, found: dict[str, Any]) -> None:
    (folder / f"{what}-{rank}.json").write_text(json.dumps(found))
