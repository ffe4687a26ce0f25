"""The script of docs/elastic.md runs as written: each worker a process, at a lighthouse."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("RUST_LOG", "error")
pytest.importorskip("torchft", reason="elastic workers need torchft: pip install -r requirements/elastic.txt")

from dlion.elastic.quorum import LighthouseServer

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parent.parent


def ended(folder: Path, address: str) -> list[str]:
    """What two workers said, who trained to the end."""
    here = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "script.py", address, number, "2"],
            cwd=folder,
            env=here,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in ("0", "1")
    ]
    try:
        said = [worker.communicate(timeout=110)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    return said


@pytest.mark.timeout(240)  # four processes that import torch
def test_the_script_of_the_documentation_trains_and_goes_on(tmp_path: Path) -> None:
    (code,) = re.findall(r"<!-- elastic -->\n```python\n(.*?)```", (ROOT / "docs/elastic.md").read_text(), re.DOTALL)
    (tmp_path / "script.py").write_text(code)
    for begun in (0, 100):
        server = LighthouseServer(2)
        try:
            said = ended(tmp_path, server.address)
        finally:
            server.close()
        for number, text in enumerate(said):
            assert f"worker {number}: begins after step {begun}\n" in text
            (loss,) = re.findall(rf"^worker {number}: loss (\d+\.\d+) after 200 steps$", text, re.MULTILINE)
            assert float(loss) < 2.0  # some 20 at the start
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["100", "200"]
        shutil.rmtree(tmp_path / "checkpoints" / "200")
