"""Prove dlion on a GPU and measure it: one command, under five minutes, a table and a file of JSON.

    python bench/gpu.py                                        # all of it, on all GPUs of this machine
    python bench/gpu.py --device cpu --largest 1e6 --workers 2    # the same code on a CPU, in a few seconds

First the bits: every kernel against the reference on the CPU in all dtypes, repetitions, a model trained on both, a
step in a CUDA graph, memory. Then rates: each kernel beside a copy of memory; a step beside torch's fused AdamW at
0.1, 1 and 4 billion parameters, and at 1,000 small tensors; tallies of 8, 64 and 512 voters; with several GPUs a step
over NCCL beside DDP. Exit status 1 where something is not as its target says. bench/README.md says where to send it.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import gpu_checks
import gpu_rates
import torch
from gpu_checks import Row

import dlion
from dlion.ops import choose

BILLION = 10**9
SIZES = (BILLION // 10, BILLION, 4 * BILLION)
ALONE = 2**28  # parameters of the kernels' rates and of the memory's measurement


def rows(device: torch.device, largest: int, workers: int, rounds: int) -> Iterator[Row]:
    """All lines of the table, as they are found."""
    kernels = choose("auto", device)[1]
    yield from gpu_checks.correctness(kernels, device)
    yield from gpu_checks.determinism(kernels, device)
    yield from gpu_checks.replicas(device)
    yield from gpu_checks.capture(device)
    alone = min(ALONE, largest) // 64 * 64
    yield from gpu_checks.memory(device, alone)
    yield from gpu_rates.kernel_rates(kernels, device, alone, rounds)
    for numel in sorted({min(size, largest) for size in SIZES}):
        yield from gpu_rates.steps(kernels, device, numel, rounds)
    yield from gpu_rates.small_tensors(kernels, device, rounds)
    yield from gpu_rates.between_devices(device, workers, 5000 if largest >= BILLION else 64, rounds)


def line(row: Row) -> str:
    figure = "" if row.figure is None else f"{row.figure:,.3f} {row.unit}".rstrip()
    verdict = {None: "", True: "held", False: "NOT HELD"}[row.held]
    return f"{row.part:9} {row.what:66} {figure:>16}   {row.target:18} {verdict}".rstrip()


def surroundings(device: torch.device) -> dict[str, str]:
    """What the figures depend on."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "capability": str(torch.cuda.get_device_capability(device)) if cuda else "",
        "runtime": str(torch.version.hip or torch.version.cuda or ""),
        "torch": torch.__version__,
        "dlion": dlion.__version__,
        "kernels": choose("auto", device)[0],
        "python": platform.python_version(),
        "when": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--largest", type=float, default=float(SIZES[-1]), help="parameters of the largest step")
    parser.add_argument("--workers", type=int, help="processes of the last part (default: one for each GPU)")
    parser.add_argument("--rounds", type=int, default=7, help="of every measurement; the median is told")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="write surroundings and figures here")
    options = parser.parse_args()
    if not 64 <= options.largest < 1e12 or options.rounds < 1 or (options.workers is not None and options.workers < 0):
        parser.error("--largest must be at least 64 and less than 1e12, --rounds at least 1 and --workers at least 0")
    if not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: run it where there is one, or with --device cpu to try the script")
    device = torch.device(options.device)
    workers = options.workers if options.workers is not None else torch.cuda.device_count()
    began, around = time.monotonic(), surroundings(device)
    print(", ".join(f"{name} {value}" for name, value in around.items() if value), flush=True)
    found: list[Row] = []
    try:
        for row in rows(device, int(options.largest), workers, options.rounds):
            found.append(row)
            print(line(row), flush=True)
    finally:  # what was found is worth sending, whatever ended the rest
        text = json.dumps({"surroundings": around, "rows": [asdict(row) for row in found]}, indent=1)
        options.json.write_text(text)
    print(
        f"{time.monotonic() - began:.0f} s, {sum(row.held is False for row in found)} of "
        f"{sum(row.held is not None for row in found)} targets not held, {options.json} written"
    )
    sys.exit(any(row.held is False for row in found))


if __name__ == "__main__":
    main()
