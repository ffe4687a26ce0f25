"""A stranger's method: the block in docs/add-a-method.md is run as it stands there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed
from dlion.cli import main
from dlion.methods import METHODS

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "add-a-method.md"


@pytest.fixture
def block() -> Iterator[str]:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    before = dict(METHODS)
    exec(compile(code, DOCUMENT.name, "exec"), {"__name__": "strange"})
    yield code
    METHODS.clear()
    METHODS.update(before)


def test_it_takes_less_than_thirty_lines(block: str) -> None:
    assert len(block.splitlines()) < 30
    assert "ef-sign-avg" in METHODS


def test_it_trains_three_workers_as_a_plain_loop_would(block: str) -> None:
    steps, lr, decay = 5, 0.1, 0.2
    own = [torch.Generator().manual_seed(rank) for rank in range(3)]
    grads = [[torch.randn(70, generator=own[rank]) for rank in range(3)] for _ in range(steps)]
    grads[2][1][4] = float("nan")

    def work(rank: int, group: object) -> tuple[Tensor, float]:
        param = nn.Parameter(torch.ones(70))
        opt = Distributed([param], "ef-sign-avg", lr, weight_decay=decay, process_group=group)
        for step in grads:
            param.grad = step[rank].clone()
            opt.step()
        return param.detach(), opt.stats.bits_per_param_sent

    param, errors = torch.ones(70), [torch.zeros(70) for _ in range(3)]
    for step in grads:
        votes = []
        for rank, grad in enumerate(step):
            if grad.isfinite().all():
                wanted = errors[rank] + grad
                errors[rank] = wanted - wanted.abs().mean() * wanted.sign()
                votes.append(wanted.sign())
        param = param * (1 - lr * decay) - torch.stack(votes).sum(0) * lr / len(votes)
    for found, bits in succeed(world(3, work)):
        torch.testing.assert_close(found, param)
        assert bits == pytest.approx(2 * (128 + 8 * 16) / 70, rel=0.01)  # two words and a header to each of two others


def test_what_a_dry_run_does_not_know_is_said_in_a_sentence(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--method", "ef-sign-avg", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "ballots of ef-sign-avg" in said
