"""Bytes of one worker: by the formula of the wire, of TCP/IP headers, and on a network interface."""

from dataclasses import dataclass
from pathlib import Path

# Of every packet of a stream: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12.
HEADER_BYTES = 66
SEGMENT_BYTES = 1448  # what of an MTU of 1500 is left for the stream
# Header bytes per byte of payload where every worker sends as much as it receives. Least: every packet is full and
# acknowledgements ride on data. Most: every packet is answered by one of its own that only acknowledges.
HEADERS_LEAST = HEADER_BYTES / SEGMENT_BYTES
HEADERS_MOST = 2 * HEADER_BYTES / SEGMENT_BYTES


def formula_bytes(workers: int, vote: str, parameters: int) -> float:
    """Bytes that one worker sends (and receives) in one step: one bit up, and the verdict's bits down.

    `(N-1)/(8N) * (1 + k)` for each parameter, k = 1 for a majority, `ceil(log2(N+1))` for an average.
    """
    down = {"majority": 1, "average": workers.bit_length()}[vote]
    return (workers - 1) / (8 * workers) * (1 + down) * parameters


@dataclass(frozen=True)
class Counters:
    """Of one interface since it was made."""

    sent: int
    received: int
    packets_sent: int
    packets_received: int
    segments_repeated: int  # by TCP, of the whole namespace

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(
            self.sent - other.sent,
            self.received - other.received,
            self.packets_sent - other.packets_sent,
            self.packets_received - other.packets_received,
            self.segments_repeated - other.segments_repeated,
        )


def counters(interface: str) -> Counters:
    """Read the interface's counters in this process's namespace."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = [int(number) for number in numbers.split()]
            return Counters(fields[8], fields[0], fields[9], fields[1], _segments_repeated())
    raise LookupError(f"there is no interface {interface} here")


def _segments_repeated() -> int:
    """What TCP has sent again. On a busy machine it takes a receiver that has to wait for a core for a lost packet."""
    names, values = [
        line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line[:4] == "Tcp:"
    ]
    return int(values[names.index("RetransSegs")])
