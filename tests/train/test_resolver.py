"""Local ranks look up no host name: a fork taken during a look-up in the launcher leaves the resolver locked, and a
rank was seen to hang for ever in its first look-up.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dlion

pytestmark = pytest.mark.processes

# A machine without any name: a network of its own, an empty hosts file, no name servers.
NAMELESS = """
ip link set lo up
for file in /etc/hosts /etc/resolv.conf; do mount --bind "$1/empty" $file || exit 99; done
shift
exec "$@"
"""


def nameless(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "empty").touch()
    enter = ["unshare", "--net", "--mount", "sh", "-c", NAMELESS, "sh", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(dlion.__file__).parents[1])}
    return subprocess.run(
        [*enter, *command], capture_output=True, text=True, check=False, env=environment, cwd=folder, timeout=60
    )


def test_local_ranks_need_no_names(tmp_path: Path) -> None:
    try:
        allowed = nameless(tmp_path, "true").returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this user may not make a network namespace")
    lookup = nameless(tmp_path, sys.executable, "-c", "import socket; socket.getaddrinfo('localhost', 1)")
    assert lookup.returncode != 0, "names still resolve, so this test would see nothing"
    trained = nameless(tmp_path, sys.executable, "-m", "dlion", "train", "--steps", "2", "--workers", "2")
    assert trained.returncode == 0, trained.stderr
