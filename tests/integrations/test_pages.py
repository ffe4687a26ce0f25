"""The pages of Accelerate, Lightning and Trainer: their scripts run, and their diffs are about those scripts."""

import re
from pathlib import Path

import pytest

import scripts

pytestmark = pytest.mark.timeout(240)  # with frameworks to import, and other work on the machine
PAGES = Path(__file__).resolve().parents[2] / "docs" / "integrations"


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_the_script_of_the_page_runs(name: str, tmp_path: Path) -> None:
    page = (PAGES / f"{name}.md").read_text()
    blocks = re.findall(r"(<!-- torchrun -->\n)?```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 1 and blocks[0][0]
    code = blocks[0][1]
    script = tmp_path / "script.py"
    script.write_text(code)
    for said in scripts.run(script, tmp_path):
        assert not [text for text in said.warned if "dlion" in text]

    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    lines = diff.splitlines()
    assert sum(line.startswith("+") for line in lines) <= 5
    for line in lines:
        assert line[0] in "+- "
        assert (line[1:] in code.splitlines()) == (line[0] != "-"), line
