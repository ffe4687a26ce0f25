"""The compiled kernels give the bits of the reference: every path, dtype, size and rule."""

import ctypes
import logging
import multiprocessing
import os
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dlion import DistributedLion, ops
from dlion.ops import bits, native, reference

if not native.available():
    pytest.skip("this installation has no compiled kernels", allow_module_level=True)

SIZES = [0, 1, 63, 64, 65, 1000, 4097]
LARGE = 2**20 + 3
HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALVES]
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 2.0**-126, -(2.0**-127), 1.0, -1.0, 3.0, 1e30, -1e30]
SPECIAL += [65504.0, 65519.0, 65520.0, 65535.0, 65536.0, 6e-8, 2.0**-14, 2.0**-24, 3.38e38]
NOT_FINITE = [float("inf"), float("-inf"), float("nan")]

Pieces = list[Tensor]


def paths() -> list[str]:
    found = []
    for path in native.PATHS[1:]:
        try:
            native.use_path(path)
        except ValueError:
            continue
        found.append(path)
    native.use_path("auto")
    return found


@pytest.fixture(params=paths())
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    native.use_path(request.param)
    assert native.path() == request.param
    yield request.param
    native.use_path("auto")


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def numbers(size: int, seed: int, special: list[float] = SPECIAL) -> Tensor:
    """f32[size] of all magnitudes, with every special value somewhere if there is room."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-12, 5, (size,), generator=generator)
    where = torch.randperm(size, generator=generator)[: len(special) * 4]
    values[where] = torch.tensor(special * 4)[: len(where)]
    return values


def random_words(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=torch.Generator().manual_seed(seed))


def sparse_words(*shape: int) -> Tensor:
    """Words whose bits are mostly equal, so that counts come near 0 and near all."""
    return random_words(*shape, seed=1) & random_words(*shape, seed=2) & random_words(*shape, seed=3)


def pattern(tensor: Tensor) -> Tensor:
    """The bits of a tensor; every NaN is one, for torch itself writes several."""
    whole = torch.where(tensor.isnan(), torch.tensor(float("nan"), dtype=tensor.dtype), tensor)
    return whole.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(pattern(a), pattern(b))


def offsets_of(pieces: Pieces, gap: int = 0) -> tuple[list[int], int]:
    """Each piece on a word, `gap` words apart; and the size of the bucket."""
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += -(-piece.numel() // 64) * 64 + 64 * gap
    return offsets, end


def assert_ballots_agree(grads: list[Tensor | None], momenta: Pieces, t: int, zeros: str, gap: int = 0) -> None:
    offsets, size = offsets_of(momenta, gap)
    groups = [k % 2 for k in range(len(momenta))]
    rest = (offsets, groups, size, [0.9, 0.95], [0.99, 0.98], [False, True], 2**33 + 7, t, 5, zeros)
    mine, theirs = ([piece.clone() for piece in momenta] for _ in range(2))
    words, finite = native.ballot(grads, mine, *rest)
    wanted, fine = reference.ballot(grads, theirs, *rest)
    assert torch.equal(words, wanted) and words.shape == wanted.shape
    assert finite.dtype == torch.bool and bool(finite) == bool(fine)
    assert all(same(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("zeros", ["balanced", "exact"])
@pytest.mark.parametrize("special", [SPECIAL, SPECIAL + NOT_FINITE], ids=["finite", "not-finite"])
def test_a_ballot_has_the_bits_of_the_reference(
    path: str, dtype: torch.dtype, zeros: str, special: list[float]
) -> None:
    momenta = [numbers(size, 10 + size) for size in SIZES]
    grads = [numbers(size, 20 + size, special).to(dtype) for size in SIZES]
    for t in (0, 3):
        assert_ballots_agree(list(grads), momenta, t, zeros)


@pytest.mark.parametrize("zeros", ["balanced", "exact"])
def test_missing_gradients_count_as_zero(path: str, zeros: str) -> None:
    momenta = [numbers(100, 1), torch.zeros(130), numbers(64, 2)]
    for grads in ([None, None, torch.ones(64)], [None] * 3):
        for t in (4, 5):
            assert_ballots_agree(list(grads), momenta, t, zeros, gap=1)


def test_a_large_ballot_and_its_verdict(path: str, two_threads: None) -> None:
    grads, momenta = [numbers(LARGE, 3), numbers(777, 4)], [numbers(LARGE, 5), numbers(777, 6)]
    assert_ballots_agree(list(grads), momenta, 1, "balanced")
    assert_verdicts_agree([numbers(LARGE, 7).bfloat16(), numbers(70, 8)], 3, "stochastic", 1)


def assert_verdicts_agree(params: Pieces, planes: int, rounding: str, t: int, seed: int = 12) -> None:
    offsets, size = offsets_of(params)
    verdict = random_words(planes, size // 64)
    groups = [k % 2 for k in range(len(params))]
    tables = [(level + 1) * 1.37e-3 * (-1) ** level for level in range(2 * 2**planes)]
    rest = (verdict, offsets, groups, tables, [0.999, 1.0], rounding, 2**33 + 7, t, seed)
    mine, theirs = ([piece.clone() for piece in params] for _ in range(2))
    native.apply(mine, *rest)
    reference.apply(theirs, *rest)
    for a, b in zip(mine, theirs, strict=True):
        assert same(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_verdict_is_applied_as_by_the_reference(path: str, dtype: torch.dtype, rounding: str) -> None:
    params = [numbers(size, 30 + size, SPECIAL + NOT_FINITE).to(dtype) for size in SIZES]
    for planes in (1, 2, 3, 4, 5, 7):
        assert_verdicts_agree(params, planes, rounding, t=planes)


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_tensor_is_applied_as_by_the_reference(path: str, dtype: torch.dtype) -> None:
    param = numbers(1000, 9).to(dtype)
    other = param.clone()
    verdict = random_words(2, 20)[:, 1:18]
    native.apply_levels(param, verdict, [0.1, -0.2, 0.3, 0.0], 0.99)
    reference.apply_levels(other, verdict, [0.1, -0.2, 0.3, 0.0], 0.99)
    assert same(param, other)


def every_half(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_number_is_read_and_written_exactly(path: str, dtype: torch.dtype) -> None:
    """What has 16 bits already is not changed by either rounding, and all values between two are rounded right."""
    halves = every_half(dtype)
    still = torch.zeros(1, 1024, dtype=torch.int64)
    for rounding in ("nearest", "stochastic"):
        param = halves.clone()
        native.apply([param], still, [0], [0], [0.0, 0.0], [1.0], rounding, 0, 0, 0)
        assert same(param, halves)
    assert_ballots_agree([halves], [torch.zeros(2**16)], 0, "exact")
    for decay in (0.75, 1.0 + 2.0**-9, 1.0 - 2.0**-12, 1e-5, 1e4):
        param, other = halves.clone(), halves.clone()
        native.apply([param], still, [0], [0], [0.0, 0.0], [decay], "nearest", 0, 0, 0)
        other.copy_(other.float() * decay)
        assert same(param, other)


@pytest.mark.parametrize("ties", ["rotate", "alternate"])
def test_a_majority_has_the_bits_of_the_reference(path: str, ties: str) -> None:
    for voters in [*range(1, 18), 64, 200]:
        for ballots in (random_words(voters, 131), sparse_words(voters, 131)):
            given = (ballots, 2**33 + 7, voters + 3, ties)
            assert torch.equal(native.tally_majority(*given), reference.tally_majority(*given))


@pytest.mark.parametrize("ties", ["rotate", "alternate", "zero"])
def test_a_ternary_majority_has_the_bits_of_the_reference(path: str, ties: str) -> None:
    for voters in [*range(1, 10), 16, 33]:
        for nonzero in (random_words(voters, 131), sparse_words(voters, 131)):
            ballots = torch.stack([nonzero, nonzero & random_words(voters, 131, seed=9)], 1)
            given = (ballots, 2**33 + 7, voters + 3, ties)
            assert torch.equal(native.tally_majority_ternary(*given), reference.tally_majority_ternary(*given))


def test_counts_have_the_bits_of_the_reference(path: str) -> None:
    for voters in [*range(1, 10), 16, 64, 100]:
        for more in (0, 2):  # planes for workers who are absent
            ballots = random_words(voters, 131)
            planes = voters.bit_length() + more
            assert torch.equal(native.tally_count(ballots, planes), reference.tally_count(ballots, planes))
            nonzero = sparse_words(voters, 131)
            ternary = torch.stack([nonzero, nonzero & ballots], 1)
            planes = (2 * voters).bit_length() + more
            assert torch.equal(
                native.tally_count_ternary(ternary, planes), reference.tally_count_ternary(ternary, planes)
            )


def test_ballots_are_read_where_they_lie(path: str) -> None:
    """Rows with a header before the words, and voters picked from a larger buffer."""
    buffer = random_words(9, 2 + 3 * 67)
    rows = buffer[1::2, 2 : 2 + 2 * 67].view(4, 2, 67)
    given = (rows, 5, 3, "rotate")
    assert not rows.is_contiguous()
    assert torch.equal(native.tally_majority_ternary(*given), reference.tally_majority_ternary(*given))
    assert torch.equal(native.tally_majority(rows[:, 1], *given[1:]), reference.tally_majority(rows[:, 1], *given[1:]))
    every_second = buffer[:, ::2]
    assert torch.equal(native.tally_count(every_second, 4), reference.tally_count(every_second, 4))


@pytest.mark.parametrize("dtype", FLOATS)
def test_pieces_may_start_anywhere_in_memory(path: str, dtype: torch.dtype) -> None:
    for odd in (1, 3, 5):
        grads = [numbers(300, 40)[odd : odd + 200].to(dtype), numbers(90, 41).to(dtype)[odd : odd + 65]]
        assert_ballots_agree(list(grads), [numbers(300, 42)[odd : odd + 200], numbers(70, 43)[odd : odd + 65]], 2, "exact")
        param = numbers(300, 44).to(dtype)
        around = param.clone()
        planes = random_words(1, 4)
        for tensor, kernels in ((param, native), (around, reference)):
            kernels.apply([tensor[odd : odd + 200]], planes, [0], [0], [0.1, -0.1], [0.9], "stochastic", 9, 1, 3)
        assert same(param, around)


def test_what_is_not_contiguous_is_handled() -> None:
    base = numbers(35 * 40, 50)
    grads = [base.view(35, 40).t(), base[:35].expand(4, 35), base[::2]]
    momenta = [base.clone().view(40, 35), base.clone()[:140].view(35, 4).t(), base.clone()[1::2]]
    assert_ballots_agree(list(grads), momenta, 1, "balanced")
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
    assert_verdicts_agree(momenta, 2, "nearest", 1)


def test_random_pieces_cut_from_one_layout(path: str) -> None:
    """Any cut into pieces gives the words of the whole."""
    size = 64 * 300
    grad, momentum = numbers(size, 60), numbers(size, 61)
    grad[momentum > 0.5] = 0
    momentum[momentum > 0.5] = 0
    whole = momentum.clone()
    wanted, _ = native.ballot([grad], [whole], [0], [0], size, [0.9], [0.99], [False], 11, 7, 2, "balanced")
    cuts = [0, *sorted(64 * int(k) for k in torch.randperm(299, generator=torch.Generator().manual_seed(5))[:20] + 1), size]
    runs = list(zip(cuts[:-1], cuts[1:], strict=True))
    cut = momentum.clone()
    pieces = [cut[a:b] for a, b in runs]
    words, _ = native.ballot(
        [grad[a:b] for a, b in runs], pieces, cuts[:-1], [0] * len(runs), size, [0.9], [0.99], [False], 11, 7, 2, "balanced"
    )
    assert torch.equal(words, wanted) and same(cut, whole)


def everything() -> int:
    """A number that depends on each bit of what all kernels do to 200,000 elements."""
    size = 200_000 // 64 * 64
    momentum, param = numbers(size, 1), numbers(size, 2).bfloat16()
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


def in_child(answers: "multiprocessing.SimpleQueue[int]") -> None:
    torch.set_num_threads(2)
    answers.put(everything())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_child_of_fork_starts_its_own_threads() -> None:
    code = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
from test_native import everything
torch.set_num_threads(2)
from dlion.ops import native
"""
    wanted = everything()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if everything() == wanted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and code


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
        words, _ = native.ballot([torch.ones(64)], [momentum], [0], [0], 64, [0.9], [0.99], [False], 0, 0, 0, "balanced")
        native.apply([param], words, [0], [0], [0.1, -0.1], [1.0], "nearest", 0, 0, 0)
    assert momentum._version > before[0] and param._version > before[1]


BAD: list[tuple[str, Callable[[], object]]] = [
    ("not on a word inside a bucket", lambda: ballot_with(offsets=[32])),
    ("not on a word inside a bucket", lambda: ballot_with(offsets=[64])),
    ("not on a word inside a bucket", lambda: ballot_with(offsets=[-64])),
    ("a group that has no hyper-parameters", lambda: ballot_with(groups=[1])),
    ("a gradient of 63 elements belongs to 64", lambda: ballot_with(grads=[torch.ones(63)])),
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
    return native.ballot(
        first, second, offsets or [0], groups or [0], 64, [0.9], [0.99], [False], 0, 0, 0, zeros
    )


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
    monkeypatch.setattr(native, "_library", lambda: calls.append("native") or native._loaded[0])
    kernels.tally_count(random_words(3, 2), 2)
    ops.choose("reference")[1].tally_count(random_words(3, 2), 2)
    assert calls == ["native"]


def test_an_empty_bucket_is_no_special_case() -> None:
    words, finite = torch.ops.dlion.ballot([], [], [], [], 0, [], [], [], 0, 0, 0, "exact")
    assert words.shape == (2, 0) and bool(finite)
    torch.ops.dlion.apply([], words, [], [], [], [], "nearest", 0, 0, 0)


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_an_optimizer_learns_the_same_bits(kernels: str) -> None:
    params = [torch.nn.Parameter(numbers(size, size)) for size in (1, 63, 64, 4097)]
    optimizer = DistributedLion(params, lr=1e-3, weight_decay=0.1, kernels=kernels)
    for step in range(10):
        for param in params:
            param.grad = numbers(param.numel(), step)
        optimizer.step()
    assert optimizer.kernels == kernels
    assert bits.checksum([param.detach() for param in params]) == LEARNT.setdefault("bits", bits.checksum(params))


LEARNT: dict[str, int] = {}


def test_a_library_of_another_version_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(native._loaded[0]._name).parent)
    monkeypatch.setattr(native, "_loaded", [])
    monkeypatch.setattr(native, "INTERFACE", 10**6)
    assert not native.load([str(tmp_path), folder]) and not native.available()


def test_without_the_library_the_reference_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_loaded", [])
    ops._announce.cache_clear()
    with caplog.at_level(logging.WARNING, "dlion"):
        assert ops.choose("auto") == ops.choose("auto") == ("reference", reference)
    ops._announce.cache_clear()
    assert len(caplog.records) == 1 and "without a C++17 compiler" in caplog.text
    with pytest.raises(ValueError, match="kernels='native' is not part of this installation"):
        ops.choose("native")


def test_a_path_that_the_processor_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="no path 'avx1024'"):
        native.use_path("avx1024")
    assert isinstance(native._loaded[0], ctypes.CDLL)
