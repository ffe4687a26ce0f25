"""Does an installed dlion work where there is nothing but torch? Run by scripts/smoke.sh, outside of the clone.

Two processes train over Gloo with the compiled kernels: replicas stay equal, the loss falls, bytes are the formula's.
"""

import hashlib
import importlib.metadata
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

STEPS, PARAMETERS = 50, 64 * 128 + 128 + 128 * 8 + 8
IMPORT_LIMIT = 0.150  # seconds beyond torch's own
EXTRAS = ("cyclopts", "numpy", "matplotlib", "rich")


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Without numpy, which is not there."""
    return bytes(tensor.detach().contiguous().view(torch.uint8).flatten().tolist())


def train(rank: int, folder: str) -> None:
    import dlion

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    model = dlion.local_gradients(model)
    optimizer = dlion.DistributedLion(model.named_parameters(), lr=3e-3, kernels="native")
    target, losses = torch.arange(8), []
    for _ in range(STEPS):
        inputs = torch.randn(8, 64) + 3 * torch.eye(8, 64)
        loss = nn.functional.cross_entropy(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = hashlib.sha256(b"".join(as_bytes(p) for p in model.parameters())).hexdigest()
    Path(folder, f"replica-{rank}").write_text(state)
    first, last = statistics.mean(losses[:5]), statistics.mean(losses[-5:])
    stats = optimizer.stats
    assert last < 0.7 * first, f"the loss went from {first} to {last}"
    assert stats.parameters_exchanged == STEPS * PARAMETERS, stats
    # two workers: half of the ballots to the other, half of the verdict back, with two headers in each bucket
    assert 1 <= stats.bits_per_param_sent < 1.2, stats
    if rank == 0:
        print(f"trained: loss {first:.2f} to {last:.2f}, {stats.bits_per_param_sent:.3f} bits per parameter sent")
    dist.destroy_process_group()


def fastest_path() -> str:
    """The kernels that this processor can run, by what Linux says of it."""
    (flags,) = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")}
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(flags.split()):
        return "avx512"
    return "avx2" if "avx2" in flags.split() else "portable"


def seconds_to_import() -> float:
    """Of `dlion` with its optimizer, after torch; the shortest of several, in processes of their own."""
    script = (
        "import time, torch; t = time.perf_counter(); from dlion import DistributedLion; print(time.perf_counter() - t)"
    )
    times = [subprocess.run([sys.executable, "-c", script], check=True, capture_output=True) for _ in range(5)]
    return min(float(done.stdout) for done in times)


def main() -> None:
    import dlion
    from dlion.ops import library

    files = importlib.metadata.files("dlion") or []
    assert any(str(file) == "dlion/py.typed" for file in files), "py.typed is missing"
    assert "site-packages" in str(dlion.__file__), dlion.__file__
    there = [name for name in EXTRAS if importlib.util.find_spec(name)]
    assert not there, f"this environment has more than torch: {there}"
    assert library.path() == fastest_path(), f"kernels: {library.path()}, where the processor has {fastest_path()}"
    print(f"kernels: {library.path()}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(folder,), nprocs=2)
        assert Path(folder, "replica-0").read_text() == Path(folder, "replica-1").read_text(), "replicas differ"
    asked = subprocess.run([Path(sys.executable).with_name("dlion"), "--help"], capture_output=True, text=True)
    assert asked.returncode == 2 and "dlion[train]" in asked.stderr, (asked.returncode, asked.stderr)
    shortest = seconds_to_import()
    print(
        f"import dlion.DistributedLion: {1000 * shortest:.0f} ms beyond torch's own (at most {1000 * IMPORT_LIMIT:.0f})"
    )
    assert shortest <= IMPORT_LIMIT, shortest


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"smoke test passed in {time.monotonic() - started:.0f} s")
