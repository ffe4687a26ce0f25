"""What steps on a device are made of, by Triton kernels: `dlion.resident.by_torch` with the same bits in few launches.

Beside the kernels of steps on the host there are those that read what the device alone knows. Every function has the
arguments of its namesake there.
"""

from typing import Any

import torch
from torch import Tensor

from dlion.codecs import CountPlanes, SignBits, SumPlanes, TernaryBits
from dlion.header import NOBODY, VERSION, Status
from dlion.ops import triton, triton_headers, triton_numbers
from dlion.ops.triton import apply_there as apply_there
from dlion.ops.triton import ballot as ballot
from dlion.ops.triton import knows as knows
from dlion.pipeline import Decoder

MEANINGS = {SignBits: "sign", TernaryBits: "ternary", CountPlanes: "count", SumPlanes: "sum"}


def ballot_header(
    finite: Tensor | None,
    awake: Tensor | None,
    bad: Status,
    why: Status,
    bucket: int,
    t: Tensor,
    layout: int,
    hyper: Tensor,
) -> Tensor:
    header = torch.empty(2, dtype=torch.int64, device=t.device)
    known = (VERSION | (bucket & 0xFFFF) << 16, layout & NOBODY, int(bad), int(why))
    _run(triton_headers.ballot_header, t.device, header, finite, awake, t, hyper, *known)
    return header


def judge(headers: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    header, roster = torch.empty_like(own), own.new_empty(1 + len(headers))
    where = (headers, own, headers.stride(0), len(headers))
    _run(triton_headers.judge, own.device, header, roster, *where, ROWS=triton_headers.ROWS)
    return header, roster


def enter(entries: Tensor, rows: Tensor, workers: int) -> Tensor:
    voters = entries.new_empty(())
    where = (rows, rows.stride(0), len(rows), workers)
    _run(triton_headers.enter, entries.device, entries, voters, *where, ROWS=triton_headers.ROWS)
    return voters


def close(entries: Tensor) -> None:
    _run(triton_headers.close, entries.device, entries)


def tally_majority(ballots: Tensor, roster: Tensor, first_word: int, t: Tensor, ties: str) -> Tensor:
    return triton.majority(ballots[:, None], roster, first_word, t, ties)[0]


def tally_majority_ternary(ballots: Tensor, roster: Tensor, first_word: int, t: Tensor, ties: str) -> Tensor:
    return triton.majority(ballots, roster, first_word, t, ties)


def tally_count(ballots: Tensor, roster: Tensor, planes: int) -> Tensor:
    return triton.count(ballots[:, None], roster, planes)


def tally_count_ternary(ballots: Tensor, roster: Tensor, planes: int) -> Tensor:
    return triton.count(ballots, roster, planes)


def numbers(down: Decoder, planes: int, voters: Tensor, applied: Tensor) -> Tensor:
    """f32: rounded once, for parameters that are not float64."""
    found = applied.new_empty(len(applied), 2**planes + 1, dtype=torch.float32)
    how = {"MEANING": MEANINGS[type(down)], "PLANES": planes, "LEVELS": min(triton_numbers.LEVELS, 2**planes)}
    with triton.on(applied.device):
        triton_numbers.numbers[(len(applied),)](found, voters, applied, **how, **triton_numbers.LAUNCH)
    return found


def _run(kernel: Any, device: torch.device, *told: Any, **how: Any) -> None:
    """One program."""
    with triton.on(device):
        kernel[(1,)](*told, **how, **triton_headers.LAUNCH)
