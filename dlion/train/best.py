"""Which of a run's evaluations is the best: one rule for the best model, and for the checkpoint that stays."""

import math
from typing import Any


def merit(evaluation: dict[str, Any]) -> tuple[float, float]:
    """The greater the better: accuracy, where there is one; of equal ones the lower loss; of equals the first counts.

    What is no number, None or NaN, is worse than every number.
    """
    accuracy, loss = evaluation.get("val_accuracy"), evaluation.get("val_loss")
    return _or_worst(accuracy), -_or_worst(loss, math.inf)


def best_of(evaluations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first of the best ones; None where nothing was evaluated."""
    return max(evaluations, key=merit, default=None)


def _or_worst(value: float | None, worst: float = -math.inf) -> float:
    return worst if value is None or math.isnan(value) else value
