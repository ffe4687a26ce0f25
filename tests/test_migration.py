"""Checkpoints of other Lions go on here: the next step is theirs. Their steps are written anew, from their formulas."""

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlion
from dlion.migration import SOURCES

LR, FIRST_LR, BETAS, WD = 0.004, 0.01, (0.9, 0.97), 0.3


class TheirLion(torch.optim.Optimizer):
    """Lion with `decay(lr, wd, lr0)` as the factor of a parameter, and the momentum under `name`."""

    def __init__(self, params: list[Tensor], decay: Callable[[float, float, float], float], name: str) -> None:
        super().__init__(params, {"lr": FIRST_LR, "betas": BETAS, "weight_decay": WD})
        self.decay, self.momentum = decay, name

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        (b1, b2), lr = group["betas"], group["lr"]
        for param in group["params"]:
            kept = self.state[param].setdefault(self.momentum, torch.zeros_like(param, dtype=torch.float32))
            param.mul_(self.decay(lr, group["weight_decay"], FIRST_LR))
            param.add_((kept * b1).add(param.grad, alpha=1 - b1).sign(), alpha=-lr)
            kept.mul_(b2).add_(param.grad, alpha=1 - b2)


def plain(lr: float, wd: float, lr0: float) -> float:
    return 1 - lr * wd


def over_initial(lr: float, wd: float, lr0: float) -> float:
    return 1 - lr * (wd / lr0)


THEIRS = {
    "lion-pytorch": (plain, {}),
    "lion-pytorch-decoupled": (over_initial, {"initial_lr": FIRST_LR}),
    "llm-foundry": (over_initial, {}),
    "timm": (plain, {}),
    "deepspeed": (plain, {}),
    "bitsandbytes": (plain, {}),
}


def trained(source: str, steps: int = 20) -> tuple[TheirLion, list[Tensor]]:
    """Their Lion after some steps, and one parameter each of three shapes."""
    generator = torch.Generator().manual_seed(3)
    params = [torch.randn(shape, generator=generator, requires_grad=True) for shape in ((7, 300), (65,), ())]
    theirs = TheirLion(params, THEIRS[source][0], SOURCES[source].momentum)
    if source == "llm-foundry":
        theirs.param_groups[0]["initial_lr"] = FIRST_LR
    for _ in range(steps):
        gradients(params, generator)
        theirs.step()
    theirs.param_groups[0]["lr"] = LR  # a schedule has moved it: conventions differ from here on
    return theirs, params


def gradients(params: list[Tensor], generator: torch.Generator) -> None:
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize("source", THEIRS)
def test_the_next_step_is_theirs(source: str) -> None:
    theirs, params = trained(source)
    own = [param.detach().clone().requires_grad_() for param in params]
    ours = dlion.DistributedLion(own, lr=1.0)
    ours.load_state_dict(dlion.migrate(theirs.state_dict(), source, **THEIRS[source][1]))
    assert ours.param_groups[0]["t"] == 0 and ours.param_groups[0]["lr"] == LR

    gradients(params, torch.Generator().manual_seed(5))
    before = [theirs.state[param][theirs.momentum].clone() for param in params]
    for here, there in zip(own, params, strict=True):
        here.grad = there.grad
    theirs.step()
    ours.step()
    for here, there, momentum in zip(own, params, before, strict=True):
        old, new = (momentum * BETAS[0]).abs(), (there.grad * (1 - BETAS[0])).abs()
        clear = (momentum * BETAS[0] + there.grad * (1 - BETAS[0])).abs() > 1e-6 * (old + new)
        assert clear.float().mean() > 0.99 and torch.equal(here[clear], there[clear])
        kept, wanted = ours.state[here]["exp_avg"], theirs.state[there][theirs.momentum]
        parts = torch.stack([momentum * BETAS[1], there.grad * (1 - BETAS[1]), wanted])  # they may cancel
        ulp = 2.0 ** (parts.abs().amax(0).log2().floor() - 23)
        assert ((kept - wanted).abs() <= ulp).all()


@pytest.mark.parametrize(("source", "other"), [("lion-pytorch", "llm-foundry"), ("llm-foundry", "lion-pytorch")])
def test_the_wrong_convention_is_another_step(source: str, other: str) -> None:
    """Without this the test above could pass for every convention."""
    theirs, _ = trained(source)
    right = dlion.migrate(theirs.state_dict(), source, **THEIRS[source][1])
    wrong = dlion.migrate(theirs.state_dict(), other, initial_lr=FIRST_LR)
    assert right["param_groups"][0]["weight_decay"] != pytest.approx(wrong["param_groups"][0]["weight_decay"], rel=0.5)


def test_a_wrapped_momentum_is_found() -> None:
    wrapped = {"step": 3, "__bnb_optimizer_quant_state__": {"state1": torch.ones(2)}}
    assert dlion.migrate(a_state(wrapped), "bitsandbytes")["state"][0]["exp_avg"].tolist() == [1.0, 1.0]


def test_what_is_given_does_not_change() -> None:
    theirs, params = trained("timm")
    given = theirs.state_dict()
    copy = deepcopy(given)
    taken = dlion.migrate(given, "timm")
    taken["state"][0]["exp_avg"].zero_()
    assert torch.equal(given["state"][0]["exp_avg"], copy["state"][0]["exp_avg"])
    assert given["param_groups"] == copy["param_groups"] and params


def test_low_precision_momenta_become_float32() -> None:
    """lion-pytorch keeps the momentum of bfloat16 parameters in bfloat16."""
    param = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    group = {"params": [0], "lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}
    theirs = {"state": {0: {"exp_avg": torch.full((4,), 0.5, dtype=torch.bfloat16)}}, "param_groups": [group]}
    ours = dlion.DistributedLion([param])
    ours.load_state_dict(dlion.migrate(theirs, "lion-pytorch"))
    assert ours.state[param]["exp_avg"].tolist() == [0.5] * 4 and ours.state[param]["exp_avg"].dtype == torch.float32


def a_group(**more: Any) -> dict[str, Any]:
    return {"params": [0], "lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1, **more}


MOMENTUM = {"exp_avg": torch.zeros(2), "state1": torch.zeros(2)}


def a_state(kept: dict[str, Any] = MOMENTUM, **more: Any) -> dict[str, Any]:
    return {"state": {0: kept}, "param_groups": [a_group(**more)]}


@pytest.mark.parametrize(
    ("given", "source", "more", "says"),
    [
        ({"base_optimizer_state": []}, "deepspeed", {}, "no state dict of an optimizer.*ZeRO"),
        ([1], "timm", {}, "no state dict of an optimizer"),
        (
            {"state": {0: MOMENTUM}, "param_groups": [a_group()]},
            "adamw",
            {},
            "source='adamw' is not known.*lion-pytorch",
        ),
        ({"state": {0: {"step": 1}}, "param_groups": [a_group()]}, "timm", {}, "parameter 0 has no 'exp_avg' but step"),
        (
            {"state": {0: {"state1": torch.zeros(2, dtype=torch.uint8)}}, "param_groups": [a_group()]},
            "bitsandbytes",
            {},
            "quantized to 8 bits",
        ),
        (a_state({"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}), "timm", {}, "as Adam's have"),
        (a_state({"exp_avg": torch.tensor([0.0, float("nan")])}), "timm", {}, "is not finite"),
        (a_state({"exp_avg": torch.zeros(2, device="meta")}), "timm", {}, "not the state dict that timm writes"),
        (a_state({"exp_avg": torch.zeros(2).to_sparse()}), "timm", {}, "not the state dict that timm writes"),
        (a_state({"exp_avg": torch.zeros(2).to(torch.float8_e4m3fn)}), "timm", {}, "quantized to 8 bits"),
        (a_state(lr="x"), "timm", {}, "group 0 has an lr, betas or weight_decay that is no number"),
        (a_state(lr=torch.ones(2)), "timm", {}, "group 0 has an lr, betas or weight_decay that is no number"),
        (a_state(betas=("a", "b")), "timm", {}, "group 0 has an lr, betas or weight_decay that is no number"),
        (a_state(), "lion-pytorch-decoupled", {"initial_lr": "x"}, "give initial_lr"),
        (a_state(lr=-1.0), "timm", {}, "lr=-1.0, betas"),
        (a_state(betas=(1.9, 0.99)), "timm", {}, "two numbers in"),
        (a_state(weight_decay=None), "timm", {}, "not the state dict that timm writes"),
        ({"state": None, "param_groups": []}, "timm", {}, "not the state dict that timm writes"),
        (
            {"state": {}, "param_groups": [{"params": [0], "lr": 1.0}]},
            "timm",
            {},
            "not the state dict that timm writes",
        ),
        ({"state": {}, "param_groups": [3]}, "timm", {}, "not the state dict that timm writes"),
        (a_state(), "lion-pytorch-decoupled", {"initial_lr": float("inf")}, "give initial_lr"),
        ({"state": {0: MOMENTUM}, "param_groups": [a_group()]}, "bitsandbytes-coupled", {}, "inside the sign"),
        (
            {"state": {0: MOMENTUM}, "param_groups": [a_group(caution=True)]},
            "timm",
            {},
            "caution=True, which is not Lion",
        ),
        ({"state": {0: MOMENTUM}, "param_groups": [a_group()]}, "lion-pytorch-decoupled", {}, "give initial_lr"),
        ({"state": {0: MOMENTUM}, "param_groups": [a_group()]}, "llm-foundry", {"initial_lr": 0.0}, "give initial_lr"),
    ],
)
def test_what_cannot_go_on_is_refused(given: Any, source: str, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dlion.migrate(given, source, **more)


def test_coupled_decay_of_nothing_goes_on() -> None:
    taken = dlion.migrate({"state": {}, "param_groups": [a_group(weight_decay=0.0)]}, "bitsandbytes-coupled")
    assert taken["param_groups"][0]["weight_decay"] == 0.0


def test_suggestions_are_the_settings_of_the_paper() -> None:
    """arXiv 2404.00438, section 5: what AdamW and the Lion methods were given for each task."""
    for task, adamw, lion in (
        ("vision", (3e-3, 0.1), (3e-4, 1.0)),
        ("vision", (1e-3, 1.0), (1e-4, 10.0)),
        ("language", (3e-4, 0.1), (9e-5, 1.0)),
        ("language", (2e-5, 0.0), (6e-6, 0.01)),
    ):
        advice = dlion.suggest(*adamw, task)
        assert (advice.lr, advice.weight_decay) == lion and advice.betas == (0.9, 0.99)
        assert advice.lr in advice.lrs and list(advice.lrs) == sorted(advice.lrs)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((0.0,), "adamw_lr"),
        ((1e-3, -1.0), "adamw_wd"),
        ((1.0, 0.1, "x"), "task"),
        (("3e-4",), "adamw_lr"),
        ((1.0, 1e308), "adamw_wd"),
    ],
)
def test_suggestions_need_sense(given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dlion.suggest(*given)


def test_the_page_runs_as_written() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs/migration.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        exec(code, {})
    assert all(f"`{name}`" in page for name in SOURCES)
