"""Tasks: which samples a worker trains on at a step, what its loss is, and how a model is judged.

The kinds are `ImageTask`, `TextTask`, `StreamTask` and `InstructTask`; a task is one of them on a set of data.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from dlion.train.ahead import Ahead
from dlion.train.augment import Augmentation, crop_and_flip
from dlion.train.autoaugment import autoaugment
from dlion.train.data import DataInfo
from dlion.train.data.cifar import load_cifar10
from dlion.train.data.fashion import load_fashion
from dlion.train.data.hub import hub_text, streamed_text
from dlion.train.data.image_folder import IMAGE_SIZE, load_image_folder
from dlion.train.data.instructions import load_instructions
from dlion.train.data.text import load_text
from dlion.train.image_task import ImageTask
from dlion.train.instruct_task import InstructTask
from dlion.train.judging import EVALUATED_WINDOWS
from dlion.train.reading import AS_USUAL, Reading
from dlion.train.stream_task import StreamTask
from dlion.train.text_task import CONTEXT, TextTask


class Task(Protocol):
    """What the training loop needs to know about data."""

    @property
    def name(self) -> str: ...
    @property
    def info(self) -> DataInfo: ...
    @property
    def default_model(self) -> str: ...
    @property
    def metric(self) -> str | None: ...

    def batch(
        self, *, seed: int, rank: int, workers: int, step: int, size: int, iid: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one worker at one step, on the CPU, ready for the model.

        A pure function of its arguments. Each worker has a stream of its own; with `iid` all draw from the
        whole training set, without it the set sorted by class (text: by file) is cut into `workers` parts and
        each draws from its own.

        Raises: ValueError: a worker's part is empty (text: shorter than a window).
        """

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over the batch in nats (per image, byte or token)."""

    def evaluate(self, model: nn.Module, *, rank: int, workers: int, device: torch.device) -> Tensor:
        """f64[3]: summed loss, correct predictions and count over this worker's share `valid[rank::workers]`.

        The sums of all workers over the summed count are the validation loss and accuracy. Puts the model in
        evaluation mode and back; no gradients. A worker beyond the number of samples returns zeros.
        """


@dataclass(frozen=True)
class Source:
    """One entry of `TASKS`: how its data are loaded, and the flags of `Reading` that it takes."""

    load: Callable[[str, str | None, Reading], Task]
    takes: frozenset[str] = frozenset()


# Mean and standard deviation of the training pixels, per channel. Constants of the task, not of the data
# found, so that a model saved after training on one copy of a set means the same when it is evaluated on
# another. Those of image-folder are ImageNet's, as everybody rounds them.
_FASHION = ((0.286,), (0.353,))
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def _fashion(name: str, data: str | None, how: Reading) -> Task:
    return ImageTask(name, load_fashion(data), "conv", _FASHION, mixup=how.mixup)


def _cifar10(name: str, data: str | None, how: Reading) -> Task:
    return ImageTask(name, load_cifar10(data), "conv", _CIFAR10, (crop_and_flip, *_policy(how)), how.mixup)


def _image_folder(name: str, data: str | None, how: Reading) -> Task:
    images = load_image_folder(data, how.image_size or IMAGE_SIZE)
    return ImageTask(name, images, "vit-s16", _IMAGENET, _policy(how), how.mixup, Ahead())


def _policy(how: Reading) -> tuple[Augmentation, ...]:
    return (autoaugment,) if how.autoaugment else ()


def _text(name: str, data: str | None, how: Reading) -> Task:
    return TextTask(name, load_text(data), "gpt", how.context or CONTEXT, how.eval_windows or EVALUATED_WINDOWS)


def _hub_text(name: str, data: str | None, how: Reading) -> Task:
    context, most = how.context or CONTEXT, how.eval_windows or EVALUATED_WINDOWS
    if how.stream:
        text = streamed_text(data, how.column, how.tokenizer, hold_back=most * context)
        return StreamTask(name, text, "gpt", context, most)
    return TextTask(name, hub_text(data, how.column, how.tokenizer), "gpt", context, most)


def _instruct(name: str, data: str | None, how: Reading) -> Task:
    return InstructTask(name, load_instructions(data, how.tokenizer, how.context), "causal-lm")


_SOURCES: dict[str, Source] = {
    "fashion-mnist": Source(_fashion, frozenset({"mixup"})),
    "cifar10": Source(_cifar10, frozenset({"mixup", "autoaugment"})),
    "image-folder": Source(_image_folder, frozenset({"image_size", "mixup", "autoaugment"})),
    "text": Source(_text, frozenset({"context", "eval_windows"})),
    "hf-text": Source(_hub_text, frozenset({"context", "eval_windows", "tokenizer", "column", "stream"})),
    "instruct": Source(_instruct, frozenset({"context", "tokenizer"})),
}
TASKS: tuple[str, ...] = tuple(_SOURCES)


def load_task(name: str, data: str | None = None, reading: Reading = AS_USUAL, pretrained: str | None = None) -> Task:
    """The task called `name` (one of `TASKS`) on the data at path `data`, or on its default data.

    Where a tokenizer is needed and none is given, it is that of the model in the folder `pretrained`.

    Raises: ValueError: unknown name, a flag that means nothing to this task, or the data are missing or damaged.
    """
    if name not in _SOURCES:
        near = difflib.get_close_matches(name, TASKS, n=2, cutoff=0.4)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"unknown task {name!r}{hint} (tasks: {', '.join(TASKS)})")
    source = _SOURCES[name]
    for flag in reading.given():
        if flag not in source.takes:
            tasks = " and ".join(other for other in TASKS if flag in _SOURCES[other].takes)
            raise ValueError(f"--{flag.replace('_', '-')} means nothing to task {name}: it is for {tasks}")
    if "tokenizer" in source.takes and reading.tokenizer is None:
        reading = replace(reading, tokenizer=pretrained)
    return source.load(name, data, reading)
