"""What a user chooses for elastic workers, checked at once."""

from dataclasses import dataclass
from typing import Any

from dlion.elastic.address import url_of
from dlion.elastic.rounds import Patience
from dlion.methods import METHODS
from dlion.options import LONGEST_TIMEOUT
from dlion.quoting import shown
from dlion.settings import LARGEST, number, whole

MOST_WORKERS = 1_000_000  # six digits of a worker's number are in the name that the lighthouse knows it by
SHORTEST = 0.001  # seconds: what the network library can wait for


@dataclass(frozen=True)
class Terms:
    """Who this worker is, and when it trains with whom; as described at `dlion.elastic.Elastic`.

    Attributes:
        lighthouse: as `url_of` returns it.
    """

    lighthouse: str
    worker: int
    workers: int
    min_workers: int
    quorum_every: int
    patience: Patience

    @staticmethod
    def checked(
        lighthouse: str,
        worker: int,
        workers: int,
        min_workers: int | None,
        quorum_every: int,
        patience: Patience,
    ) -> "Terms":
        """The terms, or a ValueError for the first that is out of range."""
        url = url_of(lighthouse)
        if not whole(workers, 1, MOST_WORKERS) or not whole(worker, 0, workers - 1):
            raise ValueError(
                f"worker={shown(worker)} of workers={shown(workers)}: workers must be from 1 to {MOST_WORKERS:,}, and "
                "worker from 0 to workers - 1"
            )
        if min_workers is None:
            min_workers = workers // 2 + 1
        if not whole(min_workers, 1, workers):
            raise ValueError(f"min_workers={shown(min_workers)} must be a whole number from 1 to workers={workers}")
        if not whole(quorum_every, 1):
            raise ValueError(f"quorum_every={shown(quorum_every)} must be a whole number of steps, 1 to {LARGEST:,}")
        for name, seconds, least in (
            ("timeout", patience.call, SHORTEST),
            ("quorum_timeout", patience.quorum, SHORTEST),
            ("start_timeout", patience.start, 0),
        ):
            if not number(seconds, least, LONGEST_TIMEOUT):
                raise ValueError(
                    f"{name}={shown(seconds)} must be a number of seconds, {least:g} or more and below "
                    f"{LONGEST_TIMEOUT:.0e}"
                )
        return Terms(url, worker, workers, min_workers, quorum_every, patience)


def check_elastic(method: str, options: dict[str, Any]) -> None:
    """Raise a ValueError for options of `Distributed` that elastic workers cannot have."""
    if method in METHODS and "overlap" not in METHODS[method].options:
        able = ", ".join(name for name, how in METHODS.items() if "overlap" in how.options)
        raise ValueError(
            f"method={method!r} asks all workers before its ballots can be written, and elastic workers keep ballots: "
            f"choose one of {able}"
        )
    if options.get("overlap"):
        raise ValueError("overlap=True has no meaning for elastic workers, who vote in step() alone: leave it out")
    if options.get("process_group") is not None:
        raise ValueError("process_group has no meaning for elastic workers, who make their own: leave it out")
    if options.get("nonfinite") == "raise":
        raise ValueError(
            "nonfinite='raise' would end all workers for one: use 'abstain' or 'skip' with elastic workers"
        )
