"""What a core test may do: `make test` runs those that carry no marker, and has five minutes for all of them."""

import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

FOLDERS = (Path(__file__).parent, Path(__file__).parent / "train")
LEFT_OUT = ("processes", "slow")
SECONDS = 15.0  # of the processor, which other work hardly lengthens: three times what the longest takes


def is_core(item: pytest.Item) -> bool:
    return item.path.parent in FOLDERS and not any(item.get_closest_marker(name) for name in LEFT_OUT)


def thin_out(items: Sequence[pytest.Item]) -> None:
    """Of a `wide` test, a matrix of many cases, leave one of every so many to the core, and mark the others `slow`."""
    seen: Counter[str] = Counter()
    for item in items:
        if wide := item.get_closest_marker("wide"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % wide.args[0]:
                item.add_marker("slow")
            seen[test] += 1


@contextmanager
def bounds(seconds: float = SECONDS) -> Iterator[None]:
    """Fail what starts Python in a process of its own, or takes more than `seconds` of the processor."""
    begin = time.process_time()
    popen = subprocess.Popen.__init__

    def start(process: Any, command: Any, *args: Any, **options: Any) -> None:
        words = command.split() if isinstance(command, str) else command
        if any(Path(str(word)).name.startswith("python") for word in words):  # behind `ip netns exec` and others too
            refuse()
        popen(process, command, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", start)
        patch.setattr(BaseProcess, "start", refuse)
        yield
    if (taken := time.process_time() - begin) > seconds:
        pytest.fail(
            f"{taken:.1f} s of the processor, and a core test has {seconds:.0f}: make it faster or mark it `slow`"
        )


def refuse(*_: Any) -> None:
    pytest.fail("a core test starts no process of Python: mark this one `processes`, and `make test-all` runs it")
