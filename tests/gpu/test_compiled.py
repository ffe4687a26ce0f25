"""The code that Triton makes of the kernels, for GPUs that are not here: it moves 16 bytes at a time, keeps everything
in registers, and rounds every product and every sum.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "compiled.py"

pytestmark = pytest.mark.timeout(600)  # 50 s of the processor, on machines that do other work


def facts_of(target: str, part: int, parts: int, folder: Path) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, str(SCRIPT), target, str(part), str(parts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module", params=["80", "90"])
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    found = facts_of(request.param, 0, 1, tmp_path_factory.mktemp("triton"))
    assert len(found) > 40
    yield found


def test_what_lies_at_16_bytes_moves_16_bytes_at_a_time(facts: list[dict[str, Any]]) -> None:
    for each in facts:
        wanted = each["moved"]
        widest = {name: number for name, number in each["instructions"].items() if name.endswith(".128")}
        assert widest.get("LDG.E.128", 0) == wanted["loads"], each["kernel"]
        assert widest.get("STG.E.128", 0) == wanted["stores"], each["kernel"]
        assert sum(each["vectors"].values()) >= wanted["loads"] + wanted["stores"], each["kernel"]


def test_nothing_spills_and_nothing_lies_in_local_memory(facts: list[dict[str, Any]]) -> None:
    for each in facts:
        assert not any(each["stack"]) and not each["local"], each["kernel"]
        assert not any(name.startswith(("LDL", "STL")) for name in each["instructions"]), each["kernel"]


def test_no_product_is_fused_with_a_sum_and_no_denormal_is_flushed(facts: list[dict[str, Any]]) -> None:
    for each in facts:
        assert not each["fused"] and not each["flushing"], each["kernel"]
        assert set(each["divisions"]) <= {"div.rn.f64"}, each["kernel"]
        fused = any(name.startswith(("FFMA", "DFMA")) for name in each["instructions"])
        assert each["divisions"] or not fused, each["kernel"]


def most_instructions(kernel: str) -> float:
    """A little above what is: what doubles, fails. Each plane of a verdict adds some."""
    if kernel.startswith("ballot"):
        return 44 if "MOMENTUM=bf16" in kernel else 32
    planes = int(kernel.split("PLANES=")[1].split()[0])
    if "STOCHASTIC=True" in kernel:
        return (26 if "PARAM=bf16" in kernel else 38) + 3 * (planes - 1)
    return (18 if "PARAM=bf16" in kernel else 12) + 3 * (planes - 1)


def test_a_whole_chunk_takes_few_instructions_an_element(facts: list[dict[str, Any]]) -> None:
    counted = [each for each in facts if "element" in each]
    assert len(counted) > 20
    for each in counted:
        kernel, element, executed = each["kernel"], each["element"], each["executed"]
        assert executed["LDG.E.128"] == each["moved"]["loads"] * each["turns"], kernel  # the way that was to be counted
        assert executed["STG.E.128"] == each["moved"]["stores"] * each["turns"], kernel
        products = 5 + ("MOMENTUM=bf16" in kernel) if kernel.startswith("ballot") else 1
        assert element["products"] == products + (kernel.startswith("apply PARAM=fp16") and "=True" in kernel), kernel
        assert element["instructions"] < most_instructions(kernel), (kernel, element)


def test_amd_gpus_get_kernels_too(tmp_path: Path) -> None:
    for each in facts_of("gfx942", 0, 12, tmp_path):
        assert each["text"] and not each["fused"], each["kernel"]
