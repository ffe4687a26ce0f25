"""The wire is honest: counters against the published formulas, against what the topology was given, and (in real
processes) against the loopback interface."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from world import succeed, world

import dlion
from dlion import Distributed

ELEMENTS = 1_000_000


def exchange(rank: int, group: object, method: str, **options: object) -> dict[str, float]:
    param = nn.Parameter(torch.zeros(ELEMENTS))
    opt = Distributed([param], method, process_group=group, **options)
    for step in range(2):
        param.grad = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(10 * step + rank))
        opt.step()
    stats = opt.stats
    return {
        "sent": stats.bits_per_param_sent,
        "received": stats.bits_per_param_received,
        "ratio": stats.ratio,
        "calls": stats.calls,
        "checks": stats.check_bytes_sent,
    }


@pytest.mark.wide(4)
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("method", "zeros", "planes"),
    [
        ("dlion-mavo", "balanced", lambda n: 1 + 1),
        ("dlion-mavo", "exact", lambda n: 2 + 2),
        ("dlion-avg", "balanced", lambda n: 1 + n.bit_length()),
        ("dlion-avg", "exact", lambda n: 2 + (2 * n).bit_length()),
    ],
)
def test_sharded_moves_what_the_formula_says(method: str, zeros: str, planes: object, workers: int) -> None:
    formula = planes(workers) * (workers - 1) / workers
    options = {"zeros": zeros, "topology": "sharded", "bucket_bytes": 2**16}
    for seen in succeed(world(workers, lambda r, g: exchange(r, g, method, **options))):
        assert formula <= seen["sent"] <= formula * 1.02
        assert seen["received"] == seen["sent"]
        assert seen["ratio"] == pytest.approx(64 * (workers - 1) / workers / seen["sent"])
        assert seen["calls"] == 2 * 2 * 2  # steps x buckets x (ballots, verdicts)


@pytest.mark.parametrize("workers", [2, 5])
def test_replicated_server_and_global_methods(workers: int) -> None:
    close = lambda value: pytest.approx(value, rel=0.001)  # noqa: E731  headers
    for seen in succeed(world(workers, lambda r, g: exchange(r, g, "dlion-mavo", topology="replicated"))):
        assert seen["sent"] == seen["received"] == close(workers - 1) and seen["calls"] == 2
    server, *others = succeed(world(workers, lambda r, g: exchange(r, g, "dlion-avg", topology="server")))
    assert server["sent"] == close(workers.bit_length() * (workers - 1)) and server["received"] == close(workers - 1)
    assert all(o["sent"] == close(1) and o["received"] == close(workers.bit_length()) for o in others)
    for seen in succeed(world(workers, lambda r, g: exchange(r, g, "g-adamw"))):
        assert seen["sent"] == close(64 * (workers - 1) / workers) and seen["ratio"] == close(1.0)


def test_one_worker_sends_nothing() -> None:
    seen = exchange(0, None, "dlion-mavo")
    assert seen["sent"] == seen["received"] == seen["checks"] == 0 and seen["ratio"] == 1.0


SCRIPT = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from dlion import Distributed

def interface():
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])  # bytes transmitted

def main(method, topology, elements, steps):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    param = nn.Parameter(torch.zeros(elements))
    opt = Distributed([param], method, topology=topology)
    param.grad = torch.randn(elements, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(4):  # past the agreement and the first steps' gradient hashes
        opt.step()
    dist.barrier()
    moved, counted = interface(), opt.stats.bytes_sent
    dist.barrier()  # nobody's first step is missed by who reads last
    for _ in range(steps):
        opt.step()
    dist.barrier()
    moved = interface() - moved
    dist.barrier()
    total = torch.tensor([opt.stats.bytes_sent - counted])
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(json.dumps({"interface": moved, "counters": int(total), "params": elements * steps}))
    dist.destroy_process_group()

main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
"""


def own_loopback() -> list[str]:
    """Start of a command with a loopback interface of its own, where this is allowed, so that nothing else counts."""
    enter = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try:
        allowed = subprocess.run([*enter, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    return enter if allowed else []


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/net/dev").exists(), reason="no interface counters here")
@pytest.mark.parametrize(
    ("method", "topology", "elements"), [("dlion-mavo", "sharded", 6_000_000), ("g-lion", "auto", 2_000_000)]
)
def test_counters_equal_the_loopback_interface(tmp_path: Path, method: str, topology: str, elements: int) -> None:
    """All ranks' counted bytes against what crossed the interface, TCP/IP headers and all: within 5 %."""
    if not (own := own_loopback()) and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other tests use this loopback interface: run as root, or alone with -n 0")
    script = tmp_path / "exchange.py"
    script.write_text(SCRIPT)
    command = [*own, sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    arguments = [str(script), method, topology, str(elements), "4"]
    environment = os.environ | {"PYTHONPATH": str(Path(dlion.__file__).parents[1])}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=100, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    print(seen)
    assert seen["interface"] / seen["counters"] == pytest.approx(1, abs=0.05)
    assert seen["counters"] * 8 / seen["params"] / 4 == pytest.approx(1.5 if method == "dlion-mavo" else 48, rel=0.02)
