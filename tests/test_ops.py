"""The reference kernels as torch operators, their odd sizes, and equal bits whatever the processor's capabilities."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dlion
from dlion import ops
from dlion.ops import bits, reference

SIZES = [0, 1, 63, 64, 65, 1000]


def random_words(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)


def arguments() -> dict[str, tuple[object, ...]]:
    """Small valid arguments of every operator."""
    values = torch.randn(128, generator=torch.Generator().manual_seed(1))
    ternary = torch.stack([reference.pack_ternary(values.roll(k)) for k in range(4)])
    return {
        "lion_message": (values, values.flip(0).bfloat16(), 0.9, 0.99, 5, 3, 1),
        "pack_signs": (values, 5, 3, 1),
        "pack_ternary": (values,),
        "tally_majority": (random_words(4, 2), 5, 3, "rotate"),
        "tally_majority_ternary": (ternary, 5, 3, "rotate"),
        "tally_count": (random_words(4, 2), 3),
        "tally_count_ternary": (ternary, 4),
        "ballot": (
            [values, None, values[:70].bfloat16()],
            [values.flip(0).clone(), values[:3].clone(), values[2:72].bfloat16()],
            [0, 128, 192],
            [0, 1, 1],
            320,
            [0.9, 0.95],
            [0.99, 0.98],
            [False, True],
            5,
            3,
            1,
            "balanced",
        ),
        "apply": (
            [values.clone(), values[:70].half()],
            random_words(2, 4),
            [0, 128],
            [0, 1],
            [-0.1, 0.1, 0.2, 0.3] * 2,
            [0.99, 1.0],
            "stochastic",
            5,
            3,
            7,
        ),
        "hashed": (values, 3),
    }


@pytest.mark.parametrize("name", arguments())
def test_operators_satisfy_torch_library(name: str) -> None:
    given = arguments()[name]
    torch.library.opcheck(getattr(torch.ops.dlion, name).default, given)


def test_every_schema_has_an_example_and_what_has_no_other_kernel_is_the_reference() -> None:
    assert set(arguments()) == {schema.split("(")[0] for schema in ops.SCHEMAS}
    message = torch.randn(64)
    assert torch.equal(torch.ops.dlion.pack_signs(message, 0, 0, 0), reference.pack_signs(message, 0, 0, 0))


def test_an_unknown_kernel_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kernels='cuda' is unknown: choose one of auto, reference, native"):
        ops.choose("cuda")
    assert ops.choose("reference") == ("reference", reference)


@pytest.mark.parametrize("words", [0, 1, 2, 33])
def test_pack_and_unpack_are_inverse(words: int) -> None:
    packed = random_words(words)
    assert torch.equal(bits.pack(bits.unpack(packed).bool()), packed)
    assert bits.unpack(torch.tensor([1 << 5 | -(2**63)])).nonzero().view(-1).tolist() == [5, 63]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_message_masks_what_is_not_finite(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    grad = torch.randn(size, generator=generator).to(dtype)
    momentum = torch.randn(size, generator=generator, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    grad[::7] = float("nan")
    grad[3::7] = float("-inf")
    before = momentum.clone()
    message, finite = reference.lion_message(grad, momentum, 0.9, 0.99, 0, 0, 0)
    good = grad.isfinite()
    assert bool(finite) == bool(good.all()) == (size == 0)
    assert torch.equal(momentum[~good], before[~good]) and bool((message[~good] == 0).all())
    wide = grad.to(momentum.dtype)[good]
    assert torch.equal(message[good], before[good] * 0.9 + wide * (1 - 0.9))
    assert torch.equal(momentum[good], before[good] * 0.99 + wide * (1 - 0.99))


def test_a_default_device_of_the_user_changes_no_hash() -> None:
    values, words = [torch.arange(70.0)], torch.arange(3)
    before = bits.checksum(values), bits.mix64(1, words, 0).tolist(), bits.mix64(1, 2, 0).item()
    with torch.device("meta"):
        assert (bits.checksum(values), bits.mix64(1, words, 0).tolist(), bits.mix64(1, 2, 0).item()) == before


def test_a_checksum_sees_every_bit_and_every_place() -> None:
    values = [torch.randn(70, generator=torch.Generator().manual_seed(4)), torch.zeros(3, dtype=torch.bfloat16)]
    wanted = bits.checksum(values)
    assert wanted == bits.checksum([values[0].view(7, 10).t().contiguous().t(), values[1]])
    flipped = values[0].clone()
    flipped.view(torch.int32)[69] ^= 1
    for other in ([flipped, values[1]], [values[0].roll(1), values[1]], [values[0], values[1] + 1], values[::-1]):
        assert bits.checksum(other) != wanted
    assert bits.checksum([torch.zeros(9), torch.zeros(0)]) == 0


DIGEST = """
import torch
from dlion import DistributedLion
from dlion.ops import bits, reference
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(7)
def numbers(size, dtype):  # torch's normal numbers are themselves not the same everywhere
    return torch.randint(-9999, 9999, (size,), generator=generator).to(dtype) / 777
params = [torch.nn.Parameter(numbers(s, d))
          for s in (1, 63, 64, 4097) for d in (torch.float32, torch.float64)]
opt = DistributedLion(params, lr=1e-3, weight_decay=0.1, kernels='reference')
for _ in range(20):
    for p in params:
        p.grad = numbers(p.numel(), p.dtype)
    opt.step()
votes = torch.randint(-2**63, 2**63 - 1, (6, 2, 333), generator=generator)
tallied = [reference.tally_majority(votes[:, 0], 3, 5, ties) for ties in ("rotate", "alternate")]
tallied += [reference.tally_count(votes[:, 1], 3), reference.tally_count_ternary(votes, 4)]
tallied += [reference.tally_majority_ternary(votes, 3, 5, ties) for ties in ("rotate", "alternate", "zero")]
momenta = [opt.state[p]["exp_avg"] for p in params]
print(torch.backends.cpu.get_cpu_capability(), bits.checksum([*params, *momenta, *tallied]))
"""


@pytest.mark.processes
def test_bits_do_not_depend_on_what_the_processor_can_do() -> None:
    """A replica on another processor must agree to the bit: torch's plain code against its vector code."""
    seen = {}
    for capability in ("default", None):
        environment = {k: v for k, v in os.environ.items() if k != "ATEN_CPU_CAPABILITY"}
        environment["PYTHONPATH"] = str(Path(dlion.__file__).parents[1])
        if capability:
            environment["ATEN_CPU_CAPABILITY"] = capability
        run = subprocess.run(
            [sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True, env=environment
        )
        used, checksum = run.stdout.split()
        seen[used] = checksum
    assert "DEFAULT" in seen
    assert len(set(seen.values())) == 1, seen
