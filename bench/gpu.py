"""Prove dlion on a GPU and measure it: one command, under five minutes, a table and a file of JSON.

    python bench/gpu.py                                        # all of it, on all GPUs of this machine
    python bench/gpu.py --device cpu --largest 1e6 --workers 2    # the same code on a CPU, without targets for rates

First the bits: every kernel against the reference on the CPU in all dtypes, repetitions, a model trained on both, a
step in a CUDA graph, memory. Then rates: each kernel beside a copy of memory; a step beside torch's fused AdamW at
0.1, 1 and 4 billion parameters, and at 1,000 small tensors; tallies of 8, 64 and 512 voters; with several GPUs a step
over NCCL beside DDP, with and without overlap. Exit status 1 where something is not as its target says. bench/README.md
says what the lines mean and where to send them.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import gpu_checks
import gpu_rates
import torch
import torch.distributed as dist
from gpu_checks import Row

import dlion
from dlion.ops import choose

BILLION = 10**9
SIZES = (BILLION // 10, BILLION, 4 * BILLION)
ALONE = 2**28  # parameters of the kernels' rates and of the memory's measurement


@dataclass
class Report:
    """What is written to `file`."""

    file: Path
    surroundings: dict[str, str]
    rows: list[Row]

    def write(self, ended: str) -> None:
        told = {"surroundings": self.surroundings, "ended": ended, "rows": [asdict(row) for row in self.rows]}
        self.file.write_text(json.dumps(told, indent=1))


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


def commit() -> str:
    """Of the clone that this file lies in; nothing where there is none."""
    told = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return told.stdout.strip()


def without_target(row: Row, device: torch.device) -> Row:
    """The rates of a CPU are not held to what a GPU must reach."""
    timed = row.part in ("kernels", "steps")
    return replace(row, target="", held=None) if timed and device.type == "cpu" else row


def line(row: Row) -> str:
    figure = "" if row.figure is None else f"{row.figure:,.3f} {row.unit}".rstrip()
    verdict = {None: "", True: "held", False: "NOT HELD"}[row.held]
    return f"{row.part:9} {row.what:66} {figure:>16}   {row.target:18} {verdict}".rstrip()


def surroundings(device: torch.device) -> dict[str, str]:
    """What the figures depend on."""
    cuda = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else 0
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "capability": str(torch.cuda.get_device_capability(device)) if cuda else "",
        "runtime": str(torch.version.hip or torch.version.cuda or ""),
        "devices": str(torch.cuda.device_count()) if cuda else "",
        "memory": f"{memory / 2**30:.0f} GiB" if cuda else "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else "",
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else "",
        "dlion": f"{dlion.__version__} {commit()}".rstrip(),
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
    if device.type == "cuda" and workers > torch.cuda.device_count():
        parser.error(f"--workers {workers}: there are {torch.cuda.device_count()} GPUs, and each worker takes one")
    report = Report(options.json, surroundings(device), [])
    try:
        report.write("did not end")  # before anything is measured: it may not be possible
    except OSError as error:
        parser.error(f"--json {options.json}: {error}")
    print(", ".join(f"{name} {value}" for name, value in report.surroundings.items() if value), flush=True)
    print(f"{'part':9} {'what':66} {'figure':>16}   {'target':18} held?", flush=True)
    sys.exit(measured(report, rows(device, int(options.largest), workers, options.rounds), device))


def measured(report: Report, found: Iterator[Row], device: torch.device) -> int:
    """Print the rows and write them, whatever ends them: those there are, are worth sending. The exit status."""
    began, ended, status = time.monotonic(), "complete", 0
    try:
        for row in found:
            report.rows.append(without_target(row, device))
            print(line(report.rows[-1]), flush=True)
    except KeyboardInterrupt:
        ended, status = "interrupted", 130
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
        raise
    finally:
        report.write(ended)
    held = [row.held for row in report.rows if row.held is not None]
    print(
        f"{ended}: {time.monotonic() - began:.0f} s, {held.count(False)} of {len(held)} targets not held, "
        f"{report.file} written"
    )
    return status or int(False in held)


if __name__ == "__main__":
    main()
