"""How the compiled kernels are called: memory, threads, fork, errors, and who gets them."""

import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kernel_cases import numbers, offsets_of, random_words, same
from native_cases import assert_ballots_agree, assert_verdicts_agree, forced, paths
from torch import Tensor

from dlion import DistributedLion, ops
from dlion.ops import bits, library, native, reference


@pytest.fixture(params=paths())
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from forced(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_what_is_not_contiguous_is_handled() -> None:
    base = numbers(35 * 40, 50)
    grads = [base.view(35, 40).t(), base[:35].expand(4, 35), base[::2]]
    momenta = [base.clone().view(40, 35), base.clone()[:140].view(35, 4).t(), base.clone()[1::2]]
    assert_ballots_agree(list(grads), momenta, 1, "balanced")
    assert_ballots_agree(list(grads), [momentum.bfloat16() for momentum in momenta], 1, "balanced")
    strided = [base.clone().view(35, 40).t(), base.clone()[1::2]]
    other = [base.clone().view(35, 40).t(), base.clone()[1::2]]
    offsets, size = offsets_of(strided)
    rest = (random_words(2, size // 64), offsets, [0, 0], [0.1, 0.2, 0.3, 0.4], [0.99], "nearest", 0, 0, 0)
    native.apply(strided, *rest)
    reference.apply(other, *rest)
    assert all(same(a, b) for a, b in zip(strided, other, strict=True))


def test_float64_goes_to_the_reference_piece_by_piece() -> None:
    momenta = [numbers(100, 1), numbers(65, 2).double(), numbers(64, 3)]
    grads = [numbers(100, 4), numbers(65, 5).double(), numbers(64, 6).double()]
    grads[1][7] = float("nan")
    assert_ballots_agree(list(grads), momenta, 1, "balanced")
    assert_ballots_agree(list(grads), [momenta[0].bfloat16(), momenta[1], momenta[2].half()], 1, "balanced")
    assert_verdicts_agree(momenta, 2, "nearest", 1)


def everything() -> int:
    """A number that depends on each bit of what all kernels do to 200,000 elements."""
    size = 200_000 // 64 * 64
    momentum, param = numbers(size, 1).bfloat16(), numbers(size, 2).bfloat16()
    args = ([0.9], [0.99], [False], 3, 5, 1)
    words, _ = native.ballot([numbers(size, 3)], [momentum], [0], [0], size, *args, "balanced")
    ballots = torch.cat([words, random_words(3, size // 64)])
    verdict = native.tally_majority(ballots, 3, 5, "rotate")[None]
    native.apply([param], verdict, [0], [0], [-1e-3, 1e-3], [0.99], "stochastic", 3, 5, 9)
    return bits.checksum([momentum, param, words, verdict, native.tally_count(ballots, 3)])


def test_bits_do_not_depend_on_threads(two_threads: None) -> None:
    shared = everything()
    torch.set_num_threads(1)
    assert everything() == shared


def test_several_callers_at_once(two_threads: None) -> None:
    wanted = everything()
    seen: list[int] = []
    callers = [threading.Thread(target=lambda: seen.append(everything())) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert seen == [wanted] * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_child_of_fork_starts_its_own_threads(two_threads: None) -> None:
    size = 64 * 2048
    grad, momentum, untouched = numbers(size, 1), numbers(size, 2), numbers(size, 2)
    rest = ([0], [0], size, [0.9], [0.99], [False], 3, 5, 1, "balanced")
    wanted, _ = native.ballot([grad], [momentum], *rest)  # starts this process's own threads
    pid = os.fork()
    if pid == 0:
        words, _ = native.ballot([grad], [untouched], *rest)
        torch.set_num_threads(1)  # torch's threads did not come along
        os._exit(0 if torch.equal(words, wanted) and torch.equal(untouched, momentum) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_arithmetic_is_the_default_whatever_the_caller_asked_for(path: str) -> None:
    momentum, grad = torch.full((64,), 2.0**-120), torch.full((64,), 2.0**-149)
    args = ([0], [0], 64, [2.0**-10], [0.99], [False], 0, 0, 0, "exact")
    wanted, _ = native.ballot([grad], [momentum.clone()], *args)
    assert torch.set_flush_denormal(True) or platform.machine() not in ("x86_64", "AMD64")
    try:
        words, _ = native.ballot([grad], [momentum.clone()], *args)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(words, wanted) and words[0].item() == -1


def test_autograd_sees_that_tensors_changed() -> None:
    momentum, param = torch.zeros(64), torch.nn.Parameter(torch.zeros(64))
    with torch.no_grad():
        before = momentum._version, param._version
        words, _ = native.ballot(
            [torch.ones(64)], [momentum], [0], [0], 64, [0.9], [0.99], [False], 0, 0, 0, "balanced"
        )
        native.apply([param], words, [0], [0], [0.1, -0.1], [1.0], "nearest", 0, 0, 0)
    assert momentum._version > before[0] and param._version > before[1]


BAD: list[tuple[str, Callable[[], object]]] = [
    ("not on a word inside a bucket", lambda: ballot_with(offsets=[32])),
    ("not on a word inside a bucket", lambda: ballot_with(offsets=[64])),
    ("not on a word inside a bucket", lambda: ballot_with(offsets=[-64])),
    ("a group that has no hyper-parameters", lambda: ballot_with(groups=[1])),
    ("every gradient must have as many elements", lambda: ballot_with(grads=[torch.ones(63)])),
    ("1 pieces came with 1 offsets and 2 groups", lambda: ballot_with(groups=[0, 0])),
    ("zeros='none' is not a way", lambda: ballot_with(zeros="none")),
    ("rounding='up' is not a way", lambda: apply_with(rounding="up")),
    (r"3 steps are not 2\*\*1 for each of 1 groups", lambda: apply_with(tables=[0.1, 0.2, 0.3])),
    ("a tally of 0 ballots", lambda: native.tally_count(random_words(0, 3), 1)),
]


def ballot_with(
    grads: list[Tensor | None] | None = None,
    offsets: list[int] | None = None,
    groups: list[int] | None = None,
    zeros: str = "balanced",
) -> object:
    first, second = grads or [torch.ones(64)], [torch.zeros(64)]
    return native.ballot(first, second, offsets or [0], groups or [0], 64, [0.9], [0.99], [False], 0, 0, 0, zeros)


def apply_with(tables: list[float] | None = None, rounding: str = "nearest") -> object:
    planes = random_words(1, 1)
    return native.apply([torch.ones(64)], planes, [0], [0], tables or [0.1, 0.2], [1.0], rounding, 0, 0, 0)


@pytest.mark.parametrize(("message", "call"), BAD)
def test_what_memory_safety_rests_on_is_checked(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_operators_are_the_native_ones_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    name, kernels = ops.choose("auto")
    assert (name, kernels) == ops.choose("native") == ("native", torch.ops.dlion)
    calls: list[str] = []
    monkeypatch.setattr(library, "loaded", lambda: calls.append("native") or library._loaded[0])
    kernels.tally_count(random_words(3, 2), 2)
    ops.choose("reference")[1].tally_count(random_words(3, 2), 2)
    assert calls == ["native"]


def test_an_empty_bucket_is_no_special_case() -> None:
    words, finite = torch.ops.dlion.ballot([], [], [], [], 0, [], [], [], 0, 0, 0, "exact")
    assert words.shape == (2, 0) and bool(finite)
    torch.ops.dlion.apply([], words, [], [], [], [], "nearest", 0, 0, 0)


def learnt(kernels: str) -> int:
    """A number that depends on each bit of four parameters after ten steps."""
    params = [torch.nn.Parameter(numbers(size, size)) for size in (1, 63, 64, 4097)]
    optimizer = DistributedLion(params, lr=1e-3, weight_decay=0.1, kernels=kernels)
    for step in range(10):
        for param in params:
            param.grad = numbers(param.numel(), step)
        optimizer.step()
    assert optimizer.kernels == kernels
    return bits.checksum([param.detach() for param in params])


def test_an_optimizer_learns_the_same_bits() -> None:
    assert learnt("native") == learnt("reference")


def test_a_library_of_another_version_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(library._loaded[0]._name).parent)
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setattr(library, "INTERFACE", 10**6)
    assert not library.load([str(tmp_path), folder]) and not library.available()


def test_without_the_library_the_reference_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_loaded", [])
    ops._announce.cache_clear()
    with caplog.at_level(logging.WARNING, "dlion"):
        assert ops.choose("auto") == ops.choose("auto") == ("reference", reference)
    ops._announce.cache_clear()
    assert len(caplog.records) == 1 and "without a C++17 compiler" in caplog.text
    with pytest.raises(ValueError, match="kernels='native' is not part of this installation"):
        ops.choose("native")


def test_a_path_that_the_processor_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="no path 'avx1024'"):
        library.use_path("avx1024")


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 63, 64, 65, 200, 131_072, 400_003])
def test_a_checksum_is_the_same_by_kernel_and_by_reference(path: str, two_threads: None, nbytes: int) -> None:
    memory = torch.randint(0, 256, (nbytes + 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    for first, number in ((0, 0), (1, 3), (8, 2**31)):
        held = memory[first : first + nbytes]  # at any address, as a slice of a bfloat16 parameter may be
        assert native.hashed(held, number).equal(reference.hashed(held, number))
    transposed = memory[: nbytes // 2 * 2].view(2, -1).t()
    assert native.hashed(transposed, 1).equal(reference.hashed(transposed, 1))
    assert bits.checksum([memory, transposed]) == int(reference.hashed(memory, 0) + reference.hashed(transposed, 1)) % (
        2**64
    )
