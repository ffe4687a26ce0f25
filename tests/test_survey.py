"""The survey before the ballots: what is asked, how it is answered, and that nobody waits for ever."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed
from dlion.channel import Channel
from dlion.errors import AgreementError
from dlion.methods import METHODS, VOTES, Method, majority
from dlion.phases import Phases
from dlion.rules import Lion
from dlion.stats import Stats
from dlion.survey import Question, Survey

HOWS = ("sum", "largest")
LENGTHS = (0, 1, 5, 2000)  # the last one travels in shards among more than two workers


def values_of(rank: int, length: int) -> Tensor:
    own = torch.Generator().manual_seed(100 * length + rank)
    return (-1.0) ** rank * 1e4 + torch.randn(length, generator=own)


def plain(how: str, workers: int, length: int) -> Tensor:
    """One number and one worker after another, in rank order."""
    total = values_of(0, length).tolist()
    for rank in range(1, workers):
        for place, value in enumerate(values_of(rank, length).tolist()):
            both = torch.tensor(total[place]) + torch.tensor(value)
            total[place] = max(total[place], value) if how == "largest" else float(both)
    return torch.tensor(total)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_everybody_gets_the_answer_of_a_plain_loop(workers: int) -> None:
    def work(rank: int, group: object) -> tuple[list[Tensor], Stats]:
        heard: list[Tensor] = []

        def ask() -> Iterator[Question]:
            for how in HOWS:
                for length in LENGTHS:
                    heard.append((yield Question(how, values_of(rank, length))))

        stats = Stats()
        Survey(Channel(group) if workers > 1 else None, stats, Phases()).conduct(ask())
        return heard, stats

    wanted = [plain(how, workers, length) for how in HOWS for length in LENGTHS]
    sharded = -(-2000 // workers)
    long = 8 * (workers - 1) * sharded if workers > 2 else 4 * (workers - 1) * 2000
    for heard, stats in succeed(world(workers, work)):
        assert all(torch.equal(a, b) for a, b in zip(heard, wanted, strict=True))
        assert stats.bytes_sent == stats.bytes_received == 2 * (4 * (workers - 1) * 6 + long)


class Asking(Lion):
    """Lion, if every worker knows first how many there are and whose gradient is the largest."""

    def survey(self, replica: object, moment: object) -> Iterator[Question]:
        everybody = yield Question("sum", torch.ones(1))
        assert 0 < float(everybody) <= moment.workers  # blanks count nothing
        yield Question("largest", torch.zeros(2000))


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(METHODS, "asking", Method("asks", Asking, majority, VOTES - {"overlap"}))
    return "asking"


MODEL = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def build(method: str, group: object) -> tuple[nn.Module, Distributed]:
    model = copy.deepcopy(MODEL)  # initialised once: worlds of threads share torch's generator
    return model, Distributed(model.named_parameters(), method, process_group=group, timeout=20)


def step(model: nn.Module, opt: Distributed, rank: int) -> None:
    opt.zero_grad()
    model(torch.full((2, 3), rank + 1.0)).square().mean().backward()
    opt.step()


@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_whose_layout_changed_takes_part_and_is_named(asking: str, workers: int) -> None:
    def work(rank: int, group: object) -> str:
        model, opt = build(asking, group)
        step(model, opt, rank)
        if rank == 1:
            model[1].weight.requires_grad_(False)
        with pytest.raises(AgreementError) as error:
            step(model, opt, rank)
        return str(error.value)

    for text in succeed(world(workers, work)):
        assert "the layout changed on rank 1 alone" in text and "1.weight" in text


def test_a_layout_that_changed_everywhere_is_surveyed_anew(asking: str) -> None:
    def work(rank: int, group: object) -> tuple[int, Tensor]:
        model, opt = build(asking, group)
        step(model, opt, rank)
        model[1].weight.requires_grad_(False)
        step(model, opt, rank)
        return opt.param_groups[0]["t"], model[0].weight.detach()

    ranks = succeed(world(3, work))
    assert all(t == 2 and torch.equal(weight, ranks[0][1]) for t, weight in ranks)


def test_a_method_with_a_survey_refuses_overlap(asking: str) -> None:
    with pytest.raises(ValueError, match="overlap=True has no meaning with method='asking'"):
        Distributed([nn.Parameter(torch.ones(1))], asking, overlap=True)
