"""The architectures of `dlion train`. None has buffers, so replicas are equal when their parameters are."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu


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
    """A vision transformer (Dosovitskiy et al. 2021) on patches of 4x4 pixels, unless told otherwise, classified by
    the mean of the tokens.

    f32[b, c, h, w] -> f32[b, classes]. No dropout: it would draw from a random state that a resumed run does
    not have.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        *,
        layers: int,
        heads: int,
        width: int,
        hidden: int,
        patch: int = 4,
    ) -> None:
        super().__init__()
        channels, height, width_in = shape
        if height % patch or width_in % patch:
            raise ValueError(
                f"a ViT cuts images into patches of {patch}x{patch} pixels, but these are "
                f"{height}x{width_in}; use --model conv, or another --patch"
            )
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((height // patch) * (width_in // patch), width))
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
