"""How often a worker's votes are the verdict's: against a count of every vote by hand, and real against simulated."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from robustness import chance
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed, agreement_rates
from dlion.agreement_rates import EVERY, Sample, below_chance
from dlion.layout import Layout
from dlion.methods import METHODS, Choices
from dlion.ops import bits, reference
from dlion.simulate import Fault, Simulation
from dlion.stats import KEPT, Stats

WORKERS = 5
SHAPES = ((33, 7), (130,), (), (64,))
KINDS: dict[str, dict[str, Any]] = {
    "majority": {"method": "dlion-mavo"},
    "even majority": {"method": "dlion-mavo", "workers": 4},
    "average": {"method": "dlion-avg"},
    "even average": {"method": "dlion-avg", "workers": 4},
    "ternary": {"method": "dlion-mavo", "zeros": "exact"},
    "ternary, ties rest": {"method": "dlion-mavo", "zeros": "exact", "ties": "zero", "workers": 4},
    "ternary average": {"method": "dlion-avg", "zeros": "exact", "workers": 4},
    "numbers": {"method": "g-lion"},
    "terngrad": {"method": "terngrad"},
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.values = nn.ParameterList([torch.randn(shape, generator=generator) for shape in SHAPES])


def noise(rank: int, step: int, param: Tensor) -> Tensor:
    """Numbers, some of them 0, that have a direction in common."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    grad = torch.randn(param.shape, generator=generator) + 0.3
    return torch.where(torch.rand(param.shape, generator=generator) < 0.2, 0.0, grad)


def real(group: dist.ProcessGroup, rank: int, steps: int, **options: Any) -> Stats:
    model = Small()
    opt = Distributed(model.parameters(), process_group=group, lr=0.01, **options)
    for step in range(steps):
        for param in model.parameters():
            param.grad = noise(rank, step, param)
        opt.step()
    return opt.stats


def simulated(workers: int, steps: int, **options: Any) -> Simulation:
    model = Small()
    simulation = Simulation(model, workers=workers, lr=0.01, **options)
    for step in range(steps):
        for rank in range(workers):
            with simulation.worker(rank):
                for param in model.parameters():
                    param.grad = noise(rank, step, param)
        simulation.step()
    return simulation


def counts(stats: Stats) -> tuple[Any, ...]:
    return stats.votes_agreed, stats.votes_looked, stats.coins_agreed, stats.coins_looked, stats.vote_samples


@pytest.mark.wide(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", ["sharded", "replicated", "server"])
def test_real_workers_and_simulated_ones_count_the_same(kind: str, topology: str) -> None:
    options = {"topology": topology, **KINDS[kind]}
    size, steps = options.pop("workers", WORKERS), 3 * EVERY
    if options["method"] != "terngrad":
        options["bucket_bytes"] = 2048 if kind == "numbers" else 32
    wanted = simulated(size, steps, **options)
    for rank, stats in enumerate(succeed(world(size, lambda rank, group: real(group, rank, steps, **options)))):
        assert counts(stats) == counts(wanted.stats) == counts(wanted.stats_of(rank))
        assert stats.vote_samples == 3 and all(rate is not None and 0.5 < rate < 1 for rate in stats.agreement)
        assert stats.bytes_sent == wanted.stats_of(rank).bytes_sent  # what is gathered are checks


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "terngrad"])  # which rounds at random
def test_every_vote_is_counted_as_by_hand(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bucket, looked at as a whole, in the first step; some workers are absent."""
    monkeypatch.setattr(agreement_rates, "EVERY", 1)
    options = dict(KINDS[kind])
    size = options.pop("workers", WORKERS)
    found = simulated(size, 1, faults=[Fault("absent", (1,))], **options).stats
    voters = [rank for rank in range(size) if rank != 1]
    said = torch.stack([torch.cat([_message(options, rank, p) for p in Small().parameters()]) for rank in voters])
    looked, agreed = _by_hand(options, said)
    assert found.votes_looked[1] == 0 and found.agreement[1] is None
    for place, rank in enumerate(voters):
        assert found.votes_looked[rank] == float(looked[place].sum())
        assert found.votes_agreed[rank] == float(agreed[place].sum())


def _message(options: dict[str, Any], rank: int, param: Tensor) -> Tensor:
    """The signs of a first step, where momenta are 0; of zeros with one bit, the bits that their hash gives."""
    index = [tuple(p.shape) for p in Small().parameters()].index(tuple(param.shape))
    grad = noise(rank, 0, param).flatten()
    if options["method"].startswith("g-") or options.get("zeros") == "exact":
        return grad
    before = sum(-(-math.prod(shape) // 64) for shape in SHAPES[:index])
    words = torch.arange(before, before + -(-grad.numel() // 64))
    hashed = bits.unpack(bits.mix64(0, words, rank))[: grad.numel()].float() * 2 - 1
    return torch.where(grad == 0, hashed, grad)


def _by_hand(options: dict[str, Any], said: Tensor) -> tuple[Tensor, Tensor]:
    signs = said.sign()
    total = (said if options["method"].startswith("g-") else signs).sum(0)
    decided = total.sign()
    if options["method"] == "dlion-mavo" and options.get("ties") != "zero":
        decided = _with_ties(signs, decided)
    looked = (signs != 0) & (decided != 0)
    return looked, looked & (signs == decided)


def _with_ties(signs: Tensor, decided: Tensor) -> Tensor:
    """At t=0 the first voter at or after voter `word mod V` that says something decides."""
    place = 0
    for shape in SHAPES:
        first = -(-place // 64)
        place = first * 64 + math.prod(shape)
    words = torch.cat([torch.arange(math.prod(s)) // 64 + o for s, o in zip(SHAPES, _offsets(), strict=True)])
    result = decided.clone()
    for element in (decided == 0).nonzero().flatten().tolist():
        turn = int(words[element]) % len(signs)
        order = [signs[(turn + k) % len(signs), element] for k in range(len(signs))]
        result[element] = next((sign for sign in order if sign != 0), 0)
    return result


def _offsets() -> list[int]:
    found, first = [], 0
    for shape in SHAPES:
        found.append(first)
        first += -(-math.prod(shape) // 64)
    return found


def test_who_turns_against_the_others_or_knows_nothing_is_seen() -> None:
    faults = [Fault("inverted", (2,)), Fault("random", (5,))]
    stats = simulated(7, 6 * EVERY, bucket_bytes=32, faults=faults).stats
    assert below_chance(stats) == [2, 5]
    rates, coins = stats.agreement, stats.agreement_by_chance
    assert rates[2] < 0.5 < rates[5] < rates[0] and abs(rates[5] - coins[5]) < 0.03
    assert below_chance(simulated(7, 6 * EVERY, bucket_bytes=32).stats) == []
    assert below_chance(simulated(7, 4 * EVERY, bucket_bytes=32, faults=faults).stats) == []  # too early


@pytest.mark.parametrize(
    ("method", "ties", "zeros", "workers", "wanted"),
    [
        ("dlion-mavo", "rotate", "balanced", 2, 0.75),
        ("dlion-mavo", "rotate", "balanced", 3, 0.75),
        ("dlion-mavo", "rotate", "balanced", 4, 0.6875),
        ("dlion-mavo", "zero", "exact", 4, 0.8),
        ("dlion-avg", "rotate", "balanced", 4, 0.8),
        ("dlion-avg", "rotate", "balanced", 2, 1.0),
        ("g-lion", "rotate", "balanced", 4, 2 / 3),
        ("dgc", "rotate", "balanced", 4, None),
    ],
)
def test_chance(method: str, ties: str, zeros: str, workers: int, wanted: float | None) -> None:
    found = chance(METHODS[method].wire(Choices(reference, workers, ties, zeros, "nearest")), workers)
    assert found == (None if wanted is None else pytest.approx(wanted))


@pytest.mark.wide(5)
@pytest.mark.parametrize("workers", [2, 3, 4, 5])
@pytest.mark.parametrize("method", ["dlion-mavo", "dlion-avg", "g-lion"])
def test_coins_among_coins_agree_as_chance_says_and_are_not_suspected(method: str, workers: int) -> None:
    small = {"bucket_bytes": 32} if method.startswith("d") else {}
    stats = simulated(workers, 8 * EVERY, method=method, faults=[Fault("random", range(workers))], **small).stats
    assert below_chance(stats) == []
    wanted = chance(METHODS[method].wire(Choices(reference, workers, "rotate", "balanced", "nearest")), workers)
    assert wanted is not None
    # numbers of honest workers have a direction, and sizes that do not come from a normal distribution
    near = 0.12 if method == "g-lion" else 0.06
    for rate, coin in zip(stats.agreement, stats.agreement_by_chance, strict=True):
        assert abs(rate - wanted) < near and abs(coin - wanted) < near


def test_what_a_coin_would_reach_is_counted_by_trying_both_sides() -> None:
    """One worker's votes replaced by all of +1, then all of -1: the mean is what a coin in its place expects."""
    votes = torch.randint(0, 2, (5, 400), generator=torch.Generator().manual_seed(4)).to(torch.int8) * 2 - 1
    for ties_out, workers in ((False, 5), (True, 4)):
        mine = votes[:workers]
        found = agreement_rates._of_votes(mine, mine.sum(0).sign().to(torch.int8), ties_out)
        for rank in range(workers):
            agreed = looked = 0
            for side in (-1, 1):
                tried = mine.clone()
                tried[rank] = side
                decided = tried.sum(0).sign()
                looked += int((decided != 0).sum())
                agreed += int((decided == side).sum())
            assert found[2, rank] == 2 * agreed and found[3, rank] == 2 * looked


def test_all_of_a_long_shard_comes_up_in_turn_and_never_the_padding() -> None:
    params = [nn.Parameter(torch.zeros(64 * 1000 + 10))]
    wire = METHODS["dlion-mavo"].wire(Choices(reference, 3, "rotate", "balanced", "nearest"))
    bucket = Layout.of([{"params": params}], 2**30, 64).buckets[0]
    ballots = torch.full((3, 1, 600), -1)  # a shard of two, whose last words lie behind the end
    seen = []
    for turn in range(5):
        sample = Sample(wire, bucket, turn, 3)
        sample.voters = [0, 1, 2]
        sample.take(ballots, ballots[0], first=600)
        assert sample.found is not None
        agreed, looked = sample.found[:2].tolist()
        assert agreed == looked and len(set(looked)) == 1
        seen.append(looked[0])
    assert max(seen) == 256 * 64 and min(seen) >= 256 * 64 - 54
    sample = Sample(wire, bucket, 0, 3)
    sample.voters = [0, 1, 2]
    sample.take(ballots, ballots[0], first=1001)  # all padding
    assert sample.found is None


def test_the_rates_look_back_over_some_samples_and_go_on_when_loaded() -> None:
    stats = Stats()
    assert stats.agreement == []
    stats.voted([3, 0], [4, 0], [8, 0], [16, 0])
    assert stats.agreement == [0.75, None] and stats.agreement_by_chance == [0.5, None]
    stats.voted([0, 2], [4, 4], [8, 8], [16, 16])
    assert stats.agreement == [KEPT * 3 / (KEPT * 4 + 4), 0.5]
    again = Stats()
    again.load_state_dict(copy.deepcopy(stats.state_dict()))
    assert again == stats
    again.voted(*[[1, 1]] * 4)
    assert again != stats
    again.voted(*[[1, 1, 1]] * 4)
    assert again.agreement == [1, 1, 1] and again.vote_samples == 1


@pytest.mark.parametrize("method", ["dgc", "graddrop", "ef-signsgd", "powersgd"])
def test_methods_whose_ballots_have_no_signs_count_nothing(method: str) -> None:
    assert simulated(3, EVERY, method=method).stats.agreement == []


def test_one_worker_alone_is_not_counted() -> None:
    assert simulated(1, EVERY).stats.agreement == []
