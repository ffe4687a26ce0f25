"""DistributedLion: `Distributed` by the names that Lion's users know."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlion.optim import Distributed
from dlion.options import one_of


class DistributedLion(Distributed):
    """Distributed Lion (arXiv 2404.00438): workers send the sign of their Lion update and apply what the vote decides.

    Args:
        vote: "majority": one bit per parameter each way. "average": the mean of the votes, the count travels back.

    The other arguments, and the errors, are those of `dlion.Distributed`. `weight_decay` is decoupled; `lr` is 3 to 10
    times smaller than AdamW's, `weight_decay` as much larger.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        vote: str = "majority",
        process_group: dist.ProcessGroup | None = None,
        topology: str = "auto",
        ties: str | None = None,
        zeros: str = "balanced",
        nonfinite: str = "abstain",
        rounding: str | None = None,
        momentum_dtype: torch.dtype | None = None,
        maximize: bool = False,
        kernels: str = "auto",
        bucket_bytes: int | None = None,
        overlap: bool = False,
        timeout: float | timedelta | None = None,
        verify_every: int | None = 100,
        on_mismatch: str = "raise",
    ) -> None:
        method = {"majority": "dlion-mavo", "average": "dlion-avg"}[one_of("vote", vote, ("majority", "average"))]
        super().__init__(
            params,
            method,
            lr,
            betas,
            weight_decay,
            process_group=process_group,
            topology=topology,
            ties=ties,
            zeros=zeros,
            nonfinite=nonfinite,
            rounding=rounding,
            momentum_dtype=momentum_dtype,
            maximize=maximize,
            kernels=kernels,
            bucket_bytes=bucket_bytes,
            overlap=overlap,
            timeout=timeout,
            verify_every=verify_every,
            on_mismatch=on_mismatch,
        )
