"""torchrun with two nodes on this machine, one of which is killed: training goes on from the last checkpoint."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from command import await_step, end_with_tests, environment, records

pytestmark = pytest.mark.processes


def node(folder: Path, port: int, name: str, nodes: str) -> "subprocess.Popen[str]":
    """A launcher with one worker, at a rendezvous that this test keeps."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", name]
    timeouts = ["--rdzv-conf", "is_host=0,last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=3"]
    local = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", "127.0.0.1"]
    launch = ["-m", "torch.distributed.run", *local, *rendezvous, *timeouts, "--monitor-interval", "0.1"]
    run = ["-m", "dlion", "train", "--batch-size", "4", "--device", "cpu", "--log-every", "1", "--save-every", "4"]
    return subprocess.Popen(
        [sys.executable, *launch, *run, "--steps", "60", "--eval-every", "100", "--name", "run"],
        cwd=folder,
        env=environment() | {"GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_tests,
    )


def descendants(pid: int) -> list[int]:
    """Process ids below a process, youngest last."""
    below = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return below + [deeper for one in below for deeper in descendants(one)]


@pytest.mark.parametrize("lost", ["worker", "node"])
def test_what_torchrun_starts_again_goes_on_from_the_checkpoint(lost: str, tmp_path: Path) -> None:
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = [node(tmp_path, rendezvous.port, lost, "2" if lost == "worker" else "1:2") for _ in range(2)]
    try:
        ready, _, _ = select.select([one.stdout for one in nodes], [], [], 100)
        speaks = nodes[0] if nodes[0].stdout in ready else nodes[1]  # rank 0 alone says anything
        other = nodes[1] if speaks is nodes[0] else nodes[0]
        await_step(speaks, 6)
        workers = descendants(other.pid)
        for pid in workers[-1:] if lost == "worker" else [other.pid, *workers]:
            os.kill(pid, signal.SIGKILL)
        living = nodes if lost == "worker" else [speaks]
        ended = [one.communicate(timeout=100) for one in living]
        assert [one.returncode for one in living] == [0] * len(living), ended
        assert "resumed after step" in "".join(output for output, _ in ended)
        run = tmp_path / "runs" / "run"
        assert [record["step"] for record in records(run)] == list(range(61))
        assert json.loads((run / "summary.json").read_text())["workers"] == len(living)
    finally:
        for one in nodes:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.communicate()
