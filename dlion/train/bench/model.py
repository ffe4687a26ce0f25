"""What every contender trains: a small GPT over bytes, on random tokens that never change."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dlion.train.architectures import Gpt
from dlion.train.bench.settings import HEAD, BenchConfig

BYTES = 256
SEED = 0


def build_gpt(config: BenchConfig, device: torch.device) -> nn.Module:
    """A new model, equal on all workers and for all contenders."""
    torch.manual_seed(SEED)
    model = Gpt(
        BYTES,
        config.tokens,
        layers=config.layers,
        heads=config.width // HEAD,
        width=config.width,
        hidden=config.width * 11 // 4,
    )
    return model.to(device)


def batch_of(config: BenchConfig, rank: int, device: torch.device) -> Tensor:
    """A worker's own tokens: i64[batch_size, tokens + 1]. What is in them makes no step quicker or slower."""
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    return torch.randint(BYTES, (config.batch_size, config.tokens + 1), generator=generator).to(device)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
