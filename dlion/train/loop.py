"""The training loop, from top to bottom, for the workers that compute here: one of many, or all of them."""

import hashlib
import math
import platform
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

import dlion
from dlion.optim import Distributed
from dlion.simulate import Simulation
from dlion.train import checkpoints
from dlion.train.checkpoints import Keeper, Progress
from dlion.train.config import Settled, learning_rate
from dlion.train.jobs import Job, task_of
from dlion.train.models import build_model
from dlion.train.progress import Display, display, results
from dlion.train.report import write_report
from dlion.train.runs import Record
from dlion.train.tasks import Task
from dlion.train.tracking import tracked
from dlion.train.watch import Watch
from dlion.train.weights import load_weights, save_weights, weights_of
from dlion.train.workers import Place, Trainees, Workers


def train(job: Job, place: Place) -> None:
    """Train to the last step, or to the step at which a signal stopped all workers.

    A step is: learning rate, gradients of each worker's own batch, exchange and update. A record of step s and
    its evaluation are made when step s + 1 is about to begin, so that a checkpoint of step s holds a state
    that no evaluation has touched, and a run that is resumed from it repeats an uninterrupted one to the bit.
    """
    config = job.config
    task = task_of(config)
    workers = _gather(job, place, task)
    model, optimizer, leads = workers.model, workers.optimizer, 0 in workers.here
    progress = _begin(job, workers)
    optimizer.phases.start()
    spent_before = progress.seconds_total
    screen, watch = display(config.steps, workers.here[0]), Watch()
    if leads:
        screen = tracked(screen, job.folder, config, at=progress.step)
    screen.say(*_opening(job, workers, task))
    keeper = Keeper(job.folder, config, workers, task.info)

    while progress.step < config.steps:
        if due(progress.step, config.log_every) or due(progress.step, config.eval_every):
            _record(job, workers, task, progress, screen)
            screen.say(*watch.look(optimizer.stats))
        started = time.perf_counter()
        progress.step += 1
        progress.samples += config.samples_per_step
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, progress.step)
        losses = [gradients_of(config, workers, task, rank, progress.step) for rank in workers.here]
        optimizer.step()
        if due(progress.step, config.log_every) or progress.step == config.steps:
            progress.loss = math.fsum(workers.gathered([float(loss) for loss in losses])) / workers.size
        progress.seconds += time.perf_counter() - started
        stopped = progress.step < config.steps and workers.stop.reached(progress.step)
        if stopped or due(progress.step, config.save_every) or progress.step == config.steps:
            progress.seconds_total = spent_before + time.time() - job.started
            with workers.during("checkpoint"):
                keeper.save(progress)
        if stopped:
            keeper.finish()
            screen.close()
            screen.say(f"stopped after step {progress.step}; go on with: dlion train --resume {job.folder.path}")
            return

    last = _record(job, workers, task, progress, screen, final=True)
    keeper.finish()
    if leads:
        save_weights(model, job.folder.last_model)
        progress.seconds_total = spent_before + time.time() - job.started
        summary = summary_of(config, workers, task, progress, last)
        job.folder.write_summary(summary)
        write_report(job.folder, config, summary)
        screen.close()
        screen.say(*results(job.folder, summary))
    workers.barrier()


def _gather(job: Job, place: Place, task: Task) -> Workers:
    """The workers around a new model: random, a function of the seed, or the one to start from."""
    config = job.config
    torch.manual_seed(config.seed)
    model = build_model(config.model, task, config)
    if config.init_from is not None and job.checkpoint is None:
        load_weights(model, weights_of(Path(config.init_from)))
    workers = place.workers(config, model.to(place.device))
    torch.set_num_threads(workers.threads)
    return workers


def _begin(job: Job, workers: Workers) -> Progress:
    """How far the run has come: the workers are there, and the run folder holds nothing that is later."""
    if job.checkpoint is None:
        return Progress()
    checkpoints.restore(job.checkpoint, workers)
    if 0 in workers.here:
        checkpoints.rewind(job.folder, job.checkpoint)
        job.folder.write_config(job.config)
    workers.barrier()
    return job.checkpoint.progress


def _opening(job: Job, workers: Workers, task: Task) -> list[str]:
    config, size = job.config, workers.size
    kind = "simulated worker" if config.simulate else "worker"
    who = f"{size} {kind}{'s' if size > 1 else ''} on {workers.device.type}"
    setting = f"{config.method} ({workers.optimizer.kernels} kernels), {who}, {threads_text(workers.threads)}"
    return [f"{config.task} with {config.model}, {setting}: {job.folder.path}", task.info.note, *_resumed(job)]


def threads_text(threads: int) -> str:
    """How many threads each worker has."""
    return f"{threads} thread{'s' if threads > 1 else ''} each"


def _resumed(job: Job) -> list[str]:
    """What to say of the checkpoint from which a run goes on."""
    found = job.checkpoint
    if found is None:
        return []
    return [*found.remarks, resumed_text(found.progress.step, job.config.workers, found.workers)]


def resumed_text(step: int, now: int, before: int) -> str:
    """What a run that goes on after `step` says of the workers there are and of those that wrote its checkpoint."""
    here, there = f"{now} worker{'s' if now > 1 else ''}", f"{'were' if before > 1 else 'was'} {before}"
    other = f", with {here} where there {there}: all start from the mean of the saved momenta" if now != before else ""
    return f"resumed after step {step}{other}"


def gradients_of(config: Settled, workers: Trainees, task: Task, rank: int, step: int) -> Tensor:
    """Make one worker's gradients of a step: the mean over its micro-batches. Returns the mean loss.

    Everything random about a step (batch, augmentation, dropout) is a function of (seed, rank, step).
    """
    torch.manual_seed(_seed_of(config.seed, rank, step))
    model, device = workers.model, workers.device
    total = torch.zeros((), device=device)
    with workers.turn(rank):
        for micro in range(config.accumulate):
            inputs, targets = task.batch(
                seed=config.seed,
                rank=rank,
                workers=workers.size,
                step=step * config.accumulate + micro,
                size=config.batch_of(rank),
                iid=config.iid,
            )
            with _precision(config, device):
                loss = task.loss(model, inputs.to(device), targets.to(device)) / config.accumulate
            with workers.optimizer.accumulate() if micro < config.accumulate - 1 else nullcontext():
                torch.autograd.backward(loss)
            total += loss.detach()
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    return total


def _record(job: Job, workers: Workers, task: Task, progress: Progress, screen: Display, final: bool = False) -> Record:
    """Write the record of the steps done so far, with an evaluation when one is due."""
    config = job.config
    record: Record = {"step": progress.step}
    if progress.step:
        record |= {"loss": progress.loss, "lr": learning_rate(config, progress.step)}
    if final or due(progress.step, config.eval_every):
        record |= evaluate(workers, task)
        _keep_best(job, workers, progress, record)
    record |= exchange_of(workers.optimizer) | {
        "seconds": progress.seconds,
        "samples_per_s": progress.samples / progress.seconds if progress.seconds else 0.0,
        "checkpoint_seconds": progress.held_up,
    }
    if 0 in workers.here:
        job.folder.append(record)
    screen.show(record)
    return record


def exchange_of(optimizer: Distributed | Simulation) -> Record:
    """What the exchange has cost so far, and the seconds of its phases since this was last asked."""
    stats, phases = optimizer.stats, optimizer.phases
    seconds = {f"{phase}_seconds": value for phase, value in phases.seconds.items()}
    phases.start()
    return {
        "bytes_sent": stats.bytes_sent,
        "bytes_received": stats.bytes_received,
        "bits_per_param_sent": stats.bits_per_param_sent,
        "ratio": stats.ratio,
        "abstentions": stats.abstentions,
        "agreement": stats.agreement,
        **seconds,
    }


def evaluate(workers: Workers, task: Task) -> Record:
    """Validation loss and accuracy over all workers' shares, added up in rank order on every worker."""
    with workers.during("evaluation"):
        workers.synchronize_buffers()
        shares = [
            task.evaluate(workers.model, rank=rank, workers=workers.size, device=workers.device)
            for rank in workers.here
        ]
        return validation(task, workers.gathered([share.tolist() for share in shares]))


def validation(task: Task, shares: list[list[float]]) -> Record:
    """The validation metrics from each worker's summed loss, correct predictions and count."""
    loss, correct, count = (math.fsum(column) for column in zip(*shares, strict=True))
    metrics = {"val_loss": loss / count}
    if task.metric == "accuracy":
        metrics["val_accuracy"] = correct / count
    return metrics


def _keep_best(job: Job, workers: Workers, progress: Progress, record: Record) -> None:
    """Keep the model as the run's best when its evaluation is the best so far."""
    if checkpoints.is_best(progress, progress.step, record) and 0 in workers.here:
        save_weights(workers.model, job.folder.best_model)


def summary_of(config: Settled, workers: Trainees, task: Task, progress: Progress, last: Record) -> Record:
    """The results: val_loss and val_accuracy are those of the last step, best_* those of the best evaluation."""
    stats = workers.optimizer.stats
    best = {"best_step": progress.best_step, "best_val_loss": progress.best_loss}
    if progress.best_accuracy is not None:
        best["best_val_accuracy"] = progress.best_accuracy
    return {
        "task": config.task,
        "model": config.model,
        "method": config.method,
        "workers": workers.size,
        "simulated": config.simulate is not None,
        "params": sum(p.numel() for p in workers.model.parameters() if p.requires_grad),
        "steps": progress.step,
        "seed": config.seed,
        "data": {"name": task.info.name, "sha256": task.info.sha256},
        **{key: last[key] for key in ("val_loss", "val_accuracy") if key in last},
        **best,
        "bits_per_param_sent": stats.bits_per_param_sent,
        "bits_per_param_received": stats.bits_per_param_received,
        "bytes_sent": stats.bytes_sent,
        "bytes_received": stats.bytes_received,
        "ratio": stats.ratio,
        "abstentions": stats.abstentions,
        "seconds": progress.seconds,
        "seconds_total": progress.seconds_total,
        "samples_per_s": last["samples_per_s"],
        "checkpoints": progress.checkpoints,
        "checkpoint_seconds": progress.held_up,
        "lr": config.lr,
        "device": workers.device.type,
        "threads": workers.threads,
        "kernels": workers.optimizer.kernels,
        "versions": {
            "dlion": dlion.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps is done after `step`."""
    return step % every == 0


def _precision(config: Settled, device: torch.device) -> AbstractContextManager[object]:
    if config.precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def _seed_of(seed: int, rank: int, step: int) -> int:
    digest = hashlib.blake2b(f"{seed} {rank} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
