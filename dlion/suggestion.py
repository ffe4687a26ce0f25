"""Learning rate and weight decay of Lion methods from those of an AdamW run that works."""

from dataclasses import dataclass

from dlion.options import one_of
from dlion.settings import number

PAPER_DECAY = 10.0  # weight decay of all Lion methods over that of AdamW, in every pre-training of the paper
LARGEST = 1e6  # of what anybody trains with
FINE_TUNING_DECAY = 0.01  # where the paper's AdamW has none


@dataclass(frozen=True)
class Suggestion:
    """Where to start, and what else to try.

    Attributes:
        lr: learning rate to begin with, at the peak of the schedule; beginning and end scale alike.
        weight_decay: to begin with.
        betas: of the Lion methods in every experiment of the paper.
        lrs: learning rates worth a search, smallest first.
    """

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    lrs: tuple[float, ...]


def suggest(adamw_lr: float, adamw_wd: float = 0.0, task: str = "language") -> Suggestion:
    """What to give `DistributedLion`, from the learning rate and weight decay of AdamW on the same task.

    The ratios are those of the Distributed Lion paper (arXiv 2404.00438, section 5): learning rate AdamW's / 10 on
    ImageNet and AdamW's / 3.33 on OpenWebText and for fine-tuning; weight decay AdamW's * 10, and 0.01 where AdamW has
    none. Lion's authors (arXiv 2302.06675) give the range: 3 to 10 times smaller, and 3 to 10 times larger. The
    number of workers is no part of it: a vote moves a parameter by lr, however many vote.

    Args:
        adamw_lr: above 0.
        adamw_wd: decoupled, 0 or above.
        task: "language" (fine-tuning too) or "vision".

    Raises:
        ValueError: a number out of range, or another task.
    """
    one_of("task", task, ("language", "vision"))
    if not (number(adamw_lr, 0, LARGEST) and adamw_lr > 0):
        raise ValueError(f"adamw_lr={adamw_lr!r}: give the learning rate of AdamW, a number above 0")
    if not number(adamw_wd, 0, LARGEST):
        raise ValueError(f"adamw_wd={adamw_wd!r}: give the weight decay of AdamW, a number, 0 or above")
    smaller = {"language": 10 / 3, "vision": 10.0}[task]
    decay = _rounded(adamw_wd * PAPER_DECAY) if adamw_wd else FINE_TUNING_DECAY
    lrs = tuple(_rounded(adamw_lr / ratio) for ratio in (10.0, 5.5, 10 / 3))  # 5.5: in the middle, geometrically
    return Suggestion(_rounded(adamw_lr / smaller), decay, (0.9, 0.99), lrs)


def _rounded(value: float) -> float:
    """To three digits: more would pretend that the ratio is known."""
    return float(f"{value:.3g}")
