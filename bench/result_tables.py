"""Put the tables of the comparisons in docs/results into the documents that show them.

    python bench/result_tables.py docs/quality.md docs/paper-results.md

A document holds marks `<!-- compare:begin NAME -->` and `<!-- compare:end NAME -->` around each table; NAME is a folder
of docs/results.
"""

import re
import sys
from pathlib import Path

from documents import fill

from dlion.train.compare.command import settle
from dlion.train.compare.folder import StudyFolder
from dlion.train.compare.results import Results
from dlion.train.compare.study import read_study
from dlion.train.compare.table import section

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"<!-- compare:begin (\S+) -->")


def table_of(name: str) -> str:
    """The tables of docs/results/NAME. Raises: ValueError when that folder holds no comparison."""
    folder = StudyFolder(ROOT / "docs" / "results" / name)
    return section(Results(settle(read_study(folder.study_file), None), folder.records()))


def main(documents: list[str]) -> int:
    try:
        for document in map(Path, documents or ["docs/quality.md"]):
            for name in MARK.findall(document.read_text(encoding="utf-8")):
                fill(document, "compare", name, table_of(name))
    except (ValueError, OSError) as error:
        print(f"result_tables.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
