"""Distributed Lion for PyTorch: data-parallel training in which workers exchange one bit per parameter.

Names are resolved on first use (PEP 562), so that `import dlion` does not import torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "checkpoint": "dlion.checkpoint",
    "elastic": "dlion.elastic",
    "simulate": "dlion.simulate",
    "Distributed": "dlion.optim",
    "DistributedLion": "dlion.lion",
    "Simulation": "dlion.simulate",
    "Stats": "dlion.stats",
    "local_gradients": "dlion.integrations.ddp",
    "migrate": "dlion.migration",
    "suggest": "dlion.suggestion",
    "synchronize_buffers": "dlion.integrations.ddp",
}

__all__ = [
    "Distributed",
    "DistributedLion",
    "Simulation",
    "Stats",
    "__version__",
    "checkpoint",
    "elastic",
    "local_gradients",
    "migrate",
    "simulate",
    "suggest",
    "synchronize_buffers",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dlion' has no attribute {name!r}; it offers {', '.join(__all__)}")
    home = import_module(_HOME[name])
    return home if home.__name__ == f"{__name__}.{name}" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
