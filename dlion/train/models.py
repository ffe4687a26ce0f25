"""The models of `dlion train` by name: the project's small ones, and the paper's.

The paper names its models and gives few sizes; each entry says what was chosen where it is silent.
"""

import difflib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from dlion.train.architectures import Conv, Gpt, Vit
from dlion.train.pretrained import CAUSAL_LM, PretrainedLm
from dlion.train.shape import AS_NAMED, ModelShape


@runtime_checkable
class ImageSized(Protocol):
    """What a model must know of images, as a task does."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""

    @property
    def classes(self) -> int: ...


@runtime_checkable
class TokenSized(Protocol):
    """What a model must know of token sequences."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def context(self) -> int: ...


@dataclass(frozen=True)
class Pictured:
    """An `ImageSized` without images."""

    shape: tuple[int, int, int]
    classes: int


@dataclass(frozen=True)
class Tokenised:
    """A `TokenSized` without tokens."""

    vocabulary: int
    context: int


@dataclass(frozen=True)
class Named:
    """A model by its sizes, which flags of the same names change.

    Attributes:
        architecture: what they are the sizes of. usual: what it is made for, for plans without data.
    """

    description: str
    architecture: type[Conv] | type[Vit] | type[Gpt] | type[PretrainedLm]
    sizes: dict[str, int]
    usual: Pictured | Tokenised

    @property
    def takes_images(self) -> bool:
        return self.architecture in (Conv, Vit)


_FASHION, _CIFAR, _IMAGENET = Pictured((1, 28, 28), 10), Pictured((3, 32, 32), 10), Pictured((3, 224, 224), 1000)
_BYTES, _GPT2, _LLAMA = Tokenised(256, 128), Tokenised(50257, 1024), Tokenised(32000, 2048)


def _vit(usual: Pictured, text: str, layers: int, heads: int, width: int, hidden: int, patch: int) -> Named:
    sizes = {"layers": layers, "heads": heads, "width": width, "hidden": hidden, "patch": patch}
    return Named(text, Vit, sizes, usual)


def _gpt(usual: Tokenised, text: str, layers: int, heads: int, width: int, hidden: int) -> Named:
    return Named(text, Gpt, {"layers": layers, "heads": heads, "width": width, "hidden": hidden}, usual)


MODELS: dict[str, Named] = {
    "conv": Named("small convolutional net for images", Conv, {}, _FASHION),
    "vit": _vit(_FASHION, "small vision transformer", 4, 4, 64, 128, 4),
    # Layers, heads and width are the paper's; it does not say the patch nor the width of the MLP: 4 and 512 are those
    # of the usual CIFAR ViT.
    "vit-cifar": _vit(_CIFAR, "the paper's vision transformer for CIFAR-10", 6, 8, 512, 512, 4),
    # The names fix these sizes (Dosovitskiy et al. 2021, table 1; DeiT for S). Classified by the mean of the tokens, no
    # biases in attention.
    "vit-s16": _vit(_IMAGENET, "ViT-S/16", 12, 6, 384, 1536, 16),
    "vit-b16": _vit(_IMAGENET, "ViT-B/16", 12, 12, 768, 3072, 16),
    "gpt": _gpt(_BYTES, "small GPT2++ (gated MLPs and RMSNorm) for text", 4, 4, 96, 256),
    # The paper gives neither layers nor widths. 350M and 760M are the names of GPT-3's second and third model (24
    # layers of width 1,024 and 1,536, 16 heads; Brown et al. 2020, table 2.1), and a gated MLP of 8/3 of the width
    # (rounded up to a multiple of 16) has as many parameters as theirs of 4.
    "gpt2pp-350m": _gpt(_GPT2, "GPT2++ of 354.9 M parameters", 24, 16, 1024, 2736),
    "gpt2pp-760m": _gpt(_GPT2, "GPT2++ of 758.3 M parameters", 24, 16, 1536, 4096),
    CAUSAL_LM: Named("a causal language model of transformers, from the folder --pretrained", PretrainedLm, {}, _LLAMA),
}


def build_model(name: str | None, task: object, shape: ModelShape = AS_NAMED) -> nn.Module:
    """A new model called `name` (one of `MODELS`; None: the task's default) for the task's inputs and outputs.

    Args:
        task: an `ImageSized` or `TokenSized`; with a `name` when it is a task, and `default_model` when `name` is None.
        shape: what differs from the named model's own sizes.

    Initialised from torch's global generator: seed it first. Under `torch.device("meta")` nothing is allocated.

    Raises: ValueError: unknown name, a size that this model does not have, or a model that does not fit the task.
    """
    name = getattr(task, "default_model") if name is None else name  # noqa: B009 (only tasks have one)
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=2, cutoff=0.4)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"unknown model {name!r}{hint} (models: {', '.join(MODELS)})")
    model, given = MODELS[name], shape.sizes()
    for flag in given.keys() - model.sizes.keys():
        has = f"has {', '.join(f'--{size}' for size in model.sizes)}" if model.sizes else "has one size"
        raise ValueError(f"--{flag} {given[flag]} does not fit model {name}, which {has}")
    if shape.pretrained is not None and name != CAUSAL_LM:
        raise ValueError(f"--pretrained needs --model {CAUSAL_LM}, and the model is {name}")
    if isinstance(task, ImageSized) and model.takes_images:
        return _for_images(model, task, model.sizes | given)
    if isinstance(task, TokenSized) and not model.takes_images:
        return _for_tokens(model, task, model.sizes | given, shape.pretrained)
    fitting = [other for other in MODELS if MODELS[other].takes_images == isinstance(task, ImageSized)]
    what = getattr(task, "name", "at hand")
    raise ValueError(f"model {name} does not fit task {what}; models that do: {', '.join(fitting)}")


def _for_images(model: Named, task: ImageSized, sizes: dict[str, int]) -> nn.Module:
    if model.architecture is Conv:
        return Conv(task.shape, task.classes)
    _check_heads(sizes)
    return Vit(task.shape, task.classes, **sizes)


def _for_tokens(model: Named, task: TokenSized, sizes: dict[str, int], pretrained: str | None) -> nn.Module:
    if model.architecture is PretrainedLm:
        return PretrainedLm.load(pretrained, task.vocabulary, task.context)
    _check_heads(sizes)
    return Gpt(task.vocabulary, task.context, **sizes)


def _check_heads(sizes: dict[str, int]) -> None:
    if sizes["width"] % sizes["heads"]:
        raise ValueError(f"--width {sizes['width']} cannot be cut into --heads {sizes['heads']}: it must be a multiple")
