"""`dlion plan` from its flags to its tables and files."""

import json
from pathlib import Path

from dlion.train.plan.result import result_of
from dlion.train.plan.settings import PlanConfig
from dlion.train.plan.sources import settled, sizes_of
from dlion.train.plan.table import show

FIGURES, PAGE = "plan.json", "index.html"


def run(config: PlanConfig, out: Path | None) -> int:
    """Show the plan; write plan.json and index.html into `out` if it is given.

    Raises:
        ValueError: a mistake of the user, in one sentence; nothing was written.
    """
    if out is not None and any((out / name).exists() for name in (FIGURES, PAGE)):
        raise ValueError(f"--out {out} holds a plan already: give another folder, or delete that one.")
    config = settled(config)
    result = result_of(config, sizes_of(config))
    if out is not None:
        from dlion.train.plan.page import page_of  # it needs matplotlib, which takes a second to load
        from dlion.train.runs import write_whole

        page = page_of(result)
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / FIGURES, (json.dumps(result, indent=2, allow_nan=False) + "\n").encode())
        write_whole(out / PAGE, page)
    show(result)
    if out is not None:
        print(f"\nwritten: {out / FIGURES} and {out / PAGE}")
    return 0
