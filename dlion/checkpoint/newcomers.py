"""What workers start from when their number is not that of the checkpoint."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlion.layout import dtype_of_sums, has_mean


def mean_of_workers(rows: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean over the saved workers, which every worker of another number starts from; of whole numbers worker 0's.

    For momenta it is what Lion would have from the mean gradient. Of what a worker has not sent yet (residuals of error
    feedback and of sparse methods) the mean over workers enters a step: M times the mean of N has that of the N. For
    buffers it is what `synchronize_buffers` gives.

    Args:
        rows: of each saved worker, in rank order; one at a time is kept.

    Returns:
        By name, in the dtype of the rows: added in rank order in at least float32, rounded to nearest once; what is
        equal in all rows stays as it is.
    """
    first = next(rows)
    sums = {name: _wide(row) for name, row in first.items() if has_mean(row)}
    equal = {name: _wide(first[name]) == sums[name] for name in sums}  # not where it is NaN
    count = 1
    for each in rows:
        count += 1
        for name, total in sums.items():
            row = each[name].to(total.dtype)
            equal[name] &= row == _wide(first[name])
            total += row
    means = {name: (total / count).to(first[name].dtype) for name, total in sums.items()}
    return first | {name: _where(equal[name], first[name], mean) for name, mean in means.items()}


def _where(equal: Tensor, one: Tensor, mean: Tensor) -> Tensor:
    """As torch.where, which knows no 8-bit floats."""
    return torch.where(equal, _wide(one), _wide(mean)).to(mean.dtype)


def _wide(row: Tensor) -> Tensor:
    return row.to(dtype_of_sums(row.dtype), copy=True)
