"""What the figures say, in one sentence."""

from typing import Any


def sentence(result: dict[str, Any]) -> str:
    """Whether voting pays here, by which factor, and below which bandwidth it starts to."""
    contenders, even = result["contenders"], result["break_even"]
    if even is None:
        return "Nothing is said about voting: that needs the contenders ddp-fp32 and dlion."
    name = even["contender"]
    voted, averaged = contenders[name]["seconds"], contenders["ddp fp32"]["seconds"]
    return f"{_here(name, voted, averaged)}; {_elsewhere(even)}{_powersgd(name, contenders)}."


def _here(name: str, voted: float, averaged: float) -> str:
    steps = f"a step takes {duration(voted)} with {name} and {duration(averaged)} with DDP in fp32"
    if averaged >= voted:
        return f"Voting pays here, by a factor of {averaged / voted:.3g}: {steps}"
    return f"Voting does not pay here, by a factor of {voted / averaged:.3g}: {steps}"


def _elsewhere(even: dict[str, Any]) -> str:
    if even["pays"] == "everywhere":
        return "by the model it pays at every bandwidth"
    if even["pays"] == "nowhere":
        return "by the model it pays at no bandwidth"
    return f"by the model, which grants DDP a perfect overlap, it starts to below {rate(even['mbit_per_s'])}"


def _powersgd(name: str, contenders: dict[str, Any]) -> str:
    quicker = [one for one in contenders if one.startswith("powersgd")]
    if not quicker or contenders[quicker[0]]["seconds"] >= contenders[name]["seconds"]:
        return ""
    theirs = contenders[quicker[0]]["seconds"]
    factor, rank = contenders[name]["seconds"] / theirs, quicker[0].split()[1]
    return f"; PowerSGD of rank {rank} is {factor:.3g} times as quick as {name}, {duration(theirs)} a step"


def duration(seconds: float) -> str:
    """'25.4 s', '131 ms', '420 µs'."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} µs"


def volume(nbytes: float) -> str:
    """'29.4 MB', '919 kB', '0 B'."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.3g} B"


def rate(mbit_per_s: float) -> str:
    """'93 Mbit/s', '1.2 Gbit/s'."""
    if mbit_per_s >= 1000:
        return f"{mbit_per_s / 1000:.3g} Gbit/s"
    return f"{mbit_per_s:.3g} Mbit/s"
