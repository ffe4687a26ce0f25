"""Whether a line of cells.jsonl is the record of a cell: others edit, cut and join such files."""

import sys
from collections.abc import Mapping
from typing import Any

from dlion.train.compare.study import METRICS

TABLES = ("flags", "config", "versions", "data", "curve")
NUMBERS = ("steps", "workers", "seconds")
PERHAPS = (
    *(*METRICS, "params", "epoch_steps", "best_step", "abstentions", "ratio"),
    *("bits_per_param_sent", "bits_per_param_received", "bytes_sent", "bytes_received"),
)


def is_whole(record: object) -> bool:
    """Whether tables and reports can be made of it: every part is there, and is of its kind."""
    return (
        isinstance(record, dict)
        and all(isinstance(record.get(name), dict) for name in TABLES)
        and all(isinstance(record.get(name), bool) for name in ("diverged", "simulated"))
        and all(_is_number(record.get(name)) and record[name] >= 0 for name in NUMBERS)
        and all(record.get(name) is None or _is_number(record[name]) for name in PERHAPS)
        and {"device", "threads"} <= record.keys()
        and all(isinstance(record["data"].get(name), str) for name in ("name", "sha256"))
        and (record["diverged"] or record.get("val_loss") is not None)
        and _can_be_drawn(record["curve"], record)
    )


def _can_be_drawn(curve: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    if not curve:
        return True
    if not (
        curve.keys() >= {"step", "val_loss", "bytes_sent"} and all(isinstance(one, list) for one in curve.values())
    ):
        return False
    known = all(_is_number(one) for name in ("step", "bytes_sent") for one in curve[name])
    shown = all(one is None or _is_number(one) for values in curve.values() for one in values)
    even = len({len(values) for values in curve.values()}) == 1
    return known and shown and even and bool(record["steps"]) and bool(record.get("epoch_steps"))


def _is_number(value: object) -> bool:
    """Whether it is one that a float can hold: integers in a file may be of any length."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
