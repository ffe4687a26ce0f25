"""How a model is judged: summed loss, correct predictions and count, over a worker's share of the validation data."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dlion.train.data.sets import Tokens
from dlion.train.data.tokens import windows

IGNORED = -100  # a target that counts for nothing: torch's own number for it
EVALUATED_WINDOWS = 256  # unless told otherwise: all of them would often take longer than training does
_LOGITS = 2**20  # 4 MB of logits at a time: 32 windows of 128 bytes, one of 20 GPT-2 tokens


@contextmanager
def judged(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, and back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def judge(logits: Tensor, targets: Tensor) -> Tensor:
    """f64[3] of f32[n, classes] and i64[n]; targets of -100 are left out."""
    summed = cross_entropy(logits, targets, reduction="sum")
    correct = (logits.argmax(1) == targets).sum()
    count = (targets != IGNORED).sum()
    return torch.stack([summed.double(), correct.double(), count.double()])


def at_once(context: int, vocabulary: int) -> int:
    """How many sequences are judged in one call."""
    return max(_LOGITS // (context * vocabulary), 1)


def judge_text(
    model: nn.Module,
    tokens: Tokens,
    context: int,
    vocabulary: int,
    count: int,
    *,
    rank: int,
    workers: int,
    device: torch.device,
) -> Tensor:
    """f64[3] over a worker's share of `count` windows at even distances, always the same."""
    result = torch.zeros(3, dtype=torch.float64)
    offsets = np.arange(rank, count, workers) * (len(tokens) - context - 1) // max(count - 1, 1)
    size = at_once(context, vocabulary)
    with judged(model):
        for begin in range(0, len(offsets), size):
            inputs, targets = windows(tokens, offsets[begin : begin + size], context, vocabulary)
            logits = model(inputs.to(device)).float().cpu()
            result += judge(logits.flatten(0, 1), targets.flatten())
    return result


def evaluated_windows(tokens: int, context: int, most: int) -> int:
    """How many windows of so many validation tokens are judged: at most so many, which do not overlap."""
    return min(most, (tokens - 1) // context)
