"""Bytes through the network interface that carries the group's traffic, from the kernel's counters (Linux).

They hold everything: headers of TCP and IP, and whatever else uses the interface meanwhile.
"""

import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlion.channel import Channel

SYSTEM = Path("/sys/class/net")
SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
LOOPBACK = "lo"


@dataclass(frozen=True)
class Interface:
    """One interface, and how many workers' traffic its counters add up.

    On the loopback all workers of a machine share the counters: what they show is divided. Elsewhere they show what
    leaves the machine, which is divided by its workers too.
    """

    name: str
    shared_by: int
    system: Path = SYSTEM

    def read(self) -> tuple[int, int]:
        """Bytes sent and received since the interface came up."""
        folder = self.system / self.name / "statistics"
        return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


def interface_of(channel: Channel, backend: str, system: Path = SYSTEM) -> Interface | None:
    """The interface of this worker's traffic; None where that cannot be known. All workers must call it."""
    name = carrier(os.environ, backend, system)
    if name is not None:
        with suppress(OSError, ValueError):
            Interface(name, 1, system).read()
            return _shared(channel, name, system)
    channel.gather_json(None)
    return None


def carrier(environment: Mapping[str, str], backend: str, system: Path = SYSTEM) -> str | None:
    """Name of the interface that the backend uses: the one it was told, else for Gloo that of the host name's address.

    NCCL may choose a network that is no interface, so without NCCL_SOCKET_IFNAME it is unknown.
    """
    told = environment.get("GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME", "")
    if told:
        names = [name for name in told.split(",") if (system / name).is_dir()]
        return names[0] if len(names) == 1 else None
    return _interface_with(_own_address(), system) if backend == "gloo" else None


def _shared(channel: Channel, name: str, system: Path) -> Interface:
    mine = [name, _identity("/proc/sys/kernel/random/boot_id"), _namespace()]
    return Interface(name, channel.gather_json(mine).count(mine), system)


def _identity(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _own_address() -> str | None:
    """The address of the host's name, which is the one that Gloo takes."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _interface_with(address: str | None, system: Path) -> str | None:
    if address is None:
        return LOOPBACK if (system / LOOPBACK).is_dir() else None  # as Gloo does
    if address.startswith("127."):
        return LOOPBACK
    names = [name for _, name in socket.if_nameindex() if _address_of(name) == address]
    return names[0] if names else None


def _address_of(name: str) -> str | None:
    import fcntl  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
