"""What a user chooses for elastic workers, checked at once."""

from dataclasses import dataclass
from typing import Any

from dlion.elastic.address import url_of
from dlion.elastic.rounds import Patience
from dlion.methods import METHODS


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
        if workers < 1 or not 0 <= worker < workers:
            raise ValueError(
                f"worker={worker!r} of workers={workers!r}: workers must be 1 or more, and worker from 0 to workers - 1"
            )
        if min_workers is None:
            min_workers = workers // 2 + 1
        if not 1 <= min_workers <= workers:
            raise ValueError(f"min_workers={min_workers!r} must be between 1 and workers={workers}")
        if quorum_every < 1:
            raise ValueError(f"quorum_every={quorum_every!r} must be 1 or more")
        for name, seconds in (("timeout", patience.call), ("quorum_timeout", patience.quorum)):
            if seconds <= 0:
                raise ValueError(f"{name}={seconds!r} must be a number of seconds above 0")
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
