"""An image classifier trained with Accelerate by votes of one bit per parameter.

torchrun --nproc-per-node 4 examples/with_accelerate.py
"""

import argparse
from importlib.resources import files

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dlion
from dlion.integrations.accelerate import local_gradients

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--every", type=int, default=1, help="train on every so many images")
parser.add_argument("--state", default="accelerate-state", help="folder for the state of all workers")
parser.add_argument("--resume", action="store_true", help="go on from that folder")
args = parser.parse_args()


def data(part: str, every: int) -> TensorDataset:
    arrays = np.load(str(files("dlion.train") / "assets/fashion-mnist-subset.npz"))
    images, labels = (torch.from_numpy(arrays[f"{part}_{what}"][::every]) for what in ("images", "labels"))
    return TensorDataset(images.unsqueeze(1) / 255, labels.long())


accelerator = local_gradients(Accelerator(cpu=not torch.cuda.is_available()))  # before prepare
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(32 * 6 * 6, 10)),
)
votes = dlion.DistributedLion(model.named_parameters(), lr=1e-3, weight_decay=0.1)
train, valid = DataLoader(data("train", args.every), 32, shuffle=True), DataLoader(data("valid", 1), 200)
model, optimizer, train, valid = accelerator.prepare(model, votes, train, valid)
if args.resume:
    accelerator.load_state(args.state)

for epoch in range(args.epochs):
    model.train()
    for images, labels in train:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(images), labels))
        optimizer.step()

    dlion.synchronize_buffers(model).eval()  # every worker evaluates the same model
    with torch.no_grad():
        right = sum((model(images).argmax(1) == labels).sum() for images, labels in valid)
    accuracy = accelerator.reduce(right) / len(valid.dataset)
    bits = votes.stats.bits_per_param_sent
    accelerator.print(f"epoch {epoch}: {accuracy:.1%} right, {bits:.2f} bits sent per parameter and step")
    accelerator.save_state(args.state)  # with every worker's momentum
