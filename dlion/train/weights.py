"""Models as files of safetensors: whole or not at all."""

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from dlion.checkpoint.manifest import sync
from dlion.errors import of_the_system
from dlion.train.legal import shown
from dlion.train.runs import draft_of


def save_weights(model: nn.Module, path: Path) -> None:
    """Write a model as safetensors, whole or not at all; tensors that share memory are stored once."""
    with draft_of(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the user's umask allows; safetensors makes its files private
        try:
            save_model(model, str(temporary))
        except SafetensorError as error:
            system = of_the_system(error)
            if system is None:
                raise
            system.filename = str(path)
            raise system from error
        temporary.chmod(mode)
        sync(temporary)


def load_weights(model: nn.Module, path: Path) -> None:
    """Read what `save_weights` wrote.

    Raises:
        ValueError: the file is missing, damaged, or of another model; the model may have changed.
    """
    try:
        load_model(model, str(path), device=str(next(model.parameters()).device))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = shown(" ".join(str(error).split()))
        raise ValueError(f"{path} is missing, damaged or holds another model ({reason}).") from None


def weights_of(start: Path) -> Path:
    """The file of parameters that `--init-from` names: itself, or the best model in the folder of a run."""
    return start / "model.safetensors" if start.is_dir() else start


def share(source: Path, target: Path) -> None:
    """Give `target` the content of `source` without copying: files of a run are replaced, never changed."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)
