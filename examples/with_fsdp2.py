"""An image classifier sharded by FSDP2 within each replica, trained by votes of one bit per parameter between replicas.

torchrun --nproc-per-node 4 examples/with_fsdp2.py
"""

import argparse
from importlib.resources import files

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import dlion

parser = argparse.ArgumentParser()
parser.add_argument("--replicas", type=int, default=2, help="workers that vote; each is world size / replicas ranks")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--checkpoints", default="fsdp2-checkpoints", help="folder; its newest checkpoint is gone on from")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device, (args.replicas, size // args.replicas), mesh_dim_names=("replicate", "shard"))
arrays = np.load(str(files("dlion.train") / "assets/fashion-mnist-subset.npz"))
tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
for layer in (model[1], model[3], model[5]):
    fully_shard(layer, mesh=mesh["shard"])  # one dimension of the mesh: FSDP2 averages within a replica alone
fully_shard(model, mesh=mesh["shard"])
voters = mesh["replicate"].get_group()
dlion.local_gradients(model, voters)
optimizer = dlion.DistributedLion(model.named_parameters(), lr=3e-4, weight_decay=0.1, process_group=voters)

path = dlion.checkpoint.latest(args.checkpoints)
first = dlion.checkpoint.load(path, model, optimizer)["step"] if path is not None else 0
for step in range(first, args.steps):
    draws = torch.randint(
        len(tensors["train_labels"]), (32,), generator=torch.Generator().manual_seed(step * size + rank)
    )
    images, labels = (tensors[f"train_{what}"][draws].to(device) for what in ("images", "labels"))
    optimizer.zero_grad()
    cross_entropy(model(images / 255), labels.long()).backward()
    optimizer.step()
if first < args.steps:
    dlion.checkpoint.save(f"{args.checkpoints}/{args.steps}", model, optimizer, extra={"step": args.steps})

with torch.no_grad():  # all ranks: a forward pass gathers the shards
    right = (model(tensors["valid_images"].to(device) / 255).argmax(1).cpu() == tensors["valid_labels"]).float().mean()
bits = optimizer.stats.bits_per_param_sent
print(f"rank {rank}, step {args.steps}: {right:.1%} right, {bits:.2f} bits sent per parameter of its shards and step")
dist.destroy_process_group()
