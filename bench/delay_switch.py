"""The switch behind links.delayed: one process that owns a TUN in every namespace and forwards between them.

    python delay_switch.py '{"namespaces": [...], "delay_ms": 25, "rate_mbit": 100, "loss": 0.0, "mtu": 9000}'

For kernels without sch_netem. Prints `ready` once all links are up, and ends when its standard input does.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
CLONE_NEWNET = 0x40000000  # linux/sched.h
INTERFACE = "w0"
QUEUE_SECONDS = 0.2  # a packet that would wait longer than this for its link is dropped
PACKETS_AT_ONCE = 64  # read from one worker before the others have their turn


def enter(namespace: str) -> None:
    """Move this thread into a network namespace, named as in `ip netns` or a path under /proc.

    Raises: OSError. (Python has os.setns from 3.12 on.)
    """
    path = namespace if namespace.startswith("/") else f"/run/netns/{namespace}"
    handle = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    finally:
        os.close(handle)


def open_tun(namespace: str, address: str, mtu: int) -> int:
    """Make the interface of one worker; reading gives the packets it sends, writing delivers packets to it."""
    enter(namespace)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", INTERFACE.encode(), IFF_TUN | IFF_NO_PI))
    for command in (
        f"ip addr add {address}/24 dev {INTERFACE}",
        f"ip link set {INTERFACE} mtu {mtu} txqueuelen 2000 up",
        "ip link set lo up",
    ):
        subprocess.run(command.split(), check=True)
    return tun


@dataclass
class Wire:
    """When packets arrive. `rate` in bytes a second, 0: no limit; times in seconds."""

    delay: float
    rate: float = 0.0
    loss: float = 0.0
    queue: float = QUEUE_SECONDS
    _up_free: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    _down_free: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def arrival(self, now: float, size: int, source: int, target: int) -> float | None:
        """When a packet that leaves `source` now is at `target`; None: it is dropped.

        It takes its time on the sender's up-link first, then on the receiver's down-link.
        """
        if self.loss and self._random.random() < self.loss:
            return None
        if not self.rate:
            return now + self.delay
        takes = size / self.rate
        up = max(now, self._up_free[source]) + takes
        down = max(up, self._down_free[target] + takes)
        if down - now > self.queue:
            return None
        self._up_free[source], self._down_free[target] = up, down
        return down + self.delay


class Switch:
    """Packets on their way between TUNs. `tuns`: IPv4 address (4 bytes) -> file descriptor."""

    def __init__(self, tuns: dict[bytes, int], wire: Wire) -> None:
        self.tuns = tuns
        self.wire = wire
        self._travelling: list[tuple[float, int, int, bytes]] = []
        self._count = 0  # packets that arrive at the same time keep their order

    def take(self, tun: int) -> None:
        """Read what a worker has sent."""
        for _ in range(PACKETS_AT_ONCE):
            try:
                packet = os.read(tun, 65535)
            except BlockingIOError:
                return
            target = self.tuns.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if target is None:
                continue  # IPv6 and multicast: nobody here is asked for
            arrival = self.wire.arrival(time.monotonic(), len(packet), tun, target)
            if arrival is not None:
                self._count += 1
                heapq.heappush(self._travelling, (arrival, self._count, target, packet))

    def deliver(self) -> float | None:
        """Write what has arrived; the seconds until the next packet does, None if none is on its way."""
        while self._travelling:
            left = self._travelling[0][0] - time.monotonic()
            if left > 0:
                return left
            _, _, target, packet = heapq.heappop(self._travelling)
            try:
                os.write(target, packet)
            except OSError:
                pass  # the worker's queue is full: dropped, as on any link
        return None

    def run(self, until_closed: int) -> None:
        """Forward until the file `until_closed` ends."""
        with selectors.DefaultSelector() as selector:
            for file in (until_closed, *self.tuns.values()):
                selector.register(file, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(self.deliver()):
                    if key.fd == until_closed:
                        return
                    self.take(key.fd)


def main(argument: str) -> None:
    settings = json.loads(argument)
    tuns = {}
    for worker, namespace in enumerate(settings["namespaces"]):
        address = f"10.232.0.{worker + 1}"
        tuns[bytes(map(int, address.split(".")))] = open_tun(namespace, address, settings["mtu"])
    wire = Wire(settings["delay_ms"] / 1e3, settings["rate_mbit"] * 1e6 / 8, settings["loss"])
    print("ready", flush=True)
    Switch(tuns, wire).run(sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1])
