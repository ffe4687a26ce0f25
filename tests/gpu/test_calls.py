"""How the Triton kernels are called: memory, tables that are kept, errors, and who gets them."""

import pytest
import torch
from kernel_cases import assert_ballots_agree, assert_verdicts_agree, numbers, offsets_of, random_words, same

from dlion import DistributedLion, optim
from dlion.codecs import CountPlanes
from dlion.ops import ON_GPU, bits, chunks, kept, reference, triton
from dlion.resident import by_triton

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def test_what_is_not_contiguous_is_handled() -> None:
    base = numbers(35 * 40, 50)
    grads = [base.view(35, 40).t(), base[:35].expand(4, 35), base[::2]]
    momenta = [base.clone().view(40, 35), base.clone()[:140].view(35, 4).t(), base.clone()[1::2]]
    assert_ballots_agree(triton, list(grads), momenta, 1, "balanced")
    strided = [base.clone().view(35, 40).t(), base.clone()[1::2]]
    other = [base.clone().view(35, 40).t(), base.clone()[1::2]]
    offsets, size = offsets_of(strided)
    rest = (random_words(2, size // 64), offsets, [0, 0], [0.1, 0.2, 0.3, 0.4], [0.99], "nearest", 0, 0, 0)
    triton.apply(strided, *rest)
    reference.apply(other, *rest)
    assert all(same(a, b) for a, b in zip(strided, other, strict=True))


def test_float64_goes_to_the_reference_piece_by_piece() -> None:
    momenta = [numbers(100, 1), numbers(65, 2).double(), numbers(64, 3)]
    grads = [numbers(100, 4), numbers(65, 5).double(), numbers(64, 6).double()]
    grads[1][7] = float("nan")
    assert_ballots_agree(triton, list(grads), momenta, 1, "balanced")
    others = [momenta[0].bfloat16(), momenta[1], momenta[2].half()]
    assert_ballots_agree(triton, list(grads), others, 1, "balanced")
    assert_ballots_agree(triton, [grads[1]], [momenta[1]], 1, "exact")
    assert_verdicts_agree(triton, momenta, 2, "nearest", 1)


def test_autograd_sees_that_tensors_changed() -> None:
    momentum, param = torch.zeros(64), torch.nn.Parameter(torch.zeros(64))
    before = momentum._version, param._version
    with torch.no_grad():
        rest = ([0], [0], 64, [0.9], [0.99], [False], 0, 0, 0, "balanced")
        words, _ = triton.ballot([torch.ones(64)], [momentum], *rest)
        triton.apply([param], words, [0], [0], [0.1, -0.1], [1.0], "nearest", 0, 0, 0)
    assert momentum._version > before[0] and param._version > before[1]


def test_tables_are_sent_again_only_where_something_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = chunks.sent
    monkeypatch.setattr(chunks, "sent", lambda values, *rest: sent.append(len(values)) or send(values, *rest))
    chunks.forget()
    grads, momenta, params = ([numbers(3000, k), numbers(70, k + 1)] for k in (1, 3, 5))
    verdict = random_words(1, 49)

    def step(t: int, lr: float = 0.1) -> int:
        before = len(sent)
        triton.ballot(list(grads), momenta, [0, 3008], [0, 0], 3136, [0.9], [0.99], [False], 0, t, 0, "balanced")
        triton.apply(params, verdict, [0, 3008], [0, 0], [lr, -lr], [0.9], "nearest", 0, t, 0)
        return len(sent) - before

    assert step(0) == 8  # of each verb: two tables of the layout, addresses, hyper-parameters
    assert step(1) == 0
    assert step(2, lr=0.2) == 1
    kept_alive, grads[0] = grads[0], grads[0].clone()
    assert step(3, lr=0.2) == 1 and sent[-1] == 4
    assert len(kept_alive)


def test_a_graph_writes_its_own_tables_and_what_is_kept_is_not_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the host may have changed when a graph runs, and before that its tables hold nothing."""
    chunks.forget()
    grads, momenta = [numbers(3000, 1), None, numbers(70, 2)], [numbers(3000, 3), numbers(64, 4), numbers(70, 5)]
    with monkeypatch.context() as capture:
        for module in (kept, chunks):
            capture.setattr(module, "is_captured", lambda device: True)
        assert_ballots_agree(triton, list(grads), momenta, 7, "balanced")
        assert_verdicts_agree(triton, [numbers(3000, 6), numbers(70, 7)], 2, "nearest", 7)
        assert not any(shelf._things for shelf in (chunks._chunks, chunks._hypers, chunks._clocks))
    assert_ballots_agree(triton, list(grads), momenta, 7, "balanced")
    assert all(shelf._things for shelf in (chunks._chunks, chunks._hypers, chunks._clocks))


@pytest.mark.parametrize("values", [[], [1, 0, 2**63 - 1, -(2**63)] * 40, [0.1, -0.0, 1e-45, float("inf")]])
def test_numbers_get_into_a_graph_to_the_bit(values: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float32 if values and isinstance(values[0], float) else torch.int64
    wanted = kept.sent(values, dtype, torch.device("cpu"))
    monkeypatch.setattr(kept, "is_captured", lambda device: True)
    found = kept.sent(values, dtype, torch.device("cpu"))
    assert found.dtype == dtype and torch.equal(bits.as_bytes(found), bits.as_bytes(wanted))


def test_what_was_asked_for_last_is_kept() -> None:
    shelf: kept.Shelf[int] = kept.Shelf(2)
    made: list[int] = []
    for key in (1, 2, 1, 3, 1, 2):
        assert shelf.get(key, torch.device("cpu"), lambda key=key: made.append(key) or key) == key
    assert made == [1, 2, 3, 2]


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("not on a word inside a bucket", {"offsets": [32]}),
        ("not on a word inside a bucket", {"offsets": [64]}),
        ("not on a word inside a bucket", {"offsets": [-64]}),
        ("a group that has no hyper-parameters", {"groups": [1]}),
        ("a group that has no hyper-parameters", {"groups": [-1]}),
        ("every gradient must have as many elements", {"grads": [torch.ones(63)]}),
        ("zeros='none' is not a way", {"zeros": "none"}),
    ],
)
def test_a_bad_ballot_is_refused(message: str, changed: dict[str, object]) -> None:
    given: dict[str, object] = {
        "grads": [torch.ones(64)],
        "momenta": [torch.zeros(64)],
        "offsets": [0],
        "groups": [0],
        "size": 64,
        "beta1s": [0.9],
        "beta2s": [0.99],
        "negate": [False],
        "first_word": 0,
        "t": 0,
        "rank": 0,
        "zeros": "balanced",
    }
    with pytest.raises(ValueError, match=message):
        triton.ballot(**given | changed)  # type: ignore[arg-type]


def test_a_bad_verdict_is_refused() -> None:
    given = ([torch.ones(64)], random_words(1, 1), [0], [0])
    with pytest.raises(ValueError, match="rounding='up' is not a way"):
        triton.apply(*given, [0.1, 0.2], [1.0], "up", 0, 0, 0)
    with pytest.raises(ValueError, match=r"3 steps are not 2\*\*1 for each of 1 groups"):
        triton.apply(*given, [0.1, 0.2, 0.3], [1.0], "nearest", 0, 0, 0)
    with pytest.raises(ValueError, match="a tally of 0 ballots"):
        triton.tally_count(random_words(0, 3), 1)


def learnt() -> int:
    """A number that depends on each bit of what ten steps make of parameters of all dtypes."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    params = [torch.nn.Parameter(numbers(2100 + k, k, [0.0]).to(dtype)) for k, dtype in enumerate(dtypes)]
    optimizer = DistributedLion(params, lr=1e-3, weight_decay=0.1)
    for step in range(10):
        for param in params:
            param.grad = numbers(param.numel(), step, [0.0]).to(param.dtype)
        optimizer.step()
    return bits.checksum([*(param.detach() for param in params), *(optimizer.state[p]["exp_avg"] for p in params)])


def test_an_optimizer_learns_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = learnt()
    calls: list[str] = []
    launch = triton._launch
    monkeypatch.setattr(
        triton, "_launch", lambda kernel, *rest: calls.append(kernel.fn.__name__) or launch(kernel, *rest)
    )
    monkeypatch.setattr(optim, "choose", lambda kernels, device: ("triton", triton))
    assert learnt() == wanted
    assert {"ballot", "apply"} == set(calls)


def test_what_is_registered_for_gpus_is_there() -> None:
    assert all(callable(getattr(triton, name)) for name in ON_GPU)


@pytest.mark.parametrize("go", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_lie_on_the_device_give_the_same_bits(dtype: torch.dtype, go: bool) -> None:
    """As where a step is taken that no host waits for; and nothing moves where it is not to be taken."""
    params = [numbers(3000, 1).to(dtype), numbers(70, 2).to(dtype)]
    wanted = [param.clone() for param in params]
    verdict, offsets, groups, t = random_words(2, 49), [0, 3008], [0, 1], torch.tensor(5)
    applied = torch.tensor([[0.1 / 3, 0.2], [0.5 / 3, 0.9]], dtype=torch.float64)
    if go:
        tables = [step for lr, _ in applied.tolist() for step in CountPlanes().decode(verdict, 3).table(lr)]
        decays = [1 - lr * weight_decay for lr, weight_decay in applied.tolist()]
        reference.apply(wanted, verdict, offsets, groups, tables, decays, "stochastic", 3, 5, 7)
    assert all(map(triton.knows, params)) and not triton.knows(params[0].double())
    steps = by_triton.numbers(CountPlanes(), 2, torch.tensor(3 * go), applied)
    triton.apply_there(params, verdict, offsets, groups, steps, "stochastic", 3, t, 7)
    assert all(same(a, b) for a, b in zip(params, wanted, strict=True))
    grads, momenta = [numbers(3000, 3), numbers(70, 4)], [numbers(3000, 5).bfloat16(), numbers(70, 6)]
    others = [momentum.clone() for momentum in momenta]
    rest = (offsets, groups, 3136, [0.9, 0.8], [0.99, 0.98], [False, True], 3)
    words, finite = triton.ballot(grads, momenta, *rest, t, 1, "balanced")
    wanted_words, fine = reference.ballot(grads, others, *rest, 5, 1, "balanced")
    assert torch.equal(words, wanted_words) and bool(finite) == bool(fine)
    assert all(same(a, b) for a, b in zip(momenta, others, strict=True))
