"""Emulated links between network namespaces of this machine: shaped by the kernel, or delayed by a switch of our own.

Contexts that give one Place for each worker and remove everything they made, also after an error:

    with shaped(4, "100mbit") as places: ...      one bridge, veth, tbf on both ends of every link
    with delayed(4, delay_ms=25) as places: ...   one TUN each, one process that forwards (delay_switch.py)
    with loopback(4) as places: ...               all in one namespace, as the workers of one machine are

All need root and iproute2. `missing()` says in one sentence what is not there.
"""

import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# After a pause the bucket's content leaves at the speed of memory, so it must be small beside one vote's 0.9 MB, but a
# bucket that is empty before a busy core runs the sender again leaves the link idle, and all-reduces of megabytes would
# look slower than they are. At 1 Gbit/s on two cores an all-reduce of 8 MB among four workers reached 531 Mbit/s with
# 64 kB, 933 with 128 kB and 948 with 512 kB, but with 512 kB a vote's rows passed at 1573; at 200 Mbit/s 189 with
# 64 kB. That is also the largest packet that TCP hands to a veth: tbf cuts those that are larger than its bucket.
SMALL_BURST, LARGE_BURST = 64 * 1024, 128 * 1024
SMALL_BURST_UP_TO = 200e6  # bit/s
QUEUE = "50ms"  # what waits longer than this before a shaped link is dropped, as by a router
DELAY_MTU = 9000  # bytes; the switch is Python, and at 1500 its packets a second would be the limit, not its rate

NAMESPACES = Path("/run/netns")
NAME = re.compile(r"dlion-(\d+)-.+")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LinkError(Exception):
    """A sentence for the user."""


@dataclass(frozen=True)
class Place:
    """Where one worker runs: a namespace, its address there and its interface."""

    namespace: str
    address: str
    interface: str

    @property
    def enter(self) -> tuple[str, ...]:
        """Start of a command that runs in the namespace."""
        return ("ip", "netns", "exec", self.namespace)


def bits_per_second(rate: str) -> float | None:
    """'100mbit' -> 1e8; None for 'none'.

    Raises: LinkError for anything but a positive whole number with kbit, mbit or gbit.
    """
    if rate == "none":
        return None
    match = re.fullmatch(r"([1-9][0-9]*)(kbit|mbit|gbit)", rate)
    if not match:
        raise LinkError(f"the rate {rate!r} is unknown: give none or a whole number with kbit, mbit or gbit (100mbit).")
    return int(match[1]) * UNITS[match[2]]


def burst_bytes(rate: str) -> int | None:
    """Bucket of tbf for this rate; None for 'none'."""
    bits = bits_per_second(rate)
    if bits is None:
        return None
    return SMALL_BURST if bits <= SMALL_BURST_UP_TO else LARGE_BURST


def missing() -> str | None:
    """What stands in the way of shaped links, in one sentence; None if nothing does."""
    if not sys.platform.startswith("linux"):
        return f"emulated links need Linux's network namespaces and this is {sys.platform}."
    if os.geteuid() != 0:
        return "emulated links need root, to make network namespaces: run the command as root."
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"emulated links need the command {tool}: install it (Debian: apt-get install iproute2)."
    try:
        with _namespaces(["probe"]) as (name,):
            _run("ip", "-n", name, "link", "add", "e0", "type", "veth", "peer", "name", "p0")
            _shape(name, "e0", "1mbit")
    except LinkError as error:
        return f"emulated links do not work here: {error}"
    return None


def missing_for_delay() -> str | None:
    """What stands in the way of delayed links, in one sentence; None if nothing does."""
    if lacking := missing():
        return lacking
    try:
        with _namespaces(["probe"]) as (name,):
            _run("ip", "-n", name, "tuntap", "add", "dev", "w0", "mode", "tun")
    except LinkError as error:
        return f"delayed links do not work here: {error}"
    return None


@contextmanager
def shaped(workers: int, rate: str, *, segment_like_a_wire: bool = False) -> Iterator[list[Place]]:
    """One namespace for each worker on a bridge, every link shaped to `rate` in both directions.

    Args:
        workers: how many, at most 254.
        rate: for example '100mbit', or 'none' for links as fast as the machine.
        segment_like_a_wire: packets of at most one MTU (1500 bytes), so that the interface counts the headers that a
            real wire would carry. Off by default: cutting in the kernel costs time that a network card would not.

    Raises: LinkError when the rate is unknown or a command fails.
    """
    bits_per_second(rate)
    names = [f"w{worker}" for worker in range(workers)]
    # The bridge has a namespace of its own: nothing is added to the host's network.
    with _namespaces([*names, "bridge"]) as (*spaces, bridge):
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        places = [Place(space, f"10.231.0.{worker + 1}", f"e{worker}") for worker, space in enumerate(spaces)]
        for worker, place in enumerate(places):
            port = f"p{worker}"
            _run(
                *("ip", "link", "add", place.interface, "netns", place.namespace),
                *("type", "veth", "peer", "name", port, "netns", bridge),
            )
            _run("ip", "-n", place.namespace, "addr", "add", f"{place.address}/24", "dev", place.interface)
            if segment_like_a_wire:
                _run("ip", "-n", place.namespace, "link", "set", "dev", place.interface, "gso_max_segs", "1")
            for interface in ("lo", place.interface):
                _run("ip", "-n", place.namespace, "link", "set", interface, "up")
            _run("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
            if rate != "none":  # what leaves the worker, and what leaves the bridge for it
                _shape(place.namespace, place.interface, rate)
                _shape(bridge, port, rate)
        yield places


@contextmanager
def loopback(workers: int) -> Iterator[list[Place]]:
    """All workers on one loopback interface: what they have on one machine, with nothing of others on it.

    Raises: LinkError when a command fails.
    """
    with _namespaces(["loopback"]) as (name,):
        _run("ip", "-n", name, "link", "set", "lo", "up")
        yield [Place(name, "127.0.0.1", "lo")] * workers


@contextmanager
def delayed(
    workers: int, *, delay_ms: float, rate_mbit: float = 0.0, loss: float = 0.0, mtu: int = DELAY_MTU
) -> Iterator[list[Place]]:
    """One namespace for each worker, joined by a switch in user space.

    Args:
        workers: how many, at most 254.
        delay_ms: one way.
        rate_mbit: of every link in each direction; 0: no limit but the switch's own speed.
        loss: probability that a packet is dropped. The same packets every time: the stream of random numbers is fixed.
        mtu: bytes.

    Raises: LinkError when a command fails or the switch does not start.
    """
    with _namespaces([f"w{worker}" for worker in range(workers)]) as spaces:
        settings = {"namespaces": spaces, "delay_ms": delay_ms, "rate_mbit": rate_mbit, "loss": loss, "mtu": mtu}
        switch = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("delay_switch.py")), json.dumps(settings)],
            stdin=subprocess.PIPE,  # it ends when this pipe does, so it never outlives its owner
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert switch.stdin is not None and switch.stdout is not None
            _wait_until_ready(switch.stdout.fileno())
            yield [Place(space, f"10.232.0.{worker + 1}", "w0") for worker, space in enumerate(spaces)]
        finally:
            switch.kill()
            switch.communicate()


def _wait_until_ready(output: int, seconds: float = 10) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        if not selector.select(seconds) or not os.read(output, 100).startswith(b"ready"):
            raise LinkError("the delay switch did not start: see its message above.")


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Within: SIGINT, SIGTERM and SIGHUP leave through SystemExit, so that contexts remove what they made.

    A second signal does not interrupt the removing.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _namespaces(purposes: list[str]) -> Iterator[list[str]]:
    _remove_orphans()
    names = [f"dlion-{os.getpid()}-{purpose}" for purpose in purposes]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        yield names
    finally:
        for name in names:
            # An interface leaves with its namespace, and a veth with its peer.
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _remove_orphans() -> None:
    """Remove what a process left that was killed with SIGKILL."""
    for path in NAMESPACES.glob("dlion-*"):
        match = NAME.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, check=False)


def _shape(namespace: str, interface: str, rate: str) -> None:
    _run(
        *("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root"),
        *("tbf", "rate", rate, "burst", str(burst_bytes(rate)), "latency", QUEUE),
    )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise LinkError(f"`{' '.join(command)}` failed: {reason}")
