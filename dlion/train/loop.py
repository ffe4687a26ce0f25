"""The training loop, from top to bottom: what one worker does."""

import hashlib
import math
import platform
import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

import dlion
from dlion.train import checkpoints
from dlion.train.checkpoints import Progress
from dlion.train.config import Settled, learning_rate
from dlion.train.jobs import Job, task_of
from dlion.train.models import build_model
from dlion.train.progress import Display, display, results
from dlion.train.ranks import Ranks
from dlion.train.report import write_report
from dlion.train.runs import Record
from dlion.train.tasks import Task


def train(job: Job, ranks: Ranks) -> None:
    """Train one worker's replica to the last step, or to the step at which a signal stopped all of them.

    A step is: learning rate, gradients of this worker's own batch, exchange and update. A record of step s and
    its evaluation are made when step s + 1 is about to begin, so that a checkpoint of step s holds a state
    that no evaluation has touched, and a run that is resumed from it repeats an uninterrupted one to the bit.
    """
    config, channel, stop = job.config, ranks.channel, ranks.stop
    torch.set_num_threads(ranks.threads)
    task = task_of(config)
    torch.manual_seed(config.seed)
    model = dlion.local_gradients(build_model(config.model, task, config).to(ranks.device))
    hyper = (config.lr, config.betas, config.weight_decay)
    optimizer = dlion.Distributed(model.named_parameters(), config.method, *hyper, overlap=config.overlap)
    progress = Progress()
    if job.checkpoint is not None:
        progress = job.checkpoint.progress
        checkpoints.restore(job.checkpoint, model, optimizer, channel.rank)
        if channel.rank == 0:
            checkpoints.rewind(job.folder, job.checkpoint)
            job.folder.write_config(config)
        channel.barrier()
    spent_before = progress.seconds_total
    screen = display(config.steps, channel.rank)
    screen.say(*_opening(job, ranks, task, optimizer))

    while progress.step < config.steps:
        if _due(progress.step, config.log_every) or _due(progress.step, config.eval_every):
            _record(job, ranks, task, model, optimizer, progress, screen)
        started = time.perf_counter()
        progress.step += 1
        loss = _gradients(config, ranks, task, model, optimizer, progress.step)
        optimizer.step()
        if _due(progress.step, config.log_every) or progress.step == config.steps:
            progress.loss = float(channel.sum_(loss.double()).wait()) / channel.size
        progress.seconds += time.perf_counter() - started
        stopped = progress.step < config.steps and stop.reached(progress.step)
        if stopped or _due(progress.step, config.save_every) or progress.step == config.steps:
            progress.seconds_total = spent_before + time.time() - job.started
            checkpoints.save(job.folder, model, optimizer, progress, channel)
        if stopped:
            screen.close()
            screen.say(f"stopped after step {progress.step}; go on with: dlion train --resume {job.folder.path}")
            return

    last = _record(job, ranks, task, model, optimizer, progress, screen, final=True)
    if channel.rank == 0:
        checkpoints.save_weights(model, job.folder.last_model)
        progress.seconds_total = spent_before + time.time() - job.started
        summary = _summary(config, ranks, task, model, optimizer, progress, last)
        job.folder.write_summary(summary)
        write_report(job.folder, config, summary)
        screen.close()
        screen.say(*results(job.folder, summary))
    channel.barrier()


def _opening(job: Job, ranks: Ranks, task: Task, optimizer: "dlion.Distributed") -> list[str]:
    config, size = job.config, ranks.channel.size
    workers = f"{size} worker{'s' if size > 1 else ''} on {ranks.device.type}"
    threads = f"{ranks.threads} thread{'s' if ranks.threads > 1 else ''} each"
    setting = f"{config.method} ({optimizer.kernels} kernels), {workers}, {threads}"
    resumed = [f"resumed after step {job.checkpoint.progress.step}"] if job.checkpoint else []
    return [f"{config.task} with {config.model}, {setting}: {job.folder.path}", task.info.note, *resumed]


def _gradients(
    config: Settled, ranks: Ranks, task: Task, model: nn.Module, optimizer: "dlion.Distributed", step: int
) -> Tensor:
    """Set the learning rate and this worker's gradients for one step: the mean over its micro-batches. Returns the mean
    loss.

    Everything random about a step (batch, augmentation, dropout) is a function of (seed, rank, step).
    """
    channel = ranks.channel
    torch.manual_seed(_seed_of(config.seed, channel.rank, step))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), device=ranks.device)
    for micro in range(config.accumulate):
        inputs, targets = task.batch(
            seed=config.seed,
            rank=channel.rank,
            workers=channel.size,
            step=step * config.accumulate + micro,
            size=config.batch_size,
            iid=config.iid,
        )
        with _precision(config, ranks.device):
            loss = task.loss(model, inputs.to(ranks.device), targets.to(ranks.device)) / config.accumulate
        with optimizer.accumulate() if micro < config.accumulate - 1 else nullcontext():
            torch.autograd.backward(loss)
        total += loss.detach()
    if config.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    return total


def _record(
    job: Job,
    ranks: Ranks,
    task: Task,
    model: nn.Module,
    optimizer: "dlion.Distributed",
    progress: Progress,
    screen: Display,
    final: bool = False,
) -> Record:
    """Write the record of the steps done so far, with an evaluation when one is due."""
    config, stats = job.config, optimizer.stats
    samples = progress.step * config.batch_size * config.accumulate * ranks.channel.size
    record: Record = {"step": progress.step}
    if progress.step:
        record |= {"loss": progress.loss, "lr": learning_rate(config, progress.step)}
    if final or _due(progress.step, config.eval_every):
        record |= evaluate(ranks, task, model)
        _keep_best(job, ranks, model, progress, record)
    record |= {
        "bytes_sent": stats.bytes_sent,
        "bytes_received": stats.bytes_received,
        "bits_per_param_sent": stats.bits_per_param_sent,
        "ratio": stats.ratio,
        "seconds": progress.seconds,
        "samples_per_s": samples / progress.seconds if progress.seconds else 0.0,
    }
    if ranks.channel.rank == 0:
        job.folder.append(record)
    screen.show(record)
    return record


def evaluate(ranks: Ranks, task: Task, model: nn.Module) -> Record:
    """Validation loss and accuracy over all workers' shares, added up in rank order on every worker."""
    dlion.synchronize_buffers(model)
    channel = ranks.channel
    share = task.evaluate(model, rank=channel.rank, workers=channel.size, device=ranks.device)
    return validation(task, channel.gather_json(share.tolist()))


def validation(task: Task, shares: list[list[float]]) -> Record:
    """The validation metrics from each worker's summed loss, correct predictions and count."""
    loss, correct, count = (math.fsum(column) for column in zip(*shares, strict=True))
    metrics = {"val_loss": loss / count}
    if task.metric == "accuracy":
        metrics["val_accuracy"] = correct / count
    return metrics


def _keep_best(job: Job, ranks: Ranks, model: nn.Module, progress: Progress, record: Record) -> None:
    """Keep the model as the run's best when its accuracy (without one: its loss) is the best so far."""
    loss, accuracy = record["val_loss"], record.get("val_accuracy")
    if accuracy is not None:
        better = progress.best_accuracy is None or accuracy > progress.best_accuracy
    else:
        better = progress.best_loss is None or loss < progress.best_loss
    if better:
        progress.best_step, progress.best_loss, progress.best_accuracy = progress.step, loss, accuracy
        if ranks.channel.rank == 0:
            checkpoints.save_weights(model, job.folder.best_model)


def _summary(
    config: Settled,
    ranks: Ranks,
    task: Task,
    model: nn.Module,
    optimizer: "dlion.Distributed",
    progress: Progress,
    last: Record,
) -> Record:
    """The results: val_loss and val_accuracy are those of the last step, best_* those of the best evaluation."""
    best = {"best_step": progress.best_step, "best_val_loss": progress.best_loss}
    if progress.best_accuracy is not None:
        best["best_val_accuracy"] = progress.best_accuracy
    return {
        "task": config.task,
        "model": config.model,
        "method": config.method,
        "workers": ranks.channel.size,
        "params": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "steps": progress.step,
        "seed": config.seed,
        "data": {"name": task.info.name, "sha256": task.info.sha256},
        **{key: last[key] for key in ("val_loss", "val_accuracy") if key in last},
        **best,
        "bits_per_param_sent": optimizer.stats.bits_per_param_sent,
        "bits_per_param_received": optimizer.stats.bits_per_param_received,
        "bytes_sent": optimizer.stats.bytes_sent,
        "bytes_received": optimizer.stats.bytes_received,
        "ratio": optimizer.stats.ratio,
        "abstentions": optimizer.stats.abstentions,
        "seconds": progress.seconds,
        "seconds_total": progress.seconds_total,
        "samples_per_s": last["samples_per_s"],
        "lr": config.lr,
        "device": ranks.device.type,
        "threads": ranks.threads,
        "kernels": optimizer.kernels,
        "versions": {
            "dlion": dlion.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def _due(step: int, every: int) -> bool:
    return step % every == 0


def _precision(config: Settled, device: torch.device) -> AbstractContextManager[object]:
    if config.precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def _seed_of(seed: int, rank: int, step: int) -> int:
    digest = hashlib.blake2b(f"{seed} {rank} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
