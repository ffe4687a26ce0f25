"""What went wrong in a step on the device is raised one step later, on every worker, and nothing was applied since."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from resident_model import Model, on_device, optimizer_of, other_lr
from torch import Tensor, nn
from world import succeed, world

import dlion.checkpoint
from dlion import Distributed
from dlion.errors import AgreementError, CheckpointError, DlionError, NonFiniteGradientError
from dlion.resident import choice

assert on_device


Spoil = Callable[[Model, Distributed, int, int], None]


def spoiled(rank: int, group: Any, spoil: Spoil, bad: int, **options: Any) -> tuple[str, str, int, bool, bool]:
    """Kind and text of the first error, the step that raised it, and whether parameters rested from step `bad` on.

    The last: whether two steps after the error moved them again.
    """
    model = Model()
    optimizer = optimizer_of(model, group, **options)
    before = model.copies()
    for step in range(bad + 4):
        model.fill(rank, step)
        if step == bad:
            before = model.copies()
        spoil(model, optimizer, rank, step)
        try:
            optimizer.step()
        except DlionError as error:
            rested = all(map(torch.equal, before, model.copies()))
            return type(error).__name__, str(error), step, rested, goes_on(model, optimizer, rank)
    raise AssertionError("no error was raised")


def goes_on(model: Model, optimizer: Distributed, rank: int) -> bool:
    """Whether parameters move again where all workers are alike."""
    before = model.copies()
    for group in optimizer.param_groups:
        group.update(lr=0.01, betas=(0.9, 0.99), t=7)
    for step in range(2):
        model.fill(rank, step)
        optimizer.step()
    optimizer.check()
    return not torch.equal(before[0], model.a.detach())


def other_tensor(model: Model, optimizer: Distributed, rank: int, step: int) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5 if (rank, step) == (1, 2) else 0.25)


def other_betas(model: Model, optimizer: Distributed, rank: int, step: int) -> None:
    optimizer.param_groups[0]["betas"] = (0.8, 0.9) if (rank, step) == (2, 2) else (0.9, 0.99)


def other_t(model: Model, optimizer: Distributed, rank: int, step: int) -> None:
    if (rank, step) == (0, 2):
        optimizer.param_groups[0]["t"] = 9


def not_finite(model: Model, optimizer: Distributed, rank: int, step: int) -> None:
    if step == 2 and rank in (1, 2):
        (model.b if rank == 1 else model.c).grad.view(-1)[3] = torch.nan


SPOILS: list[tuple[Spoil, dict[str, Any], str]] = [
    (other_lr, {}, "on rank 1 group 0 has lr=0.5 instead of 0.01"),
    (other_tensor, {}, "on rank 1 group 0 has lr=0.5 instead of 0.25"),
    (other_betas, {"nonfinite": "skip"}, "on rank 2 group 0 has betas=[0.8, 0.9] instead of [0.9, 0.99]"),
    (other_t, {}, "on rank 0 t=9 steps were applied instead of 2"),
    (not_finite, {"nonfinite": "raise"}, "the gradient is not finite in b on rank 1, c on rank 2 at step t=2"),
]


@pytest.mark.wide(4)
@pytest.mark.parametrize("topology", ["sharded", "replicated", "server"])
@pytest.mark.parametrize(("spoil", "options", "text"), SPOILS, ids=lambda value: getattr(value, "__name__", None))
def test_what_differs_is_named_by_all_one_step_later(
    spoil: Spoil, options: dict[str, Any], text: str, topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = succeed(world(3, lambda r, g: spoiled(r, g, spoil, 2, topology=topology, **options)))
    kinds, texts, steps, rested, again = zip(*found, strict=True)
    assert len(set(texts)) == 1 and text in texts[0]
    assert set(steps) == {3} and all(rested) and all(again)
    monkeypatch.setattr(choice, "is_accelerator", lambda device: False)
    now = succeed(world(3, lambda r, g: spoiled(r, g, spoil, 2, topology=topology, **options)))
    assert [(kind, said) for kind, said, *_ in now] == list(zip(kinds, texts, strict=True))
    assert {step for _, _, step, _, _ in now} == {2}


def test_a_layout_that_changed_on_one_worker_is_named_one_step_later() -> None:
    def freeze(model: Model, optimizer: Distributed, rank: int, step: int) -> None:
        if (rank, step) == (1, 2):
            model.b.requires_grad_(False)

    def work(rank: int, group: Any) -> tuple[str, int]:
        model = Model()
        optimizer = optimizer_of(model, group)
        for step in range(5):
            model.fill(rank, step)
            freeze(model, optimizer, rank, step)
            before = model.copies()
            try:
                optimizer.step()
            except AgreementError as error:
                assert all(map(torch.equal, before, model.copies()))
                return str(error), step
        raise AssertionError("no error was raised")

    found = succeed(world(3, work))
    assert {text for text, _ in found} == {found[0][0]} and "b [5, 7] float32 is frozen" in found[0][0]
    assert found[0][0].startswith("the layout changed on rank 1 alone after t=2 steps")
    assert [step for _, step in found] == [3, 3, 3]


def test_a_layout_that_changes_everywhere_is_agreed_anew_with_the_bits_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(rank: int, group: Any) -> tuple[list[Tensor], Any, int]:
        model = Model()
        optimizer = optimizer_of(model, group)
        model.b.requires_grad_(False)
        for step in range(6):
            model.fill(rank, step)
            model.b.requires_grad_(step >= 3)
            optimizer.step()
        optimizer.check()
        stats = optimizer.stats.state_dict()
        counts = {name: stats[name] for name in ("steps", "skipped", "abstentions")}
        return model.copies(), counts, int(optimizer.param_groups[0]["t"])

    device = succeed(world(3, work))
    monkeypatch.setattr(choice, "is_accelerator", lambda device: False)
    for mine, there in zip(succeed(world(3, work)), device, strict=True):
        assert all(map(torch.equal, mine[0], there[0])) and mine[1:] == there[1:]


# ---- trouble that nobody has heard of yet


def troubled(rank: int, group: Any) -> tuple[Model, Distributed]:
    """After a step that was refused on all workers."""
    model = Model()
    optimizer = optimizer_of(model, group)
    for step in range(2):
        model.fill(rank, step)
        other_lr(model, optimizer, rank, step + 1)
        optimizer.step()
    return model, optimizer


def test_check_raises_it_at_once_and_then_nothing_more() -> None:
    def work(rank: int, group: Any) -> str:
        _, optimizer = troubled(rank, group)
        with pytest.raises(AgreementError) as caught:
            optimizer.check()
        optimizer.check()
        optimizer.verify_replicas()
        return str(caught.value)

    assert all("on rank 1 group 0 has lr=0.5 instead of 0.01" in text for text in succeed(world(3, work)))


def test_comparing_replicas_raises_it() -> None:
    def work(rank: int, group: Any) -> None:
        with pytest.raises(AgreementError, match="on rank 1 group 0 has lr"):
            troubled(rank, group)[1].verify_replicas()

    succeed(world(2, work))


def test_a_state_is_refused_by_one_worker_alone() -> None:
    """It communicates with nobody: rank 0 asks, and the others do not."""

    def work(rank: int, group: Any) -> None:
        _, optimizer = troubled(rank, group)
        if rank == 0:
            with pytest.raises(AgreementError, match=r"step t=1 was not applied .* call optimizer.check\(\)"):
                optimizer.state_dict()
        with pytest.raises(AgreementError, match="on rank 1"):
            optimizer.step()
        assert optimizer.state_dict()["param_groups"][0]["t"] == 1

    succeed(world(3, work))


def test_a_state_with_a_gradient_that_was_not_finite_is_refused() -> None:
    param = nn.Parameter(torch.ones(70))
    optimizer = Distributed([param], nonfinite="raise")
    param.grad = torch.full((70,), torch.nan)
    optimizer.step()
    with pytest.raises(NonFiniteGradientError, match="nonfinite='raise'"):
        optimizer.state_dict()
    with pytest.raises(NonFiniteGradientError, match="in parameter 0 of group 0 on rank 0 at step t=0"):
        optimizer.check()
    assert torch.equal(param, torch.ones(70)) and optimizer.stats.steps == 0


def test_no_checkpoint_is_written_of_it(tmp_path: Any) -> None:
    def work(rank: int, group: Any) -> None:
        model, optimizer = troubled(rank, group)
        with pytest.raises(CheckpointError, match="step t=1 was not applied"):
            dlion.checkpoint.save(tmp_path / "bad", model, optimizer)
        assert not (tmp_path / "bad").exists()

    succeed(world(2, work))


# ---- what is compared now and then


def test_a_replica_that_changed_is_mended_and_warned_about_where_step_is_called() -> None:
    def work(rank: int, group: Any) -> tuple[list[Tensor], int, int]:
        model = Model()
        optimizer = optimizer_of(model, group, verify_every=2, on_mismatch="repair")
        for step in range(4):
            if (rank, step) == (1, 1):
                model.a.detach()[3] += 1
            model.fill(rank, step)
            optimizer.step()
        return model.copies(), optimizer.stats.checks, optimizer.stats.repairs

    with pytest.warns(UserWarning, match="on rank 1 a differs .compared with rank 0.; they took") as caught:
        found = succeed(world(3, work))
    assert all(warning.filename == __file__ for warning in caught)
    for params, checks, repairs in found:
        assert all(map(torch.equal, params, found[0][0])) and (checks, repairs) == (1, 1)


def test_a_replica_that_changed_is_named() -> None:
    def work(rank: int, group: Any) -> None:
        model = Model()
        optimizer = optimizer_of(model, group, verify_every=2)
        for step in range(2):
            model.fill(rank, step)
            optimizer.step()
        if rank == 2:
            model.c.detach()[3] += 1
        with pytest.raises(AgreementError, match=r"not equal after t=2 steps: on rank 2 c differs"):
            optimizer.check()

    succeed(world(3, work))


def test_gradients_that_are_averaged_are_found_out() -> None:
    def work(rank: int, group: Any) -> None:
        model = Model()
        optimizer = optimizer_of(model, group)
        for step in range(5):
            model.fill(0, step)
            optimizer.step()

    with pytest.warns(UserWarning, match="gradients were equal on all 2 workers") as caught:
        succeed(world(2, work))
    assert all(warning.filename == __file__ for warning in caught)
