"""How fast the CPU kernels are, against memory and against torch's fused AdamW, in one run.

    python bench/kernels.py                     # 32 million float32 parameters, one thread
    python bench/kernels.py --params 10e6 --threads 2 --dtype bfloat16 --json kernels.json

Everything is measured in turn, `--rounds` times over, each run once before it is timed so that what it allocates is
there, as in a training's second step; medians are reported, and ratios of medians, with the target where there is one.
Bytes are those that must move: a ballot of float32 reads gradient and momentum and writes momentum and a bit, 12.1 per
parameter. Ballots and tallies go bucket by bucket, as in a step. Steps of many small tensors are measured last, on four
processes, see small_tensors.py.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import small_tensors
import torch
from torch import Tensor

from dlion.ops import choose, library, reference

BUCKET = 2**23  # elements of a bucket of 1 MiB, the default
TENSOR = 2**20  # elements of each tensor
WORKERS = 4
MANY = 64  # voters of the tallies by themselves

TARGETS = {
    "ballot + apply / fused AdamW": "<= 0.78",
    "ballot + apply, bf16 momentum / fused AdamW": "<= 0.70",
    "rate of ballot / m.add_(g)": ">= 0.90",
    "rate of apply / p.mul_(c)": ">= 0.90",
    f"tally of {MANY} ballots of a shard / ballot": "<= 0.05",
    f"tally of {MANY} ballots of all / ballot": "<= 1.0",
    small_tensors.RATIO: "<= 1.6",
}


@dataclass(frozen=True)
class Measured:
    """Median seconds of one thing, and the rate that its bytes make."""

    seconds: float
    fastest: float
    gigabytes_per_second: float | None


class Model:
    """Parameters, gradients and momenta as many tensors, and the buckets they fall into."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        count = max(1, round(numel / TENSOR))
        self.numel = count * TENSOR
        self.params = [torch.nn.Parameter(torch.randn(TENSOR).to(dtype)) for _ in range(count)]
        self.momenta = [torch.randn(TENSOR) for _ in range(count)]
        self.narrow = [momentum.bfloat16() for momentum in self.momenta]
        for param in self.params:
            param.grad = torch.randn(TENSOR).to(dtype)
        per_bucket = BUCKET // TENSOR
        self.buckets = [range(k, min(k + per_bucket, count)) for k in range(0, count, per_bucket)]

    def ballots(self, kernels: object, momenta: list[Tensor]) -> None:
        for bucket in self.buckets:
            self.ballot(kernels, bucket, momenta)

    def ballot(self, kernels: object, bucket: range, momenta: list[Tensor]) -> Tensor:
        grads = [self.params[k].grad for k in bucket]
        momenta = [momenta[k] for k in bucket]
        offsets = [k * TENSOR for k in range(len(bucket))]
        first = bucket.start * TENSOR // 64
        size = len(bucket) * TENSOR
        words, _ = kernels.ballot(  # type: ignore[attr-defined]
            grads, momenta, offsets, [0] * len(bucket), size, [0.9], [0.99], [False], first, 3, 0, "balanced"
        )
        return words  # type: ignore[no-any-return]

    def apply(self, kernels: object, bucket: range, verdict: Tensor, rounding: str) -> None:
        offsets = [k * TENSOR for k in range(len(bucket))]
        params = [self.params[k] for k in bucket]
        kernels.apply(  # type: ignore[attr-defined]
            params, verdict, offsets, [0] * len(bucket), [-1e-6, 1e-6], [1 - 1e-6], rounding, 0, 3, 0
        )


def random_words(*shape: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape)


def subjects(model: Model, rounding: str, kernels: object) -> dict[str, tuple[Callable[[], object], float | None]]:
    """name -> (what to time, bytes that it moves)."""
    d, width = model.numel, model.params[0].element_size()
    words = d // 64
    verdicts = [random_words(1, len(bucket) * TENSOR // 64) for bucket in model.buckets]
    voices = [random_words(WORKERS, verdict.shape[1] // WORKERS) for verdict in verdicts]
    few = random_words(MANY, words // MANY)
    many = [random_words(MANY, verdict.shape[1]) for verdict in verdicts]
    adamw = torch.optim.AdamW(model.params, lr=1e-6, fused=True)
    source, target = torch.randn(d), torch.randn(d)

    def apply() -> None:
        for bucket, verdict in zip(model.buckets, verdicts, strict=True):
            model.apply(kernels, bucket, verdict, rounding)

    def whole() -> None:
        for bucket, votes in zip(model.buckets, voices, strict=True):
            model.ballot(kernels, bucket, model.momenta)
            shard = kernels.tally_majority(votes, 0, 3, "rotate")  # type: ignore[attr-defined]
            model.apply(kernels, bucket, shard.repeat(WORKERS)[None], rounding)

    def tally(votes: list[Tensor]) -> None:
        for each in votes:
            kernels.tally_majority(each, 0, 3, "rotate")  # type: ignore[attr-defined]

    return {
        "copy": (lambda: target.copy_(source), 8.0 * d),
        "add": (lambda: target.add_(source), 12.0 * d),
        "mul": (lambda: target.mul_(0.999999), 8.0 * d),
        "ballot": (lambda: model.ballots(kernels, model.momenta), (8 + width + 1 / 8) * d),
        "ballot, bf16 momentum": (lambda: model.ballots(kernels, model.narrow), (4 + width + 1 / 8) * d),
        "apply": (apply, (2 * width + 1 / 8) * d),
        "tally of a shard": (lambda: tally([few]), (MANY + 1) * d / MANY / 8),
        "tally of all": (lambda: tally(many), (MANY + 1) * d / 8),
        "ballot + tally + apply": (whole, None),
        "fused AdamW": (adamw.step, (2 * width + width + 2 * 2 * width) * float(d)),
    }


def measure(what: dict[str, tuple[Callable[[], object], float | None]], rounds: int) -> dict[str, Measured]:
    taken: dict[str, list[float]] = {name: [] for name in what}
    with torch.no_grad():
        for _ in range(rounds + 1):
            for name, (run, _) in what.items():
                run()
                start = time.perf_counter()
                run()
                taken[name].append(time.perf_counter() - start)
    results = {}
    for name, (_, nbytes) in what.items():
        times = taken[name][1:]  # the first round touches memory and starts threads
        median = statistics.median(times)
        results[name] = Measured(median, min(times), nbytes / median / 1e9 if nbytes else None)
    return results


def ratios(found: dict[str, Measured]) -> dict[str, float]:
    """Of medians; rates are bytes that must move over seconds."""
    seconds = {name: one.seconds for name, one in found.items()}
    rate = {name: one.gigabytes_per_second or 0.0 for name, one in found.items()}
    return {
        "ballot + tally + apply / fused AdamW": seconds["ballot + tally + apply"] / seconds["fused AdamW"],
        "ballot + apply / fused AdamW": (seconds["ballot"] + seconds["apply"]) / seconds["fused AdamW"],
        "ballot + apply, bf16 momentum / fused AdamW": (seconds["ballot, bf16 momentum"] + seconds["apply"])
        / seconds["fused AdamW"],
        "rate of ballot / m.add_(g)": rate["ballot"] / rate["add"],
        "rate of apply / p.mul_(c)": rate["apply"] / rate["mul"],
        "rate of ballot / copy": rate["ballot"] / rate["copy"],
        "rate of apply / copy": rate["apply"] / rate["copy"],
        f"tally of {MANY} ballots of a shard / ballot": seconds["tally of a shard"] / seconds["ballot"],
        f"tally of {MANY} ballots of all / ballot": seconds["tally of all"] / seconds["ballot"],
        f"ballot + tally + apply at N={WORKERS}, reference / these": seconds["the same, reference"]
        / seconds["ballot + tally + apply"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=32e6, help="about so many, in tensors of 2**20")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--rounding", choices=("nearest", "stochastic"), default="nearest")
    parser.add_argument("--kernels", choices=("auto", "reference", "native"), default="auto")
    parser.add_argument("--path", choices=library.PATHS, default="auto", help="instruction set of the native kernels")
    parser.add_argument("--no-steps", action="store_true", help="leave out the steps of small tensors")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    name, kernels = choose(options.kernels)
    if name == "native":
        library.use_path(options.path)
        name = f"native ({library.path()})"
    model = Model(int(options.params), getattr(torch, options.dtype))
    print(f"{name}, {model.numel:,} {options.dtype} parameters, {options.threads} threads, {options.rounds} rounds")
    found = measure(subjects(model, options.rounding, kernels), options.rounds)
    slow = subjects(model, options.rounding, reference)  # apart: it leaves nothing in the caches
    found |= {"the same, reference": measure({"reference": slow["ballot + tally + apply"]}, 2)["reference"]}
    for subject, one in found.items():
        rate = f"{one.gigabytes_per_second:7.2f} GB/s" if one.gigabytes_per_second else ""
        print(f"  {subject:24}{one.seconds * 1e3:10.2f} ms {rate}")
    compared = ratios(found)
    if not options.no_steps:
        compared |= small_tensors.ratios(options.kernels)
    for subject, ratio in compared.items():
        target = f"   target {TARGETS[subject]}" if subject in TARGETS else ""
        print(f"  {subject:58}{ratio:8.3f}{target}")
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items()} | {
            "used": name,
            "torch": torch.__version__,
        }
        figures = {subject: asdict(one) for subject, one in found.items()}
        options.json.write_text(json.dumps({"settings": settings, "figures": figures, "ratios": compared}, indent=2))


if __name__ == "__main__":
    main()
