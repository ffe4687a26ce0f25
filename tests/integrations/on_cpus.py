"""What torchtitan takes from a GPU and from a newer torch, by other means; imported before its other modules."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torchtitan.tools.utils as machine
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import scaled_dot_product_attention


def nothing(*_: Any) -> None:
    pass


machine.device_type = "cpu"
machine.device_module = SimpleNamespace(
    current_device=lambda: 0,
    device_count=lambda: 1,
    empty_cache=nothing,
    get_device_name=lambda _: "cpu",
    get_device_properties=lambda _: SimpleNamespace(total_memory=2**30),
    memory_stats=lambda _: {},
    reset_peak_memory_stats=nothing,
    set_device=nothing,
    synchronize=nothing,
)
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()  # in Triton, for experts on GPUs
machine.get_peak_flops = lambda _: 1e12  # it would start lspci
torch.distributed.set_timeout = nothing


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, enable_gqa: bool, **_: Any
) -> tuple[Tensor, None]:
    """In the place of FlexAttention, which has no backward on CPUs; for rows of one document, where causal is all."""
    attended = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return attended, None


def in_sums(parallelize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Have FSDP2 reduce by plain sums: Gloo knows no others."""

    def parallelized(model: nn.Module, **given: Any) -> nn.Module:
        sharded = parallelize(model, **given)
        for module in sharded.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return sharded

    return parallelized
