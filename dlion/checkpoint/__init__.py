"""Checkpoints of all workers: complete or absent, verified before they are unpickled, loaded by any number of workers.

    dlion.checkpoint.save("checkpoints/step-1000", model, optimizer, extra={"step": 1000})
    path = dlion.checkpoint.latest("checkpoints")
    extra = dlion.checkpoint.load(path, model, optimizer)

A checkpoint is a folder in the format of torch.distributed.checkpoint, with a manifest. Momenta (and whatever else a
worker has for itself) are stacked, one row for each worker; parameters are there once.

Checksums find damage, not malice: the index is a pickle, so a checkpoint of unknown origin must not be loaded.
"""

from dlion.checkpoint.checkpoint import load, save
from dlion.checkpoint.finding import is_complete, latest, verify
from dlion.checkpoint.saving import Saving

__all__ = ["Saving", "is_complete", "latest", "load", "save", "verify"]
