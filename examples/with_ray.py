"""An image classifier trained with Ray Train by votes of one bit per parameter: python examples/with_ray.py."""

import argparse
from importlib.resources import files
from pathlib import Path
from uuid import uuid4

import numpy as np
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.nn.functional import cross_entropy

import dlion


def train(config):
    rank, size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    arrays = np.load(str(files("dlion.train") / "assets/fashion-mnist-subset.npz"))
    images, labels = (torch.from_numpy(arrays[f"train_{what}"][rank::size]) for what in ("images", "labels"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    model = dlion.local_gradients(prepare_model(model))  # in DistributedDataParallel, which does not average now
    optimizer = dlion.DistributedLion(model.named_parameters(), lr=3e-4, weight_decay=0.1)
    step = 0
    if newest := ray.train.get_checkpoint():
        with newest.as_directory() as folder:
            step = dlion.checkpoint.load(folder, model, optimizer)  # with this worker's own momentum
    while step < config["steps"]:
        chosen = torch.randint(len(images), (32,), generator=torch.Generator().manual_seed(1_000_000 * rank + step))
        optimizer.zero_grad()
        loss = cross_entropy(model(images[chosen] / 255), labels[chosen].long())
        loss.backward()
        optimizer.step()
        step += 1
        if step % config["save_every"] == 0:
            draft = broadcast_from_rank_zero(f"{config['drafts']}/{uuid4()}")  # a folder that all workers see
            dlion.checkpoint.save(draft, model, optimizer, extra=step)
            whole = Checkpoint.from_directory(draft) if rank == 0 else None  # Ray copies it into its storage
            metrics = {"step": step, "loss": loss.item(), "bits": optimizer.stats.bits_per_param_sent}
            ray.train.report(metrics, whole, delete_local_checkpoint_after_upload=True)


parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--save-every", type=int, default=100)
parser.add_argument("--storage", type=Path, default="ray-storage", help="a folder that all workers see")
args = parser.parse_args()
storage, scaling = args.storage.resolve(), ScalingConfig(num_workers=args.workers)
run = RunConfig(name="dlion", storage_path=str(storage), failure_config=FailureConfig(max_failures=1))
config = {"steps": args.steps, "save_every": args.save_every, "drafts": str(storage / "drafts")}
result = TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
print("step {step}: loss {loss:.2f}, {bits:.2f} bits sent per parameter and step".format(**result.metrics))
