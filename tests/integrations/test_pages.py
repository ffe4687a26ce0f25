"""The pages of frameworks: their scripts run, and what they show of scripts is in those."""

import re
from pathlib import Path

import pytest

import scripts

pytestmark = pytest.mark.timeout(240)  # with frameworks to import, and other work on the machine
RANKS = {"accelerate": 2, "fsdp2": 4, "lightning": 2, "transformers": 2}
ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "integrations"


@pytest.mark.parametrize("name", RANKS)
def test_the_script_of_the_page_runs(name: str, tmp_path: Path) -> None:
    page = (PAGES / f"{name}.md").read_text()
    blocks = re.findall(r"(<!-- torchrun -->\n)?```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 1 and blocks[0][0]
    code = blocks[0][1]
    script = tmp_path / "script.py"
    script.write_text(code)
    for said in scripts.run(script, tmp_path, size=RANKS[name]):
        assert not [text for text in said.warned if "dlion" in text]
    check_diff(page, code)


def test_the_page_of_ray_is_about_its_example() -> None:
    page, code = (PAGES / "ray.md").read_text(), (ROOT / "examples/with_ray.py").read_text()
    check_diff(page, code)
    shown = re.findall(r"(?:^    (?!pip).*\n)+", page, re.MULTILINE)
    assert len(shown) == 2
    for block in shown:
        assert unindented(block) in unindented(code)


def test_the_page_of_torchtitan_is_about_its_example() -> None:
    check_diff((PAGES / "torchtitan.md").read_text(), (ROOT / "examples/with_torchtitan.py").read_text())


def unindented(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


def check_diff(page: str, code: str) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    lines = diff.splitlines()
    assert sum(line.startswith("+") for line in lines) <= 5
    for line in lines:
        assert line[0] in "+- "
        assert (line[1:] in code.splitlines()) == (line[0] != "-"), line
