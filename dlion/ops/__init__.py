"""Kernels behind `torch.library` schemas.

`reference.py` is the specification, in pure torch, for every device. Faster kernels register themselves over the same
schemas for their own device; `choose` names what a caller gets.
"""

from types import ModuleType
from typing import Any

import torch

from dlion.ops import reference

KERNELS = ("auto", "reference")

SCHEMAS = (
    "lion_message(Tensor grad, Tensor(a!) momentum, float beta1, float beta2) -> (Tensor, Tensor)",
    "pack_signs(Tensor message, int first_word, int t, int rank) -> Tensor",
    "pack_ternary(Tensor message) -> Tensor",
    "tally_majority(Tensor ballots, int first_word, int t, str ties) -> Tensor",
    "tally_majority_ternary(Tensor ballots, int first_word, int t, str ties) -> Tensor",
    "tally_count(Tensor ballots, int planes) -> Tensor",
    "tally_count_ternary(Tensor ballots, int planes) -> Tensor",
    "apply_levels(Tensor(a!) param, Tensor planes, float[] table, float decay) -> ()",
)

_library: Any = torch.library.Library("dlion", "DEF")  # type: ignore[no-untyped-call]
for _schema in SCHEMAS:
    _name = _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")


def choose(kernels: str) -> tuple[str, ModuleType]:
    """Name and namespace of the kernels for `kernels="auto" | "reference"`.

    Raises:
        ValueError: for a name that this installation does not have.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} is not available here: choose one of {', '.join(KERNELS)}")
    return "reference", reference
