"""Small models for the tasks of `dlion train`. None has buffers, so replicas are equal when their parameters
are.
"""

import difflib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from dlion.train.tasks import ImageTask, Task, TextTask


class Conv(nn.Module):
    """Two convolutions with pooling and two linear layers: f32[b, c, h, w] -> f32[b, classes].

    105,866 parameters for one channel, 28x28 and ten classes. Small enough that four workers train in two
    cores.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < 4:
            raise ValueError(f"model conv needs images of at least 4x4 pixels, these are {height}x{width}")
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * (height // 4) * (width // 4), 64), nn.ReLU(), nn.Linear(64, classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits


class Attention(nn.Module):
    """Multi-head self-attention f32[b, t, width] -> f32[b, t, width]."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class GatedMlp(nn.Module):
    """`down(silu(gate(x)) * up(x))`, the gated linear unit of GPT2++ and LLaMA."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """A pre-norm residual block: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norms: tuple[nn.Module, nn.Module]) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = norms

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Vit(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021) on patches of 4x4 pixels, classified by the mean of the
    tokens.

    f32[b, c, h, w] -> f32[b, classes]. No dropout: it would draw from a random state that a resumed run does
    not have.
    """

    patch = 4

    def __init__(
        self, shape: tuple[int, int, int], classes: int, *, layers: int, heads: int, width: int, hidden: int
    ) -> None:
        super().__init__()
        channels, height, width_in = shape
        if height % self.patch or width_in % self.patch:
            raise ValueError(
                f"a ViT cuts images into patches of {self.patch}x{self.patch} pixels, but these are "
                f"{height}x{width_in}; use --model conv"
            )
        self.patches = nn.Conv2d(channels, width, self.patch, stride=self.patch)
        self.positions = nn.Parameter(0.02 * torch.randn((height // self.patch) * (width_in // self.patch), width))
        self.blocks = nn.Sequential(
            *(
                Block(
                    Attention(width, heads, causal=False),
                    nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)),
                    (nn.LayerNorm(width), nn.LayerNorm(width)),
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


class Gpt(nn.Module):
    """The paper's GPT2++ in small: GPT-2 with RMSNorm and gated MLPs. i64[b, t <= context] -> f32[b, t,
    vocabulary].

    Input and output embedding are one matrix, as in GPT-2; positions are learned.
    """

    def __init__(self, vocabulary: int, context: int, *, layers: int, heads: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(
            *(
                Block(
                    Attention(width, heads, causal=True),
                    GatedMlp(width, hidden),
                    (nn.RMSNorm(width), nn.RMSNorm(width)),
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.norm(self.blocks(x)) @ self.tokens.weight.T
        return logits


def _conv(task: ImageTask) -> nn.Module:
    return Conv(task.shape, task.classes)


def _vit(task: ImageTask) -> nn.Module:
    return Vit(task.shape, task.classes, layers=4, heads=4, width=64, hidden=128)


def _vit_cifar(task: ImageTask) -> nn.Module:
    # Layers, heads and width are the paper's; it does not say the width of the MLP, 512 is that of the usual
    # CIFAR ViT.
    return Vit(task.shape, task.classes, layers=6, heads=8, width=512, hidden=512)


def _gpt(task: TextTask) -> nn.Module:
    return Gpt(task.vocabulary, task.context, layers=4, heads=4, width=96, hidden=256)


_IMAGE_MODELS: dict[str, Callable[[ImageTask], nn.Module]] = {
    "conv": _conv,
    "vit": _vit,
    "vit-cifar": _vit_cifar,
}
_TEXT_MODELS: dict[str, Callable[[TextTask], nn.Module]] = {"gpt": _gpt}

MODELS: dict[str, str] = {
    "conv": "small convolutional net for images",
    "vit": "small vision transformer: 4 layers, 4 heads, width 64",
    "vit-cifar": "the paper's vision transformer: 6 layers, 8 heads, width 512",
    "gpt": "small GPT with gated MLPs and RMSNorm for text",
}


def build_model(name: str | None, task: Task) -> nn.Module:
    """A new model called `name` (one of `MODELS`; None: the task's default) for the task's inputs and
    outputs.

    Initialised from torch's global generator: seed it first.

    Raises: ValueError: unknown name, or a model that does not fit the task.
    """
    name = task.default_model if name is None else name
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=2, cutoff=0.4)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"unknown model {name!r}{hint} (models: {', '.join(MODELS)})")
    if isinstance(task, ImageTask) and name in _IMAGE_MODELS:
        return _IMAGE_MODELS[name](task)
    if isinstance(task, TextTask) and name in _TEXT_MODELS:
        return _TEXT_MODELS[name](task)
    fitting = _IMAGE_MODELS if isinstance(task, ImageTask) else _TEXT_MODELS
    raise ValueError(f"model {name} does not fit task {task.name}; models that do: {', '.join(fitting)}")
