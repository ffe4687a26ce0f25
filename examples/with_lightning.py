"""An image classifier trained with Lightning by votes of one bit per parameter.

python examples/with_lightning.py --devices 4, or with torchrun --nproc-per-node 4
"""

import argparse
from importlib.resources import files

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dlion
from dlion.integrations.lightning import VotingStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--every", type=int, default=1, help="train on every so many images")
parser.add_argument("--resume", help="go on from this checkpoint")
args = parser.parse_args()


def data(part: str, every: int) -> TensorDataset:
    arrays = np.load(str(files("dlion.train") / "assets/fashion-mnist-subset.npz"))
    images, labels = (torch.from_numpy(arrays[f"{part}_{what}"][::every]) for what in ("images", "labels"))
    return TensorDataset(images.unsqueeze(1) / 255, labels.long())


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        first = (nn.Conv2d(1, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        second = (nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU())
        self.net = nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 6 * 6, 10))

    def training_step(self, batch, index):
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("right", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return dlion.DistributedLion(self.named_parameters(), lr=1e-3, weight_decay=0.1)


torch.manual_seed(0)
model = Classifier()
train, valid = DataLoader(data("train", args.every), 32, shuffle=True), DataLoader(data("valid", 1), 200)
trainer = Trainer(accelerator="auto", devices=args.devices, strategy=VotingStrategy(), max_epochs=args.epochs)
trainer.fit(model, train, valid, ckpt_path=args.resume)
if trainer.is_global_zero:
    bits = model.optimizers().stats.bits_per_param_sent
    print(f"{trainer.callback_metrics['right']:.1%} right, {bits:.2f} bits sent per parameter and step")
