"""`dlion train --dry-run`: what a run would be, from shapes and counts alone. Nothing is trained and little is read."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from dlion.methods import METHODS, average, majority
from dlion.ops import reference
from dlion.train.bench.sentence import volume
from dlion.train.config import DEFAULT_WORKERS, TrainConfig, settle, unknown_name
from dlion.train.jobs import batch_sizes_of, steps_per_epoch, task_of
from dlion.train.models import MODELS, Pictured, Tokenised, TokenSized, build_model
from dlion.train.plan.methods import METHODS as PLANNED
from dlion.train.plan.methods import Scene, average_with_zeros, majority_with_zeros
from dlion.train.plan.rates import Rates
from dlion.train.plan.sizes import Sizes
from dlion.train.plan.work import Work
from dlion.train.pretrained import CAUSAL_LM
from dlion.train.recipes import Recipe
from dlion.train.tasks import Task

WITH_ZEROS = {majority: majority_with_zeros, average: average_with_zeros}
STATES = {"g-adamw": 2}  # numbers of optimizer state for each parameter; one momentum otherwise


def show(config: TrainConfig, recipe: Recipe | None) -> int:
    """Print the plan of a run.

    Where a recipe needs data or a model that is not given, what it assumes takes their place, and the text says so.

    Raises:
        ValueError: unknown names, sizes that do not fit, or data that are given and not there.
    """
    if config.method not in METHODS:
        raise unknown_name("method", config.method, list(METHODS))
    if config.method not in PLANNED:
        raise ValueError(f"--dry-run does not know what ballots of {config.method} weigh: leave --dry-run out.")
    print(*_lines(_plan(config, recipe)), sep="\n")
    return 0


@dataclass(frozen=True)
class _Plan:
    """A run without its tensors. `task` is None where the data are not there; `steps` where they decide."""

    config: TrainConfig
    title: str | None
    task: Task | None
    model: str
    sizes: Sizes
    batches: tuple[int, ...]
    train_size: int
    steps: int | None

    @property
    def batch(self) -> int:
        """Samples of all workers in a step."""
        return sum(self.batches) * self.config.accumulate

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.batches)

    @property
    def context(self) -> int | None:
        """Tokens of a sample."""
        usual = self.task or MODELS[self.model].usual
        return (self.config.context or usual.context) if isinstance(usual, TokenSized) else None

    @property
    def sent(self) -> float:
        """Bytes a worker sends in a step, headers and padding included, as `dlion plan` counts them."""
        if self.workers == 1:
            return 0.0
        work = _work(self.config, Scene(self.sizes, self.workers, Rates()))
        return sum(count * call.sent(self.workers, False) for count, piece in work.pieces for call in piece.calls)


def _plan(config: TrainConfig, recipe: Recipe | None) -> _Plan:
    assumed, needs = (recipe.assumed, recipe.needs) if recipe else ({}, {})
    lacking = [flag for flag in needs if getattr(config, flag.replace("-", "_")) is None]
    task = None if lacking or (assumed and config.data is None) else task_of(config)
    workers = config.simulate or config.workers or DEFAULT_WORKERS
    batches = batch_sizes_of(config, workers)
    model = config.model or (task.default_model if task else "")
    sizes = _sizes(config, model, task, assumed)
    train_size = task.info.train_size if task else assumed.get("train-size", 0)
    steps = None
    if config.epochs is None or train_size or task is not None:  # a stream has no size, and steps_per_epoch says so
        per_epoch = steps_per_epoch(config, batches, train_size)
        steps = settle(config, model=model, workers=workers, steps_per_epoch=per_epoch).steps
    title = recipe.title if recipe else None
    return _Plan(config, title, task, model, sizes, batches, train_size, steps)


def _work(config: TrainConfig, scene: Scene) -> Work:
    """What the method sends with the settings that the run would have."""
    method = METHODS[config.method]
    keep = config.keep or method.rule(reference, "nearest", None).defaults().get("keep")
    if keep is not None:
        scene = replace(scene, keep=keep)
    if config.zeros == "exact" and method.wire in WITH_ZEROS:
        return WITH_ZEROS[method.wire](scene)
    return PLANNED[config.method](scene)


def _sizes(config: TrainConfig, name: str, task: Task | None, assumed: dict[str, int]) -> Sizes:
    if name not in MODELS:
        raise unknown_name("model", name, list(MODELS))
    if name == CAUSAL_LM and config.pretrained is None and "parameters" in assumed:
        return Sizes.assumed(assumed["parameters"], None)
    with torch.device("meta"):
        model = build_model(name, task or _inputs(config, name), config)
    return Sizes.of(name, (tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad))


def _inputs(config: TrainConfig, name: str) -> Pictured | Tokenised:
    usual = MODELS[name].usual
    if isinstance(usual, Pictured):
        channels, height, width = usual.shape
        return Pictured((channels, config.image_size or height, config.image_size or width), usual.classes)
    return Tokenised(1 if name == CAUSAL_LM else usual.vocabulary, config.context or usual.context)


def _lines(plan: _Plan) -> Iterator[str]:
    config, parameters = plan.config, plan.sizes.parameters
    if plan.title is not None:
        yield f"recipe: {plan.title}"
    yield f"task {config.task}, model {plan.model}, method {config.method}"
    yield f"model: {parameters:,} parameters, {volume(4 * parameters)} in float32"
    assumed = f"; {plan.train_size:,} training samples are assumed" if plan.train_size else ""
    yield f"data: {plan.task.info.note if plan.task else f'not given{assumed}'}"
    sizes = sorted(set(plan.batches))
    each = " or ".join(f"{size:,}" for size in sizes) + (f" x {config.accumulate}" if config.accumulate > 1 else "")
    yield f"workers: {plan.workers}, each with {each} samples a step: {plan.batch:,} in all"
    yield from _length(plan)
    ring = 2 * (plan.workers - 1) / plan.workers * 4 * parameters
    share = f"{8 * plan.sent / parameters:.3f} bits for each parameter; an fp32 ring all-reduce: {volume(ring)}"
    yield f"bytes: each worker sends {volume(plan.sent)} a step, {share}"
    states = 4 * parameters * (2 + STATES.get(config.method, 1))
    yield f"memory: {volume(states)} for each worker's parameters, gradients and optimizer; activations on top"


def _length(plan: _Plan) -> Iterator[str]:
    config = plan.config
    epochs = f" ({config.epochs} {'shared ' if config.shared_epochs else ''}epochs)" if config.epochs else ""
    if plan.steps is None:
        yield f"steps: as many as the data need{epochs}, which are not given"
        return
    samples = plan.steps * plan.batch
    yield f"steps: {plan.steps:,}{epochs}: {samples:,} samples; each worker sends {volume(plan.steps * plan.sent)}"
    if plan.context is not None:
        most = "at most " if config.task == "instruct" else ""
        yield f"tokens: {most}{samples * plan.context:,}, {plan.context:,} a sample"
