"""What the figures say, in one paragraph, and how figures and names are written for readers."""

from typing import Any

from dlion.train.bench.ratios import Ratio, ratio

DDP = "ddp fp32"


def sentence(result: dict[str, Any]) -> str:
    """Whether voting pays here, as measured and by how much; then what the model says of other networks."""
    contenders, even = result["contenders"], result["break_even"]
    if even is None:
        return "Nothing is said about voting: that needs the contenders ddp-fp32 and dlion."
    name = even["contender"]
    return f"Measured here: {_here(name, result)}{_powersgd(name, contenders)}. {_elsewhere(even)}."


def _here(name: str, result: dict[str, Any]) -> str:
    contenders = result["contenders"]
    voter, ddp = contenders[name], contenders[DDP]
    steps = (
        f"a step takes {duration(voter['seconds'])} with {shown(name)} and {duration(ddp['seconds'])} with DDP in fp32"
    )
    gain, rounds = ratio(ddp, voter), f" over {result['rounds']} rounds"
    if gain.is_undecided:
        return f"no difference between voting and DDP beyond the spread of the ratio, {spread(gain, rounds)}: {steps}"
    if gain.median > 1:
        return f"voting pays by a factor of {spread(gain, rounds)}: {steps}"
    return f"voting does not pay, by a factor of {spread(gain.inverse, rounds)}: {steps}"


def _elsewhere(even: dict[str, Any]) -> str:
    model = "On other networks, by a model that leaves out waiting for slower workers"
    if even["pays"] == "everywhere":
        return f"{model}, voting pays at every bandwidth"
    if even["pays"] == "nowhere":
        return f"{model}, voting pays at no bandwidth"
    return f"{model}, the break-even is {rate(even['mbit_per_s'])}: voting pays below it"


def _powersgd(name: str, contenders: dict[str, Any]) -> str:
    found = [one for one in contenders if one.startswith("powersgd")]
    if not found:
        return ""
    lead = ratio(contenders[name], contenders[found[0]])
    if lead.low <= 1:
        return ""
    theirs, rank = duration(contenders[found[0]]["seconds"]), found[0].split()[1]
    return f"; PowerSGD of rank {rank} is quicker than {shown(name)} by a factor of {spread(lead)}, {theirs} a step"


def spread(found: Ratio, rounds: str = "") -> str:
    """'1.22 (1.18 to 1.27)'."""
    return f"{found.median:.3g} ({found.low:.3g} to {found.high:.3g}{rounds})"


def shown(name: str) -> str:
    """A contender's name as the flag --contenders takes it; bench.json has spaces in it."""
    return name.replace(" ", "-")


def duration(seconds: float) -> str:
    """'25,400 s', '25.4 s', '131 ms', '420 µs', '0'."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} µs" if seconds else "0"


def volume(nbytes: float) -> str:
    """'29.4 MB', '919 kB', '0 B'."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.3g} B"


def rate(mbit_per_s: float) -> str:
    """'93 Mbit/s', '1.2 Gbit/s', '3 Tbit/s'."""
    for unit, size in (("Tbit/s", 1e6), ("Gbit/s", 1e3)):
        if mbit_per_s >= size:
            return f"{mbit_per_s / size:.3g} {unit}"
    return f"{mbit_per_s:.3g} Mbit/s"


def bits(per_s: float) -> str:
    """'10 M', '1 G', '2 T': of bit/s, for an axis that names them."""
    for unit, size in (("T", 1e12), ("G", 1e9)):
        if per_s >= size:
            return f"{per_s / size:.3g} {unit}"
    return f"{per_s / 1e6:.3g} M"


def bare_exchange(result: dict[str, Any]) -> str:
    """The rows of one vote alone, and what that rate is not."""
    bare = result["bare_exchange"]
    moved = f"{volume(bare['payload'])} in {duration(bare['seconds'])}"
    return (
        f"Bare exchange, the rows of one vote and nothing else: {moved}. That is an effective rate of "
        f"{rate(bare['mbit_per_s'])} for this small exchange, latency included, and not the network's bandwidth."
    )
