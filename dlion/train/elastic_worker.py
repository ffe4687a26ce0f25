"""The process of one elastic worker: its model, its part in the run, its end."""

import os
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

from dlion.elastic import Elastic
from dlion.train.config import from_flags
from dlion.train.elastic_loop import ElasticRun, Trainee
from dlion.train.elastic_task import Task
from dlion.train.jobs import task_of
from dlion.train.models import build_model
from dlion.train.orphans import FAILED, end_with_launcher
from dlion.train.ranks import handle_signals, threads_for
from dlion.train.runs import RunFolder
from dlion.train.stop_signals import let_through
from dlion.train.weights import load_weights, weights_of
from dlion.train.workers import choices


def work(task: Task) -> None:
    """What a worker's process runs; it ends with status 0, 128 + the number of a signal, or FAILED."""
    end_with_launcher()
    _keep_apart(Path(task.log))
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)

    handle_signals(remember)
    let_through()
    try:
        run = _prepared(task, received)
        number = run.train()
        run.trainee.optimizer.close()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(FAILED)
    sys.stdout.flush()
    os._exit(128 + number if number else 0)  # threads of connections that were lost may be in the way of a clean end


def _prepared(told: Task, received: list[int]) -> ElasticRun:
    config = from_flags(told.flags)
    folder = RunFolder(Path(told.folder))
    torch.set_num_threads(config.threads or threads_for(told.local_workers))
    torch.manual_seed(config.seed)
    model = build_model(config.model, task_of(config), config)
    if config.init_from is not None:
        load_weights(model, weights_of(Path(config.init_from)))
    device = torch.device("cuda", told.number) if told.device == "cuda" else torch.device("cpu")
    model = model.to(device)
    optimizer = Elastic(
        model.named_parameters(),
        lighthouse=told.lighthouse,
        worker=told.number,
        workers=config.workers,
        min_workers=told.min_workers,
        module=model,
        timeout=told.patience,
        start_timeout=told.patience,
        **choices(config),
    )
    trainee = Trainee(config.workers, device, torch.get_num_threads(), model, optimizer)
    return ElasticRun(config, folder, trainee, told, lambda: received[0] if received else 0)


def _keep_apart(log: Path) -> None:
    """Send standard error to `log`: the network library complains there about every worker that is lost."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)
