"""Guards that `make test` stays short: a core test that starts a process or takes long fails, and says what to do."""

import multiprocessing
import subprocess
import sys

import core
import pytest

VERSION = (sys.executable, "--version")
STARTS = {
    "a command": lambda: subprocess.run(VERSION),
    "a command behind another": lambda: subprocess.run(("nice", *VERSION)),
    "a rank": lambda: multiprocessing.get_context("forkserver").Process(target=print).start(),
}


@pytest.mark.parametrize("what", STARTS)
def test_a_core_test_starts_no_process(what: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="mark this one `processes`"):
        STARTS[what]()


def test_it_may_ask_a_tool() -> None:
    assert subprocess.run(["true"]).returncode == 0


@pytest.mark.processes
def test_a_test_with_the_marker_does() -> None:
    assert subprocess.run(VERSION, capture_output=True).returncode == 0


def test_a_core_test_takes_no_longer_than_it_has() -> None:
    with pytest.raises(pytest.fail.Exception, match="make it faster or mark it `slow`"), core.bounds(seconds=0.0):
        sum(range(1000))


def test_only_tests_of_the_core_are_held_to_it(request: pytest.FixtureRequest) -> None:
    assert core.is_core(request.node)


@pytest.mark.wide(3)
@pytest.mark.parametrize("case", range(7))
def test_of_a_wide_test_the_core_takes_one_of_every_so_many(case: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("slow") is None) == (case % 3 == 0)
