"""How long a worker's own arithmetic takes: nanoseconds for each parameter, by default as measured of the
kernels (bench/results/kernels, medians: one thread of an AMD EPYC, float32, memory that copies at 37.0 GB/s).
"""

from dataclasses import dataclass, fields, replace

MEASURED_COPY = 37.0  # GB/s, read and written
NS = 1e-9


@dataclass(frozen=True)
class Rates:
    """Nanoseconds for each parameter.

    Attributes:
        ballot, apply: of the fused kernels.
        tally: of one ballot.
        generic: ballot, tally of 4 and apply of a vote that has no fused kernels.
        adamw: torch's fused AdamW.
        copy: read and write float32.
    """

    ballot: float = 0.2535
    tally: float = 0.0056
    apply: float = 0.1596
    generic: float = 15.2
    adamw: float = 0.506
    copy: float = 0.220

    def at(self, gigabytes_per_s: float) -> "Rates":
        """On memory that copies at another rate: all of these read and write memory, and do little else."""
        factor = MEASURED_COPY / gigabytes_per_s
        return self.slowed(factor)

    def slowed(self, factor: float) -> "Rates":
        """Everything takes `factor` times as long, as where several workers share a core."""
        return replace(self, **{field.name: factor * getattr(self, field.name) for field in fields(self)})

    def copied(self, nbytes: float) -> float:
        """Seconds to read and write so many bytes, together."""
        return nbytes / 8 * self.copy * NS
