"""What is kept of a run that failed."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Failure:
    """Who failed first ("rank 3"), why (without a full stop), and all that it said of it."""

    who: str
    cause: str
    details: str

    def keep(self, log: Path) -> str:
        """Add everything to `log`, which keeps what was there; where to find it, for readers."""
        text = f"{self.who}: {self.cause}\n\n{self.details.rstrip()}\n\n"
        try:
            with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError as problem:  # the folder is gone or its disk full: often the reason itself
            return f"{log} could not be written: {problem.strerror}"
        return f"more in {log}"
