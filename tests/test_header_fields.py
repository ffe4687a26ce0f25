"""Every field of a header that says something else than the others' is found, and the error names whose it was."""

import copy
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from world import world

from dlion import DistributedLion
from dlion.errors import AgreementError
from dlion.header import BallotHeader, Status, VerdictHeader

MODEL = nn.Linear(40, 30)
WRONG = threading.local()  # .fields: what this thread's worker writes into its headers


def step(model: nn.Module, opt: torch.optim.Optimizer, seed: int) -> None:
    opt.zero_grad()
    model(torch.randn(4, 40, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    opt.step()


def errors(kind: type, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, topology: str = "sharded") -> list[str]:
    """What every rank says when rank 1's headers have other fields from the third step on."""
    encode = kind.encode

    def spoiled(header: Any) -> torch.Tensor:
        return encode(replace(header, **getattr(WRONG, "fields", {})))

    monkeypatch.setattr(kind, "encode", spoiled)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.named_parameters(), process_group=group, topology=topology)
        for number in range(3):
            WRONG.fields = fields if rank == 1 and number == 2 else {}
            step(model, opt, 10 * number + rank)

    results = world(3, work)
    assert all(isinstance(result, AgreementError) for result in results), results
    return [str(result) for result in results]


@pytest.mark.parametrize("topology", ["sharded", "replicated", "server"])
@pytest.mark.parametrize("field", ["version", "bucket", "t", "hyper"])
def test_a_ballot_whose_header_is_not_what_its_worker_says_of_itself(
    field: str, topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in errors(BallotHeader, {field: 77}, monkeypatch, topology):
        assert (
            "the header of a row of rank 1 has another version, bucket, t or hyper-parameters than the others'" in text
        )


def test_a_ballot_of_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in errors(BallotHeader, {"layout": 77}, monkeypatch):
        assert "the layout changed on rank 1 alone after t=2 steps" in text


def test_a_ballot_that_says_its_layout_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in errors(BallotHeader, {"status": Status.LAYOUT_CHANGED}, monkeypatch):
        assert "the layout changed on rank 1 alone after t=2 steps" in text


@pytest.mark.parametrize("field", ["version", "bucket", "t", "voters", "abstentions"])
def test_a_verdict_that_contradicts_the_others(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in errors(VerdictHeader, {field: 7}, monkeypatch):
        assert (
            "the header of a row of rank 1 has another version, bucket, t or hyper-parameters than the others'" in text
        )


def test_a_worker_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from dlion import agreement

    report = agreement.report

    def other(*args: Any) -> dict[str, Any]:
        return report(*args) | getattr(WRONG, "fields", {})

    monkeypatch.setattr(agreement, "report", other)
    for text in errors(BallotHeader, {"version": 2}, monkeypatch):
        assert "on rank 1 rows have version 2 instead of 1 (compared with rank 0)" in text
