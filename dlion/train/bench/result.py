"""From what was measured to the contents of bench.json."""

import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

import dlion
from dlion.ops import choose
from dlion.train.bench.break_even import Terms, break_even
from dlion.train.bench.contenders import Contender
from dlion.train.bench.formulas import ddp_calls
from dlion.train.bench.interface import Interface
from dlion.train.bench.ratios import ratios
from dlion.train.bench.rounds import Measured
from dlion.train.bench.sentence import sentence
from dlion.train.bench.settings import BenchConfig
from dlion.train.bench.turns import Record
from dlion.train.ranks import Ranks

Result = dict[str, Any]
DDP = "ddp fp32"
VOTERS = ("dlion", "dlion overlap")


def result_of(config: BenchConfig, ranks: Ranks, measured: Measured) -> Result:
    """Everything that the table, the page and bench.json say."""
    result: Result = {
        "settings": config.to_json() | {"workers": ranks.channel.size},
        "environment": _environment(ranks),
        "workers": ranks.channel.size,
        "parameters": measured.parameters,
        "rounds": measured.rounds,
        "seconds": measured.seconds,
        "contenders": {name: _contender(*pair) for name, pair in measured.contenders.items()},
        "interface": _interface(measured.interface),
        "phases": _phases(measured, "dlion"),
        "overlap_phases": _phases(measured, "dlion overlap"),
        "bare_exchange": {
            "payload": measured.bare.payload,
            "seconds": measured.bare.median,
            "mbit_per_s": 8e-6 * measured.bare.payload / measured.bare.median,
            "times": measured.bare.seconds,
        },
        "latency": measured.latencies,
    }
    result["ratios"] = ratios(result["contenders"])
    result["break_even"] = _break_even(measured)
    result["sentence"] = sentence(result)
    return result


def _contender(contender: Contender, record: Record) -> Result:
    return {
        "seconds": record.seconds,
        "steps": record.steps,
        "turns": record.turns,
        "parts": record.part_medians._asdict(),
        "sent": _median(record.sent),
        "sent_by_formula": contender.bytes_by_formula(),
        "interface_sent": _median(record.interface_sent),
        "interface_received": _median(record.interface_received),
        **contender.notes,
    }


def _environment(ranks: Ranks) -> Result:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "dlion": dlion.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.system(),
        "kernels": choose("auto")[0],
        "device": ranks.device.type,
        "backend": "gloo" if ranks.device.type == "cpu" else "nccl",
        "cpu": _cpu(),
        "cores": cores,
        "threads": ranks.threads,
    }


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _interface(interface: Interface | None) -> Result | None:
    return None if interface is None else {"name": interface.name, "shared_by": interface.shared_by}


def _phases(measured: Measured, name: str) -> Result | None:
    """Seconds of each phase in a mean step; compute is forward and backward without what votes inside them."""
    if name not in measured.contenders:
        return None
    record = measured.contenders[name][1]
    return {"compute": record.part_medians.compute, **record.phase_medians}


def _break_even(measured: Measured) -> Result | None:
    """The break-even of the quicker way to vote against DDP in fp32; None unless both were measured."""
    voters = [name for name in VOTERS if name in measured.contenders]
    if DDP not in measured.contenders or not voters:
        return None
    name = min(voters, key=lambda one: measured.contenders[one][1].seconds)
    return {"contender": name, **break_even(_ddp_terms(measured, name), _voter_terms(measured, name)).to_json()}


def _ddp_terms(measured: Measured, voter: str) -> Terms:
    """DDP's own compute cannot be told from its waiting, so it is taken from the contender that votes."""
    ddp, record = measured.contenders[DDP]
    voted = measured.contenders[voter][1].part_medians
    calls = ddp_calls(measured.parameters, ddp.notes["bucket_cap_mb"])
    return Terms(
        local=voted.compute + record.part_medians.update,
        bytes_sent=ddp.bytes_by_formula(),
        delay=calls * measured.latencies["all_reduce"],
        hidden=voted.compute - voted.forward,
    )


def _voter_terms(measured: Measured, name: str) -> Terms:
    contender, record = measured.contenders[name]
    parts, overlapping = record.part_medians, name != "dlion"
    # with overlap all buckets are under way at once, and only a bucket's own calls wait for each other
    calls = min(measured.bare.calls, 2) if overlapping else measured.bare.calls
    return Terms(
        local=parts.whole - record.phase_medians["wait"],
        bytes_sent=contender.bytes_by_formula(),
        delay=calls * measured.latencies["vote_call"],
        hidden=parts.compute - parts.forward if overlapping else 0.0,
    )


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
