"""The flags of `dlion train` about workers that come and go. Nothing here imports torch."""

from dataclasses import dataclass, fields
from typing import Any

from dlion.train.legal import require, require_count


@dataclass(frozen=True, kw_only=True)
class ElasticFlags:
    """How elastic workers find each other. A run's results do not depend on it, and a resumed run keeps it.

    Raises:
        ValueError: a value is out of range, or has no meaning without --elastic.
    """

    elastic: bool = False
    """Go on when workers die, and start them again. Needs torchft: pip install "dlion[elastic]". A run that is resumed
    stays elastic unless --no-elastic is given."""
    lighthouse: str | None = None
    """HOST:PORT of a lighthouse that runs elsewhere; this command is then one worker, whose --worker is needed, and
    whose --name all commands share. Otherwise --elastic starts a lighthouse and all workers on this machine."""
    worker: int | None = None
    """Number of this worker, from 0; only with --lighthouse."""
    min_workers: int | None = None
    """Train on while so many are there: more than half of --workers unless given."""
    patience: float = 60.0
    """Seconds to wait for a worker that lives and does not answer; one that died is noticed at once."""
    restarts: int = 10
    """How often each worker is started again. One that dies once more is given up, and the others go on."""

    def __post_init__(self) -> None:
        if not self.elastic:
            given = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
            if given:
                raise ValueError(f"--{given[0].replace('_', '-')} means nothing without --elastic: give both.")
        if (self.lighthouse is None) != (self.worker is None):
            raise ValueError("--lighthouse and --worker belong together: give both, or neither to start workers here.")
        require_count("worker", self.worker, 0)
        require_count("min_workers", self.min_workers)
        require(0 < self.patience < 1e6, "patience", self.patience, "a number of seconds above 0")
        require_count("restarts", self.restarts, 0)

    def kept(self) -> dict[str, Any]:
        """What `config.toml` of a run holds of it."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {name for name, value in given.items() if value != getattr(ElasticFlags, name)}
        return {name.replace("_", "-"): given[name] for name in given if name in changed - OF_ONE_COMMAND}


OF_ONE_COMMAND = {"lighthouse", "worker"}
KEPT = tuple(field.name.replace("_", "-") for field in fields(ElasticFlags) if field.name not in OF_ONE_COMMAND)
