"""The table of docs/methods.md is what the counters say, and covers every method."""

import re
from pathlib import Path

import method_bits
import pytest
from world import succeed, world

from dlion.methods import METHODS
from dlion.settings import SETTINGS

DOCUMENT = (Path(__file__).resolve().parent.parent / "docs" / "methods.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def found() -> dict[str, method_bits.Bits]:
    def work(rank: int, group: object) -> dict[str, method_bits.Bits]:
        return {method: method_bits.measured(method, rank, group) for method in METHODS}

    return succeed(world(method_bits.WORKERS, work))[-1]


def test_the_documents_table_is_that_of_the_counters(found: dict[str, method_bits.Bits]) -> None:
    assert f"<!-- bits:begin methods -->\n{method_bits.table(found)}\n<!-- bits:end methods -->" in DOCUMENT
    assert f"{method_bits.PARAMETERS:,}" in DOCUMENT.replace("\n", " ")


# bits that travel, by arithmetic: among four workers 3/4 of everything sharded, 3 times everything relayed
BY_HAND = {
    "dlion-mavo": (0.75 * 2, 1, 1),
    "dlion-avg": (0.75 * (1 + 3), 1, 3),
    "g-lion": (48, 32, 32),
    "g-adamw": (48, 32, 32),
    "d-signum-mavo": (0.75 * 2, 1, 1),
    "d-signum-avg": (0.75 * (1 + 3), 1, 3),
    "signsgd-mavo": (0.75 * 2, 1, 1),
    "terngrad": (0.75 * (2 + 4), 2, 4),
    "graddrop": (3 * 0.04 * 64, 0.04 * 64, 4 * 0.04 * 64),
    "dgc": (3 * 0.04 * 64, 0.04 * 64, 4 * 0.04 * 64),
    "ef-signsgd": (3, 1, 4),
}


def test_counters_agree_with_arithmetic(found: dict[str, method_bits.Bits]) -> None:
    for method, (sent, up, down) in BY_HAND.items():
        bits = found[method]
        assert bits.sent == bits.received == pytest.approx(sent, rel=0.02), method
        # the survey of terngrad goes to everybody even where ballots go to a server
        assert bits.up == pytest.approx(up, rel=0.02) and bits.down == pytest.approx(down, rel=0.02), method
    matrices = [shape for shape in method_bits.BLOCK if len(shape) == 2]
    factors = sum(2 * (rows + columns) for rows, columns in matrices)
    vectors = sum(shape[0] for shape in method_bits.BLOCK if len(shape) == 1)
    powersgd = 48 * (factors + vectors) / method_bits.PARAMETERS
    assert found["powersgd"].sent == pytest.approx(powersgd, rel=0.02)


def test_every_method_and_setting_is_described() -> None:
    for method, composition in METHODS.items():
        assert f"`{method}`" in DOCUMENT.split("## What each one does")[1], method
        assert method in method_bits.SAID and composition.description
    for name in SETTINGS:
        assert re.search(rf"`{name}=", DOCUMENT), name
