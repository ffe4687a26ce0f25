"""The best model and the best checkpoint follow one rule, also where evaluations are equal or no numbers."""

import itertools
import math
from typing import Any

import pytest

from dlion.train.best import best_of, merit
from dlion.train.checkpoints import Progress, _outdated, is_best
from dlion.train.runs import finite

IMAGES = [
    {"val_loss": loss, "val_accuracy": accuracy} for loss, accuracy in ((0.9, 0.5), (0.7, 0.5), (0.7, 0.5), (0.1, 0.4))
]
TEXT: list[dict[str, Any]] = [{"val_loss": loss} for loss in (2.0, math.nan, 1.5, 1.5)]


@pytest.mark.parametrize("evaluations", [IMAGES, TEXT])
def test_the_best_model_is_of_the_checkpoint_that_stays(evaluations: list[dict[str, Any]]) -> None:
    """In every order; the metrics of a run have null where a number is not finite."""
    for order in itertools.permutations(evaluations):
        progress, records = Progress(), []
        for step, evaluation in enumerate(order, 1):
            is_best(progress, step, evaluation)
            records.append({"step": step, **{key: finite(value) for key, value in evaluation.items()}})
        steps = list(range(1, len(order) + 2))  # one more, which was not evaluated, stays as the last
        gone = _outdated(steps, records, keep=1)
        assert set(steps) - set(gone) == {progress.best_step, len(order) + 1}


def test_of_equals_the_first_counts_and_no_number_is_worse_than_any() -> None:
    assert best_of([{"step": 1, **IMAGES[1]}, {"step": 2, **IMAGES[2]}]) == {"step": 1, **IMAGES[1]}
    assert best_of([]) is None
    assert merit({"val_loss": math.nan}) == merit({"val_loss": None}) < merit({"val_loss": 1e300})
    progress = Progress()
    assert is_best(progress, 1, {"val_loss": math.nan})  # or there would be no best model
    assert is_best(progress, 2, {"val_loss": 3.0}) and not is_best(progress, 3, {"val_loss": math.nan})
