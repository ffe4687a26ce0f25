"""Bits per parameter of every method at N=4, from the counters: makes the table of docs/methods.md.

    python bench/method_bits.py --docs docs/methods.md

Four processes with Gloo exchange normally distributed gradients of one transformer block. Counters know nothing of what
a gradient is worth, so no training is needed.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from documents import fill
from torch import nn

from dlion import Distributed
from dlion.methods import METHODS

WORKERS, STEPS = 4, 2
WIDTH = 128
BLOCK = [
    *[(WIDTH,)] * 2,
    (3 * WIDTH, WIDTH),
    (3 * WIDTH,),
    (WIDTH, WIDTH),
    (WIDTH,),
    *[(WIDTH,)] * 2,
    (4 * WIDTH, WIDTH),
    (4 * WIDTH,),
    (WIDTH, 4 * WIDTH),
    (WIDTH,),
]
PARAMETERS = sum(torch.Size(shape).numel() for shape in BLOCK)
KEEP = {"graddrop": {"keep": 0.04}, "dgc": {"keep": 0.04}}  # the compression rate of the paper's comparison


@dataclass(frozen=True)
class Bits:
    """Mean bits per parameter and step: what a worker sends and receives by default, and up and down at a server."""

    sent: float
    received: float
    up: float | None
    down: float | None


@dataclass(frozen=True)
class Said:
    """What a ballot holds, the paper's bits up and down, and what these leave out."""

    message: str
    paper: str
    left_out: str


VOTE = "headers; a last word of each tensor that is not full"
ENTRIES = "indices of 32 bits, as long as a value; relayed, the download is the entries of all workers, not a dense sum"
SAID = {
    "dlion-mavo": Said("sign of Lion's update", "1 / 1", VOTE),
    "dlion-avg": Said("sign of Lion's update", "1 / log2(N) = 2", f"N+1 counts need ceil(log2(N+1)) = 3 bits; {VOTE}"),
    "g-lion": Said("gradient, float32", "32 / 32", "headers"),
    "g-adamw": Said("gradient, float32", "32 / 32", "headers"),
    "d-signum-mavo": Said("sign of the momentum", "1 / 1", VOTE),
    "d-signum-avg": Said("sign of the momentum", "1 / log2(N) = 2", f"as dlion-avg; {VOTE}"),
    "signsgd-mavo": Said("sign of the gradient", "1 / 1", VOTE),
    "terngrad": Said(
        "-1, 0 or +1, and a scale of each tensor",
        "1.5 / log2(2N+1) = 3.17",
        "three values take 2 bits, 2N+1 sums 4; the survey of scales, 32 bits a tensor",
    ),
    "graddrop": Said("4 % of the entries of the residual", "not known", ENTRIES),
    "dgc": Said("4 % of the entries of each tensor", "(1-0.96)·32 = 1.28 / 32", ENTRIES),
    "ef-signsgd": Said(
        "sign of gradient and error, and a scale of each tensor", "not compared", "scales; relayed, N bits come down"
    ),
    "powersgd": Said("factors of rank 2 of each matrix", "not compared", "vectors and small matrices, sent whole"),
}


def counted(method: str, rank: int, group: dist.ProcessGroup | None, topology: str) -> tuple[float, float]:
    """Bits per parameter and step that this worker sends and receives."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in BLOCK]
    opt = Distributed(params, method, process_group=group, topology=topology, **KEEP.get(method, {}))
    own = torch.Generator().manual_seed(rank)
    for param in params:
        param.grad = torch.randn(param.shape, generator=own)
    for _ in range(STEPS):
        opt.step()
    return opt.stats.bits_per_param_sent, opt.stats.bits_per_param_received


def measured(method: str, rank: int, group: dist.ProcessGroup | None) -> Bits:
    """Of a worker that is not the server."""
    sent, received = counted(method, rank, group, "auto")
    if "server" not in METHODS[method].topologies:
        return Bits(sent, received, None, None)
    return Bits(sent, received, *counted(method, rank, group, "server"))


def table(found: dict[str, Bits]) -> str:
    """The lines of the Markdown table."""
    lines = [
        "| method | message | sent | received | up | down | paper, up / down | which leaves out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method, bits in found.items():
        said = SAID[method]
        ways = [bits.sent, bits.received, bits.up, bits.down]
        cells = [f"`{method}`", said.message, *map(_number, ways), said.paper, said.left_out]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORKERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
    found = {method: measured(method, rank, None) for method in METHODS}
    if rank == WORKERS - 1:
        torch.save({method: tuple(vars(bits).values()) for method, bits in found.items()}, f"{folder}/bits.pt")
    dist.barrier()
    dist.destroy_process_group()


def in_processes(work: Callable[..., Any] = _work) -> dict[str, Bits]:
    """What the last of four processes counted."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(work, args=(folder,), nprocs=WORKERS)
        found: dict[str, Iterable[float | None]] = torch.load(f"{folder}/bits.pt", weights_only=True)
    return {method: Bits(*ways) for method, ways in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="document whose table is replaced; without it the table is printed")
    options = parser.parse_args()
    text = table(in_processes())
    if options.docs is None:
        print(text)
    else:
        fill(options.docs, "bits", "methods", text)


if __name__ == "__main__":
    main()
