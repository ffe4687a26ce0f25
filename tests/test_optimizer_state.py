"""The optimizer's state: saving, loading, pickling, copying, and torch.distributed.checkpoint's view of it."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

from dlion import Distributed, DistributedLion
from dlion.methods import METHODS
from dlion.ops import library

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 70), nn.Linear(70, 3))
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator).to(dtype)
    return model


MODEL = model_of()


def fill_gradients(optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        fill_gradients(optimizer, seed)
        optimizer.step()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_loaded_state_goes_on_to_the_bit(method: str, dtype: torch.dtype) -> None:
    if method == "g-adamw" and dtype == torch.float16:
        pytest.skip("torch's AdamW itself divides by 0 in float16: its eps of 1e-8 is 0 there")
    whole = model_of(dtype)
    optimizer = Distributed(whole.parameters(), method, lr=0.01, weight_decay=0.1)
    train(optimizer, range(4))
    resumed = copy.deepcopy(whole)
    saved = through_file(optimizer.state_dict())
    train(optimizer, range(4, 8))

    again = Distributed(resumed.parameters(), method, lr=7.0)
    again.load_state_dict(saved)
    train(again, range(4, 8))
    assert same(whole, resumed)
    assert again.param_groups[0]["t"] == 8 and again.param_groups[0]["lr"] == 0.01
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        mine, theirs = optimizer.state[a], again.state[b]
        assert mine.keys() == theirs.keys() and bool(mine) == (method != "signsgd-mavo")
        assert all(mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_momentum_is_wide_whatever_was_saved(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    model = model_of(dtype)
    optimizer = DistributedLion(model.parameters(), lr=0.01)
    train(optimizer, range(2))
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {wide}
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].bfloat16()  # for instance from another implementation
    optimizer.load_state_dict(saved)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {wide}


def test_a_loaded_dictionary_is_not_shared_and_not_changed() -> None:
    model = copy.deepcopy(MODEL)
    optimizer = DistributedLion(model.parameters(), lr=0.01)
    train(optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    again = DistributedLion(copy.deepcopy(model).parameters())
    again.load_state_dict(saved)
    train(again, range(2))
    assert saved["param_groups"] == kept["param_groups"]
    assert all(torch.equal(saved["state"][k]["exp_avg"], kept["state"][k]["exp_avg"]) for k in kept["state"])


def test_momentum_of_another_shape_is_refused_and_nothing_changes() -> None:
    model = copy.deepcopy(MODEL)
    optimizer = DistributedLion(model.parameters(), lr=0.01)
    train(optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(before)
    bad["param_groups"][0]["lr"] = 9.0
    bad["state"][2]["exp_avg"] = torch.ones(3, 71)
    with pytest.raises(ValueError, match=r"parameter 2 has shape \[3, 71\].*\[3, 70\]"):
        optimizer.load_state_dict(bad)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][k]["exp_avg"], before["state"][k]["exp_avg"]) for k in before["state"])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


def test_the_users_load_hooks_have_the_first_and_the_last_word() -> None:
    optimizer = DistributedLion([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], lr=0.01)
    train(optimizer, range(1))
    saved = optimizer.state_dict()

    def before(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        return given | {"state": {0: {"exp_avg": torch.full((3,), 0.1)}}}

    def after(loaded: torch.optim.Optimizer) -> None:
        (state,) = loaded.state.values()
        seen.append(state["exp_avg"].clone())
        state["exp_avg"].mul_(2)

    seen: list[torch.Tensor] = []
    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(saved)
    (state,) = optimizer.state.values()
    assert torch.equal(seen[0], torch.full((3,), 0.1))  # in float32, not as bfloat16 rounds it
    assert torch.equal(state["exp_avg"], torch.full((3,), 0.2))


def test_a_dictionary_without_newer_keys_takes_their_defaults() -> None:
    optimizer = DistributedLion(copy.deepcopy(MODEL).parameters(), lr=0.01)
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    for name in ("t", "maximize"):
        del saved["param_groups"][0][name]
    again = DistributedLion(copy.deepcopy(MODEL).parameters(), lr=0.01)
    again.load_state_dict(saved)
    assert (again.param_groups[0]["t"], again.param_groups[0]["maximize"]) == (0, False)
    train(again, range(1))


# ---- frozen parameters


def test_frozen_parameters_cost_nothing_until_they_thaw() -> None:
    model = copy.deepcopy(MODEL)
    frozen = model[0].requires_grad_(False)
    optimizer = DistributedLion(model.parameters(), lr=0.5)
    before = copy.deepcopy(frozen)
    train(optimizer, range(3))
    assert same(before, frozen) and set(optimizer.state) == set(model[1].parameters())
    saved = optimizer.state_dict()
    assert set(saved["state"]) == {2, 3}
    again = DistributedLion(copy.deepcopy(model).parameters())
    again.load_state_dict(saved)

    frozen.requires_grad_(True)
    train(optimizer, range(1))
    assert len(optimizer.state) == 4 and optimizer.param_groups[0]["t"] == 4
    moved = before.weight - frozen.weight
    assert torch.allclose(moved.abs(), torch.tensor(0.5), atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_state_that_was_deleted_starts_at_zero(method: str) -> None:
    """torch's optimizers take `state.clear()` for a new start; so does this one."""
    model = model_of()
    optimizer = Distributed(model.parameters(), method, lr=0.01)
    train(optimizer, range(2))
    fresh = copy.deepcopy(model)
    optimizer.state.clear()
    train(optimizer, range(2, 4))
    again = Distributed(fresh.parameters(), method, lr=0.01)
    again.param_groups[0]["t"] = 2
    train(again, range(2, 4))
    assert same(model, fresh)


def test_state_dict_before_the_first_step_allocates_nothing() -> None:
    optimizer = DistributedLion(copy.deepcopy(MODEL).parameters())
    assert optimizer.state_dict()["state"] == {} and not optimizer.state


# ---- copies


def test_a_deep_copy_has_its_own_state_and_goes_on_alike() -> None:
    model = copy.deepcopy(MODEL)
    optimizer = DistributedLion(model.parameters(), lr=0.01)
    train(optimizer, range(2))
    twin, mirror = copy.deepcopy((model, optimizer))
    assert mirror.param_groups[0]["params"][0] is next(twin.parameters())
    train(optimizer, range(2, 4))
    assert not same(model, twin)
    train(mirror, range(2, 4))
    assert same(model, twin) and mirror.stats == optimizer.stats and mirror.stats is not optimizer.stats


@pytest.mark.parametrize("method", METHODS)
def test_a_pickled_optimizer_goes_on_alike(method: str) -> None:
    model = copy.deepcopy(MODEL)
    options = {"bucket_bytes": 64} if "bucket_bytes" in METHODS[method].options else {}
    optimizer = Distributed(model.parameters(), method, lr=0.01, timeout=5, **options)
    train(optimizer, range(2))
    twin, mirror = pickle.loads(pickle.dumps((model, optimizer)))
    train(optimizer, range(2, 4)), train(mirror, range(2, 4))
    assert same(model, twin) and mirror.options == optimizer.options
    train(optimizer, range(4, 5))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    third, other = torch.load(file, weights_only=False)
    train(optimizer, range(5, 7)), train(other, range(5, 7))
    assert same(model, third)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_allocating_state_moves_nothing(method: str, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    optimizer = Distributed(model.parameters(), method, lr=0.0, weight_decay=0.5)
    optimizer.step()
    assert same(model, model_of(dtype)) and len(optimizer.state) == 4
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("method", METHODS)
def test_torch_distributed_checkpoint_reads_and_writes_it(method: str) -> None:
    """Its getter steps a fresh optimizer with lr 0: state appears, nothing moves, nothing is counted."""
    model = copy.deepcopy(MODEL)
    optimizer = Distributed(model.named_parameters(), method, lr=0.01, weight_decay=0.5)
    fresh = dcp.get_optimizer_state_dict(model, optimizer)
    assert same(model, MODEL) and optimizer.param_groups[0]["t"] == 0 and optimizer.param_groups[0]["lr"] == 0.01
    assert set(fresh["state"]) == {name for name, _ in model.named_parameters()}
    assert not any(value.any() for state in fresh["state"].values() for value in state.values())

    train(optimizer, range(3))
    saved = through_file(dcp.get_optimizer_state_dict(model, optimizer))
    resumed = copy.deepcopy(model)
    train(optimizer, range(3, 5))
    again = Distributed(resumed.named_parameters(), method, lr=5.0)
    dcp.set_optimizer_state_dict(resumed, again, saved)
    train(again, range(3, 5))
    assert same(model, resumed) and again.param_groups[0]["t"] == 5 and again.param_groups[0]["lr"] == 0.01


def test_kernels_are_chosen_anew_where_an_optimizer_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another machine, without the compiled ones."""
    optimizer = DistributedLion([torch.nn.Parameter(torch.ones(2))])
    stored = pickle.dumps(optimizer)
    monkeypatch.setattr(library, "_loaded", [])
    assert pickle.loads(stored).kernels == "reference"
