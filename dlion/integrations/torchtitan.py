"""torchtitan: gradients stay local between replicas of an HSDP mesh, and checkpoints keep every replica's momentum."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from dlion.integrations import ddp
from dlion.layout import local
from dlion.lion import DistributedLion
from dlion.sharding import in_shards

try:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise ImportError('dlion.integrations.torchtitan needs torchtitan: pip install "dlion[torchtitan]"') from error

NAME = "DistributedLion"
REPLICAS, SHARDS = "dp_replicate", "fsdp"  # torchtitan's names of the dimensions

# not an attribute of the model, which would be a part of what torchtitan walks through
_meshes: "WeakKeyDictionary[nn.Module, DeviceMesh]" = WeakKeyDictionary()


def local_gradients(config: Trainer.Config) -> Trainer.Config:
    """Make every replica keep its gradients to itself: the model is sharded over the inner dimension alone.

    Call it on all ranks, once `config.model_spec` is set and before `config.build()`; `config.optimizer` must be one of
    `voting`. `build` raises a ValueError where that is not so, or where the mesh has other dimensions than replicas and
    shards, or one replica: what it says of `parallelism` may come from the command line after this call.

    Args:
        config: modified in place.

    Returns:
        The same config.

    Raises:
        ValueError: it has no model yet.
    """
    spec = config.model_spec
    if spec is None:
        raise ValueError("config.model_spec is None, and gradients are those of a model: set it before this call")
    config.model_spec = replace(
        spec,
        parallelize_fn=partial(_within_replicas, spec.parallelize_fn),
        post_optimizer_build_fn=partial(_checked, spec.post_optimizer_build_fn),
    )
    return config


def voting(lr: float = 1e-4, weight_decay: float = 0.0, **options: Any) -> "VotingOptimizers.Config":
    """The `optimizer` of a config: `DistributedLion` for all parameters, in the place of torchtitan's `default_adamw`.

    With several groups: `VotingOptimizers.Config(param_groups=[...])`, "DistributedLion" being their `optimizer_name`.

    Args:
        lr: a third to a tenth of AdamW's.
        weight_decay: 3 to 10 times AdamW's.
        options: further arguments of `DistributedLion`, for all groups.
    """
    everything = ParamGroupConfig(
        pattern=".*", optimizer_name=NAME, optimizer_kwargs={"lr": lr, "weight_decay": weight_decay}
    )
    return VotingOptimizers.Config(param_groups=[everything], optimizer_factory_kwargs_by_name={NAME: options})


class VotingOptimizers(OptimizersContainer):
    """torchtitan's container, whose optimizer votes between replicas, on each rank's shards.

    Its state is that of all replicas: `state.NAME.exp_avg` are their momenta, `T[replicas, *shape]`, and torchtitan's
    checkpoints go on from each replica's own.

    Raises:
        ValueError: the model's gradients are averaged between replicas, a group asks for another optimizer, or
            `overlap=True` for votes before gradients are clipped.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's; `implementation` is that of its own optimizers, and says nothing here."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        meshes = [_meshes[model] for model in model_parts if model in _meshes]
        if len(meshes) != 1:
            raise ValueError(
                "this model averages its gradients between replicas, and votes need local ones: call "
                "dlion.integrations.torchtitan.local_gradients(config) before config.build()"
            )
        if config.optimizer_factory_kwargs_by_name.get(NAME, {}).get("overlap"):
            raise ValueError(
                "overlap=True votes during backward, and torchtitan clips gradients after it: leave overlap out"
            )
        self.mesh = meshes[0]
        self.voters = self.mesh.get_group(REPLICAS)
        ddp.local_gradients(model_parts[0], self.voters)
        super().__init__(config, model_parts=model_parts)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()
        return {key: self._row(value) if isinstance(value, DTensor) else value for key, value in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        here = super().state_dict()
        rows = [key for key, value in here.items() if isinstance(value, DTensor) and key in state_dict]
        super().load_state_dict(
            {**state_dict, **{key: in_shards(local(state_dict[key])[0], here[key]) for key in rows}}
        )

    def _row(self, tensor: DTensor) -> DTensor:
        """This replica's row of `T[replicas, *shape]`: the same memory."""
        inner = [Shard(each.dim + 1) if isinstance(each, Shard) else Replicate() for each in tensor.placements]
        shape = torch.Size([self.voters.size(), *tensor.shape])
        stride = (tensor.numel(), *tensor.stride())
        row = tensor.to_local().unsqueeze(0)
        return DTensor.from_local(row, self.mesh, [Shard(0), *inner], run_check=False, shape=shape, stride=stride)

    @staticmethod
    def _build_impl_kwargs(config: OptimizersContainer.Config) -> dict[str, Any]:
        return {}  # "fused" and "foreach" are words of torch's own optimizers

    def _resolve_optimizer_factory(self, name: str) -> Callable[..., Optimizer]:
        if name != NAME:
            raise ValueError(
                f"a group asks for {name} and gradients are local, so every replica would train apart: give "
                f'optimizer_name="{NAME}", or leave local_gradients(config) out'
            )
        return partial(DistributedLion, process_group=self.voters)


def _within_replicas(
    parallelize: Callable[..., nn.Module], model: nn.Module, *, parallel_dims: ParallelDims, **given: Any
) -> nn.Module:
    """What `parallelize` makes of a model that it takes for one of a single replica."""
    _check(parallel_dims)
    mesh = parallel_dims.get_mesh([REPLICAS, SHARDS])
    inside = copy.copy(parallel_dims)
    inside.dp_replicate = 1
    sharded = parallelize(model, parallel_dims=inside, **given)
    _meshes[sharded] = mesh
    return sharded


def _check(dims: ParallelDims) -> None:
    if dims.dp_replicate == 1:
        raise ValueError(
            "data_parallel_replicate_degree=1 is one replica, with nobody to vote with: set it to the number of "
            "replicas, or leave local_gradients(config) out"
        )
    others = {"tensor": dims.tp, "context": dims.cp, "pipeline": dims.pp, "expert": dims.ep}
    for name, degree in others.items():
        if degree > 1:
            raise ValueError(
                f"{name}_parallel_degree={degree}: votes go with replicas and shards alone, "
                "data_parallel_replicate_degree and data_parallel_shard_degree: set it to 1"
            )
    if dims.spmd_backend != "partial_dtensor":
        raise ValueError(
            f"spmd_backend={dims.spmd_backend!r} lays every parameter over replicas and shards together, and votes "
            'need shards alone: set parallelism.spmd_backend="partial_dtensor"'
        )


def _checked(
    after: Callable[..., None] | None, optimizers: Any, model_parts: list[nn.Module], parallel_dims: ParallelDims
) -> None:
    if not isinstance(optimizers, VotingOptimizers):
        raise ValueError(
            f"config.optimizer makes {type(optimizers).__name__} and gradients are local, so every replica would train "
            "apart: set config.optimizer = dlion.integrations.torchtitan.voting(lr=...)"
        )
    if after is not None:
        after(optimizers, model_parts, parallel_dims)
