"""What another worker sends and makes no sense: an error that says so, and no more memory than its rows take."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_faults import Small, noise
from torch import Tensor
from world import succeed, world

from dlion import Distributed, agreement
from dlion.baselines.sparse import Entries, mean_of
from dlion.channel import REPORT_BYTES, Channel, told_by
from dlion.codecs import CountPlanes, SumPlanes
from dlion.elastic.standing import Standing
from dlion.errors import AgreementError, ExchangeError
from dlion.header import NOBODY, Status, VerdictHeader, worst
from dlion.layout import Layout


class Lengths(Channel):
    """A channel on which worker 1 announces a report of some length."""

    def __init__(self, length: int) -> None:
        self.rank, self.size, self.device, self._length = 0, 2, torch.device("cpu"), length
        self.roll_call: Any = SimpleNamespace(ranks=[0, 1])

    def all_gather(self, row: Tensor) -> Any:
        return SimpleNamespace(wait=lambda: torch.tensor([[int(row[0])], [self._length]]))


@pytest.mark.parametrize("length", [2**60, REPORT_BYTES + 1, 0, -1])
def test_a_report_of_impossible_length_takes_no_memory(length: int) -> None:
    with pytest.raises(ExchangeError, match="rank 1 announced a report of"):
        Lengths(length).gather_json({"a": 1})


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000])
def test_a_report_that_is_no_json_names_its_sender(text: bytes) -> None:
    with pytest.raises(ExchangeError, match="rank 3 sent a report that is no JSON"):
        told_by(3, text)


def report(**changes: Any) -> dict[str, Any]:
    groups: Any = [{"params": [torch.nn.Parameter(torch.zeros(3))], "lr": 0.1, "t": 4}]
    own = agreement.report(groups, {"method": "x"}, agreement.hyper_parameters(groups, ["lr"]), Status.OK)
    return {**json.loads(json.dumps(own)), **changes}


BAD = [None, 3, [], {}, report(t="4"), report(hyper=[1]), report(parameters=[[0, 0]]), report(not_finite=3)]


@pytest.mark.parametrize("told", [*BAD, {key: value for key, value in report().items() if key != "not_finite"}])
def test_a_report_that_cannot_be_read_names_its_sender(told: Any) -> None:
    with pytest.raises(AgreementError, match="rank 1 sent a report of itself that cannot be read"):
        agreement.checked_reports([report(), told], [0, 1])


def test_a_difference_is_found_whatever_a_report_has_too_much() -> None:
    ranks = [0, 1, 2]
    heard = agreement.checked_reports([report(), report(options={"method": "x", "more": 1}), report()], ranks)
    assert "on rank 1 more=1 instead of None" in str(agreement.explain_layouts(heard, ranks))
    loud = agreement.checked_reports([report(), report(options={"method": "\a" + "x" * 5000}), report()], ranks)
    text = str(agreement.explain_layouts(loud, ranks))
    assert text.isprintable() and len(text) < 600


def test_a_verdict_with_more_votes_than_workers_asks_for_a_diagnosis() -> None:
    said = [VerdictHeader(Status.OK, 0, 3, 9, 0, NOBODY)] * 3
    assert worst(said, 9).status == Status.OK
    assert worst(said, 3).status == Status.HYPERPARAMETERS_DIFFER


@pytest.mark.parametrize("codec", [CountPlanes(), SumPlanes()])
def test_counts_of_more_than_all_move_as_far_as_all(codec: Any) -> None:
    levels = codec.decode(torch.zeros(4, 1, dtype=torch.int64), 3)
    assert max(levels.numerators) == levels.denominator == 3 and len(levels.numerators) == 16


@pytest.mark.parametrize("index", [-1, 150, 2**31 - 1])
def test_an_entry_outside_its_bucket_is_refused(index: int) -> None:
    bucket = Layout.of([{"params": [torch.nn.Parameter(torch.zeros(150))]}], 1000, 1).buckets[0]
    with pytest.raises(ExchangeError, match=f"a value for element {index} of a bucket that has 150"):
        mean_of([Entries(torch.tensor([0, index]), torch.ones(2), 2)], bucket)


@pytest.mark.parametrize("asked", [1e18, float("inf"), float("nan"), -5.0])
def test_rows_of_impossible_length_are_refused_by_all(asked: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three asks for rows that no memory holds, as GradDrop and DGC may ask for longer ones."""
    from dlion.baselines import residual

    question = residual.Question

    def lying(how: Any, values: Tensor) -> Any:
        return question(how, torch.full_like(values, asked))

    monkeypatch.setattr(residual, "Question", lying)

    def work(rank: int, group: Any) -> str:
        model = Small()
        optimizer = Distributed(model.parameters(), "graddrop", process_group=group, keep=0.1)
        for param in model.parameters():
            param.grad = noise(rank, 0, param)
        with pytest.raises(ExchangeError) as caught:
            optimizer.step()
        return str(caught.value)

    assert all("a worker asks for rows of" in told for told in succeed(world(3, work)))


def test_a_standing_that_no_worker_can_have_is_refused() -> None:
    good = Standing(5, 3, 0, 3, 1, 2, 3, 1, {"a": 1})
    assert Standing.decode(good.encode()) == good
    for number in (-1, 2**62):
        row = Standing(number, 3, 0, 3, 1, 2, 3, 1).encode()
        with pytest.raises(ExchangeError, match=f"at step 3 of round {number}"):
            Standing.decode(row)
    row = good.encode()
    row[-440:] = ord("[")
    with pytest.raises(ExchangeError, match="a note that is no JSON"):
        Standing.decode(row)
