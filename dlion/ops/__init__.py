"""Kernels behind `torch.library` schemas.

`reference.py` is the specification, in pure torch, for every device. `native.py` registers the compiled kernels over
the same schemas for CPU tensors, where this installation has them; `choose` names what a caller gets.
"""

import logging
from functools import cache
from types import ModuleType
from typing import Any

import torch

from dlion.ops import library, native, reference

KERNELS = ("auto", "reference", "native")

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

_library: Any = torch.library.Library("dlion", "DEF")  # type: ignore[no-untyped-call]
for _schema in SCHEMAS:
    _name = _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")
if library.load(__path__):
    for _name in native.OPERATORS:
        _library.impl(_name, getattr(native, _name), "CPU")


def choose(kernels: str) -> tuple[str, ModuleType]:
    """Name and namespace of the kernels for `kernels="auto" | "reference" | "native"`.

    "native" is torch's own dispatch: compiled kernels for CPU tensors, the reference for all others. "auto" takes it
    where this installation has it. The choice is logged once.

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
    if kernels == "reference" or not library.available():
        _announce("reference", missing=kernels == "auto")
        return "reference", reference
    _announce("native", missing=False)
    return "native", torch.ops.dlion


@cache
def _announce(name: str, missing: bool) -> None:
    if missing:
        _log.warning("kernels: reference, several times slower; this installation was made without a C++17 compiler")
    else:
        _log.info("kernels: %s", f"native ({library.path()})" if name == "native" else name)
