"""A measurement as bench.json holds it, made up."""

import copy
from typing import Any

from dlion.train.bench.ratios import ratios
from dlion.train.bench.sentence import sentence

RESULT: dict[str, Any] = {
    "workers": 4,
    "parameters": 4_902_144,
    "rounds": 5,
    "seconds": 61.2,
    "settings": {"batch_size": 2, "tokens": 64, "contenders": ["dlion", "ddp-fp32"], "workers": 4},
    "environment": {"device": "cpu", "threads": 1, "backend": "gloo", "cpu": "a <fine> & fast one"},
    "contenders": {
        "no communication": {"seconds": 0.11, "sent": None, "sent_by_formula": 0.0, "interface_sent": 900.0},
        "ddp fp32": {"seconds": 25.4, "sent": None, "sent_by_formula": 29_412_864.0, "interface_sent": 29.5e6},
        "powersgd 2": {"seconds": 0.503, "sent": None, "sent_by_formula": 347_904.0, "interface_sent": 362_000.0},
        "dlion": {"seconds": 1.02, "sent": 919_248.0, "sent_by_formula": 919_152.0, "interface_sent": 925_000.0},
    },
    "interface": {"name": "eth0", "shared_by": 1},
    "phases": {"compute": 0.1, "ballot": 0.004, "wait": 0.9, "tally": 0.001, "apply": 0.0015},
    "overlap_phases": None,
    "bare_exchange": {"payload": 919_248, "seconds": 0.8, "mbit_per_s": 9.19},
    "break_even": {
        "contender": "dlion",
        "pays": "below",
        "mbit_per_s": 3210.0,
        "ddp": {"local": 0.11, "bytes_sent": 29_412_864.0, "delay": 0.001, "hidden": 0.06},
        "dlion": {"local": 0.105, "bytes_sent": 919_152.0, "delay": 0.001, "hidden": 0.0},
    },
}
for _found in RESULT["contenders"].values():
    _found["steps"] = [_found["seconds"] * factor for factor in (0.9, 1.0, 1.3)]


def whole(result: dict[str, Any], spread: float = 1.0) -> dict[str, Any]:
    """With what follows from contenders and break-even. Rounds differ, and dlion's by `spread` beside the others."""
    result = copy.deepcopy(result)
    for name, found in result["contenders"].items():
        lows = (1.0, 1.0, 1.1, 1 / spread, spread) if name == "dlion" else (1.0, 1.0, 1.1, 1.0, 1.0)
        found["turns"] = [found["seconds"] * factor for factor in lows]
    result["ratios"] = ratios(result["contenders"])
    result["sentence"] = sentence(result)
    return result


RESULT = whole(RESULT)


def changed(**changes: Any) -> dict[str, Any]:
    return whole(RESULT | changes)
