"""Watches whether some worker votes against the others, or knows nothing."""

from dlion.agreement_rates import below_chance
from dlion.stats import Stats


class Watch:
    """Speaks once of each worker whose votes are what was decided no more often than those of a coin."""

    def __init__(self) -> None:
        self._named: set[int] = set()

    def look(self, stats: Stats) -> list[str]:
        """A sentence for each worker that was not spoken of before."""
        found = [rank for rank in below_chance(stats) if rank not in self._named]
        self._named.update(found)
        return [
            f"warning: worker {rank} votes for what is decided in {stats.agreement[rank]:.1%} of its votes, and in its "
            f"place a coin would in {stats.agreement_by_chance[rank]:.1%}, while most others do more often: it is "
            "broken or hostile, or its data are unlike the others'"
            for rank in found
        ]
