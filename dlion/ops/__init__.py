"""Kernels behind `torch.library` schemas.

`reference.py` is the specification, in pure torch, for every device. Over the same schemas stand the compiled kernels
of `native.py` for CPU tensors, where this installation has them, and those of `triton.py` for tensors on a GPU, which
are imported when the first such tensor comes. `choose` names what a caller gets.
"""

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from dlion.ops import library, native, reference

KERNELS = ("auto", "reference", "native", "triton")
# what `triton.py` has; here, since importing it imports Triton
ON_GPU = ("ballot", "apply", "tally_majority", "tally_majority_ternary", "tally_count", "tally_count_ternary", "hashed")

SCHEMAS = (
    "lion_message(Tensor grad, Tensor(a!) momentum, float beta1, float beta2, int first_word, int t, int rank) "
    "-> (Tensor, Tensor)",
    "pack_signs(Tensor message, int first_word, int t, int rank) -> Tensor",
    "pack_ternary(Tensor message) -> Tensor",
    "tally_majority(Tensor ballots, int first_word, int t, str ties) -> Tensor",
    "tally_majority_ternary(Tensor ballots, int first_word, int t, str ties) -> Tensor",
    "tally_count(Tensor ballots, int planes) -> Tensor",
    "tally_count_ternary(Tensor ballots, int planes) -> Tensor",
    "ballot(Tensor?[] grads, Tensor(a!)[] momenta, int[] offsets, int[] groups, int size, float[] beta1s, "
    "float[] beta2s, bool[] negate, int first_word, int t, int rank, str zeros) -> (Tensor words, Tensor finite)",
    "apply(Tensor(a!)[] params, Tensor planes, int[] offsets, int[] groups, float[] tables, float[] decays, "
    "str rounding, int first_word, int t, int seed) -> ()",
    "hashed(Tensor tensor, int number) -> Tensor",
)

_log = logging.getLogger("dlion")


@cache
def _gpu_kernels() -> ModuleType:
    """The Triton kernels, or the reference where there is no Triton that they can use."""
    try:
        return import_module("dlion.ops.triton")
    except ImportError:
        return reference


def _on_gpu(name: str) -> Callable[..., Any]:
    def operator(*arguments: Any) -> Any:
        return getattr(_gpu_kernels(), name)(*arguments)

    return operator


_library: Any = torch.library.Library("dlion", "DEF")  # type: ignore[no-untyped-call]
for _schema in SCHEMAS:
    _name = _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")
if library.load(__path__):
    for _name in native.OPERATORS:
        _library.impl(_name, getattr(native, _name), "CPU")
for _name in ON_GPU:
    _library.impl(_name, _on_gpu(_name), "CUDA")  # which is torch's name for ROCm too


def operators(kernels: str) -> ModuleType:
    """Where rules find operators for `kernels="auto" | "reference" | "native" | "triton"`, before any tensor is known.

    Torch's own dispatch, by the device of each call's tensors; or the reference.

    Raises:
        ValueError: for an unknown name, or kernels that this installation does not have.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} is unknown: choose one of {', '.join(KERNELS)}")
    if kernels == "native" and not library.available():
        raise ValueError(
            "kernels='native' is not part of this installation: reinstall dlion where a C++17 compiler is, or choose "
            "auto or reference"
        )
    if kernels == "triton" and find_spec("triton") is None:
        raise ValueError(
            "kernels='triton' needs the package triton, which comes with torch for GPUs: install such a torch, or "
            "choose auto or reference"
        )
    return reference if kernels == "reference" else torch.ops.dlion


def choose(kernels: str, device: torch.device | str = "cpu") -> tuple[str, ModuleType]:
    """Name and namespace of the kernels that parameters on `device` get.

    "native" is compiled for CPU tensors, "triton" for tensors on a GPU; "auto" takes these where they are there, else
    the reference. Their namespace is torch's own dispatch, and what they do not know goes to the reference. The choice
    is logged once.

    Raises:
        ValueError: as `operators`; or kernels for another kind of device were asked for by name.
    """
    operators(kernels)
    kind = torch.device(device).type
    made = {"cpu": "native", "cuda": "triton"}.get(kind, "reference")
    if kernels not in ("auto", "reference", made):
        raise ValueError(
            f"kernels={kernels!r} is not for parameters on {kind}: move the model before its first step, or choose "
            "auto or reference"
        )
    there = library.available() if made == "native" else made == "reference" or _gpu_kernels() is not reference
    if kernels == "triton" and not there:
        raise ValueError(
            "kernels='triton' found a triton that cannot be imported: install the one that this torch names, or choose "
            "auto or reference"
        )
    name = made if there and kernels != "reference" else "reference"
    _announce(name, kind, not there and kernels == "auto")
    return name, operators(name)


@cache
def _announce(name: str, kind: str, missing: bool) -> None:
    if missing:
        why = {"cpu": "this installation was made without a C++17 compiler", "cuda": "there is no Triton to import"}
        _log.warning("kernels: reference, several times slower; %s", why[kind])
    else:
        _log.info("kernels: %s", f"native ({library.path()})" if name == "native" else name)
