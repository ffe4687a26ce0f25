"""The folder of a measurement: bench.json and index.html, written whole or not at all."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlion.train.bench.page import page_of
from dlion.train.runs import first_free, write_whole

RUNS = Path("bench-runs")


@dataclass(frozen=True)
class BenchFolder:
    """Where rank 0 writes."""

    path: Path

    @classmethod
    def claim(cls, out: Path | None, stem: str) -> "BenchFolder":
        """Make the folder `out`; None takes the first free `stem[-k]` in bench-runs.

        Raises:
            ValueError: `out` holds a measurement already.
        """
        if out is None:
            RUNS.mkdir(exist_ok=True)
            return cls(first_free(RUNS, stem))
        folder = cls(out)
        if folder.figures.exists() or folder.page.exists():
            raise ValueError(f"--out {out} holds a measurement already: give another folder, or delete that one.")
        out.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def figures(self) -> Path:
        """What was measured."""
        return self.path / "bench.json"

    @property
    def page(self) -> Path:
        """The same for readers."""
        return self.path / "index.html"

    @property
    def failure_log(self) -> Path:
        """Why there is neither."""
        return self.path / "failure.log"

    def write(self, result: dict[str, Any]) -> None:
        """Write both files."""
        write_whole(self.figures, (json.dumps(result, indent=2, allow_nan=False) + "\n").encode())
        write_whole(self.page, page_of(result))

    def leave(self) -> None:
        """Remove the folder if nothing was written."""
        with suppress(OSError):
            self.path.rmdir()
