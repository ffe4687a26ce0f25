"""DistributedDataParallel and plain modules: gradients stay local, replicas start equal, buffers stay together."""

import hashlib
import json
import sys
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from dlion import apart
from dlion.channel import Channel, default_group
from dlion.errors import AgreementError
from dlion.layout import dtype_of_sums, has_mean, local, overwrite
from dlion.quoting import shown
from dlion.sharding import FSDP1, check_shards, is_sharded, offset_of
from dlion.tallies import in_rank_order

# not an attribute of the module: a copy of it would keep that, and lose the hook
_kept_local: "WeakSet[DistributedDataParallel]" = WeakSet()


def local_gradients(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Make every worker start from the same parameters and keep its gradients to itself.

    A DistributedDataParallel module, compiled or not, gets torch's no-op communication hook: it has broadcast its
    parameters already, and goes on handling buffers and unused parameters. Of any other module, rank 0's parameters and
    buffers are broadcast once, and DDP modules in it get the hook. With one worker nothing happens. Call it before the
    first step, on all workers; calling it again is harmless. From then on a warning says where another optimizer than
    dlion's steps with these parameters.

    Of a module sharded by FSDP2, the local shards are broadcast across replicas, once; its gradients are averaged over
    the shards' ranks, which together are one worker, and stay local between replicas:

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        dlion.local_gradients(model, mesh["replicate"].get_group())

    Args:
        model: modified in place.
        process_group: of the workers that vote; None is the default group.

    Returns:
        The same model.

    Raises:
        ValueError: the DDP module has another communication hook; or a module is sharded over ranks of the group, or
            some of its parameters are not; or by FSDP1.
        AgreementError: the workers' models differ in names, shapes or dtypes.
        GroupNotReadyError: WORLD_SIZE is above 1 and there is no process group.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"local_gradients was given {shown(model)}: give the module whose parameters are trained")
    _refuse_flat(model)
    inner = getattr(model, "_orig_mod", model)  # what torch.compile was given: a compiled module is no DDP module
    if isinstance(inner, DistributedDataParallel):
        _keep_local(inner)
        return model
    for module in model.modules():  # parts may be wrapped by themselves
        if isinstance(module, DistributedDataParallel):
            _keep_local(module)
    channel = _channel(process_group, "dlion.local_gradients(model)")
    check_shards(_trained(model), channel.group if channel is not None else None)
    whole = [(name, tensor.detach()) for name, tensor in _both(model) if not hasattr(tensor, "device_mesh")]
    for inside in _channels_between_shards(model):  # what is not sharded: frozen parameters, and buffers
        _check_same(inside, _facts(whole))
        inside.broadcast_([tensor for _, tensor in whole])
    if channel is not None:
        tensors = _tensors(model)
        _check_same(channel, _facts(_both(model)))
        channel.broadcast_([tensor for _, tensor in tensors])
        apart.watch((param for _, param in _trained(model)), channel.ranks)
    return model


def synchronize_buffers(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Give all workers the same buffers: real and complex ones become the mean, added in rank order, others rank 0's.

    Numbers that are equal on all workers stay as they are, to the bit: tables, masks of the lowest number there is.

    Call it on all workers before evaluation and before saving; normalisation statistics are local until then.

    Args:
        model: modified in place.
        process_group: of the workers; None is the default group.

    Returns:
        The same model.

    Raises:
        AgreementError: the workers' buffers differ in names, shapes or dtypes.
        GroupNotReadyError: WORLD_SIZE is above 1 and there is no process group.
    """
    channel = _channel(process_group, "dlion.synchronize_buffers(model)")
    buffers = [(name, local(buffer)) for name, buffer in model.named_buffers()]
    if channel is None:
        return model
    _check_same(channel, _facts(buffers))
    for _, buffer in buffers:
        if has_mean(buffer):
            wide = dtype_of_sums(buffer.dtype)
            own = buffer.to(channel.device, wide, copy=True, memory_format=torch.contiguous_format).resolve_conj()
            parts = own.view(-1).view(torch.empty((), dtype=wide).real.dtype)  # a complex number's travel apart
            overwrite(buffer, _mean(channel.all_gather(parts).wait()).view(wide).view(buffer.shape))
    channel.broadcast_([buffer for _, buffer in buffers if not has_mean(buffer)])
    return model


def _mean(rows: Tensor) -> Tensor:
    """f[workers, n] -> f[n]."""
    mean = in_rank_order(rows, Tensor.add_) / len(rows)
    return torch.where((rows == rows[0]).all(0), rows[0], mean)


def _refuse_flat(model: nn.Module) -> None:
    """FSDP1 averages among all its ranks, and calls shards by one name that are not of the same parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it does not use it
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(FSDP1)


def _keep_local(model: DistributedDataParallel) -> None:
    if model in _kept_local:
        return
    try:
        model.register_comm_hook(None, noop_hook)
    except RuntimeError as error:
        raise ValueError(
            "this DDP module has a communication hook already, and votes need local gradients: build it without "
            "one, or leave this call out if the hook is torch's noop_hook"
        ) from error
    _kept_local.add(model)
    if model.process_group.size() > 1:
        apart.watch((param for _, param in _trained(model)), Channel(model.process_group).ranks)


def _channel(group: dist.ProcessGroup | None, who: str) -> Channel | None:
    group = group if group is not None else default_group(who)
    return Channel(group, f"{who}, which all workers must call") if group is not None and group.size() > 1 else None


def _trained(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def _channels_between_shards(model: nn.Module) -> list[Channel]:
    """To the ranks that together hold the shards of one replica, by each dimension of their mesh."""
    meshes = [param.device_mesh for param in model.parameters() if hasattr(param, "device_mesh")]
    groups = [meshes[0].get_group(dimension) for dimension in range(meshes[0].ndim)] if meshes else []
    return [Channel(group) for group in groups if group.size() > 1]


def _both(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, local(tensor).detach()) for name, tensor in _both(model)]


def _facts(tensors: list[tuple[str, Tensor]]) -> list[list[Any]]:
    """Name, shape and dtype of what is here, and of a shard where it begins."""
    return [
        [name, list(local(tensor).shape), str(tensor.dtype), *([list(offset_of(tensor))] if is_sharded(tensor) else [])]
        for name, tensor in tensors
    ]


def _check_same(channel: Channel, facts: list[list[Any]]) -> None:
    """Sizes must agree before anything travels: gloo ends the process where they do not."""
    digest = int.from_bytes(hashlib.sha256(json.dumps(facts).encode()).digest()[:8], "little") >> 1
    row = torch.tensor([digest], dtype=torch.int64, device=channel.device)
    digests = channel.all_gather(row).wait().view(-1).tolist()
    if len(set(digests)) == 1:
        return
    everyone = channel.gather_json(facts)
    for rank, theirs in zip(channel.ranks, everyone, strict=True):
        for index in range(max(len(theirs), len(everyone[0]))):
            here, there = theirs[index : index + 1], everyone[0][index : index + 1]
            if here != there:
                raise AgreementError(
                    f"the workers' models differ: rank {rank} has {here or 'nothing'} where rank {channel.ranks[0]} "
                    f"has {there or 'nothing'}: build the same model on every worker"
                )
