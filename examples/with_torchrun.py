"""An image classifier trained in a plain loop by votes of one bit per parameter, on one machine or several.

torchrun --nproc-per-node 4 examples/with_torchrun.py; two machines: docs/two-machines.md
"""

import argparse
import socket
from importlib.resources import files

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import dlion

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--save-every", type=int, default=100)
parser.add_argument("--checkpoints", default="torchrun-checkpoints", help="a folder that all machines see")
args = parser.parse_args()

dist.init_process_group("gloo")  # torchrun says who is there
rank, size = dist.get_rank(), dist.get_world_size()
print(f"worker {rank} of {size} on {socket.gethostname()}", flush=True)

arrays = np.load(str(files("dlion.train") / "assets/fashion-mnist-subset.npz"))
images, labels = (torch.from_numpy(arrays[f"train_{what}"][rank::size]) for what in ("images", "labels"))
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
model = dlion.local_gradients(model)  # every worker starts as worker 0
optimizer = dlion.DistributedLion(model.named_parameters(), lr=3e-4, weight_decay=0.1)

step = 0
if newest := dlion.checkpoint.latest(args.checkpoints):
    step = dlion.checkpoint.load(newest, model, optimizer)  # with this worker's own momentum
    print(f"worker {rank} goes on from step {step}", flush=True)
while step < args.steps:
    chosen = torch.randint(len(images), (32,), generator=torch.Generator().manual_seed(1_000_000 * rank + step))
    optimizer.zero_grad()
    loss = cross_entropy(model(images[chosen] / 255), labels[chosen].long())
    loss.backward()
    optimizer.step()
    step += 1
    if step % args.save_every == 0:
        dlion.checkpoint.save(f"{args.checkpoints}/{step}", model, optimizer, extra=step)
        if rank == 0:
            sent = f"{optimizer.stats.bits_per_param_sent:.2f} bits sent per parameter and step"
            print(f"step {step}: loss {loss.item():.2f}, {sent}", flush=True)
dist.destroy_process_group()
