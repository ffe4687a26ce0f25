"""What a constructor refuses, and what it says: the value that was given and the values that are allowed."""

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from dlion import Distributed, DistributedLion, Simulation
from dlion.settings import SETTINGS


def parameter(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, ("lr=-1.0", "0 or greater")),
        ({"lr": math.nan}, ("lr=nan", "finite")),
        ({"lr": math.inf}, ("lr=inf", "finite")),
        ({"lr": "0.1"}, ("lr='0.1'", "number")),
        ({"lr": [0.1]}, ("lr=[0.1]", "number")),
        ({"lr": torch.tensor([0.1, 0.2])}, ("2 elements", "one element")),
        ({"lr": torch.tensor(-0.5)}, ("lr=", "-0.5", "0 or greater")),
        ({"betas": (1.0, 0.99)}, ("betas=(1.0, 0.99)", "below 1")),
        ({"betas": (0.9, -0.1)}, ("betas=(0.9, -0.1)", "at least 0")),
        ({"betas": (0.9, math.nan)}, ("betas=(0.9, nan)", "two numbers")),
        ({"betas": (0.9,)}, ("betas=(0.9,)", "two numbers")),
        ({"betas": (0.9, 0.99, 0.999)}, ("betas=", "two numbers")),
        ({"betas": 0.9}, ("betas=0.9", "two numbers")),
        ({"betas": ("a", "b")}, ("betas=('a', 'b')", "two numbers")),
        ({"weight_decay": -0.1}, ("weight_decay=-0.1", "0 or greater")),
        ({"weight_decay": math.nan}, ("weight_decay=nan", "finite")),
        ({"weight_decay": math.inf}, ("weight_decay=inf", "finite")),
        ({"weight_decay": "much"}, ("weight_decay='much'", "number")),
        ({"vote": "plurality"}, ("vote='plurality'", "majority, average")),
        ({"topology": "ring"}, ("topology='ring'", "auto, sharded, replicated, server")),
        ({"ties": "up"}, ("ties='up'", "rotate, alternate, zero")),
        ({"ties": "zero"}, ("ties='zero'", "zeros='exact'")),
        ({"ties": "rotate", "vote": "average"}, ("ties='rotate'", "no majority")),
        ({"zeros": "up"}, ("zeros='up'", "balanced, exact")),
        ({"nonfinite": "ignore"}, ("nonfinite='ignore'", "abstain, skip, raise")),
        ({"kernels": "abacus"}, ("kernels='abacus'", "auto, reference")),
        ({"maximize": "yes"}, ("maximize='yes'", "True or False")),
        ({"bucket_bytes": 0}, ("bucket_bytes=0", "multiple of 8")),
        ({"bucket_bytes": -8}, ("bucket_bytes=-8", "positive")),
        ({"bucket_bytes": 12}, ("bucket_bytes=12", "multiple of 8")),
        ({"bucket_bytes": 8.0}, ("bucket_bytes=8.0", "multiple of 8")),
        ({"timeout": 0}, ("timeout=0", "positive")),
        ({"verify_every": -1}, ("verify_every=-1", "0 or None for never")),
        ({"verify_every": 1.5}, ("verify_every=1.5", "number of steps")),
        ({"verify_every": True}, ("verify_every=True", "number of steps")),
        ({"verify_every": 2**70}, ("verify_every=1180591620717411303424", "at most 1,000,000,000")),
        ({"verify_every": 10**5000}, ("verify_every=a number of 16610 bits", "at most 1,000,000,000")),
        ({"bucket_bytes": 2**70}, ("bucket_bytes=1180591620717411303424", "at most 1,099,511,627,776")),
        ({"timeout": 10**5000}, ("timeout=a number of 16610 bits", "seconds")),
        ({"lr": 10**5000}, ("lr=a number of 16610 bits", "0 or greater")),
        ({"betas": (10**5000, 0.9)}, ("betas=a tuple", "below 1")),
        ({"on_mismatch": "ignore"}, ("on_mismatch='ignore'", "raise, repair")),
        ({"timeout": -1.5}, ("timeout=-1.5", "positive")),
        ({"timeout": math.nan}, ("timeout=nan", "positive")),
        ({"timeout": math.inf}, ("timeout=inf", "positive")),
        ({"timeout": "soon"}, ("timeout='soon'", "seconds")),
        ({"timeout": 1e30}, ("timeout=1e+30", "seconds")),
        ({"timeout": timedelta(0)}, ("timeout=", "positive")),
        ({"timeout": True}, ("timeout=True", "seconds")),
        ({"lr": True}, ("lr=True", "number")),
        ({"lr": torch.tensor(True)}, ("lr=tensor(True)", "number")),
        ({"weight_decay": False}, ("weight_decay=False", "number")),
        ({"betas": (False, 0.99)}, ("betas=(False, 0.99)", "two numbers")),
        ({"process_group": "gloo"}, ("process_group='gloo'", "ProcessGroup")),
        ({"process_group": -100}, ("process_group=-100", "not a member")),
    ],
)
def test_options_out_of_range_are_refused_with_what_is_allowed(options: dict[str, Any], said: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        DistributedLion([parameter(1.0)], **options)
    for part in said:
        assert part in str(caught.value)


def test_methods_have_their_own_defaults_and_refuse_options_without_meaning() -> None:
    assert Distributed([parameter(1.0)]).param_groups[0]["lr"] == 1e-4
    adam = Distributed([parameter(1.0)], "g-adamw").param_groups[0]
    assert (adam["lr"], adam["betas"], adam["weight_decay"]) == (1e-3, (0.9, 0.999), 0.0)
    with pytest.raises(ValueError, match=r"method='sgd'.*dlion-mavo, dlion-avg, g-lion, g-adamw"):
        Distributed([parameter(1.0)], "sgd")
    with pytest.raises(ValueError, match="zeros='exact' has no meaning with method='g-lion'"):
        Distributed([parameter(1.0)], "g-lion", zeros="exact")
    with pytest.raises(ValueError, match="ties='rotate' has no meaning"):
        Distributed([parameter(1.0)], "g-adamw", ties="rotate")


ONE_BALLOT = ("graddrop", "dgc", "ef-signsgd", "powersgd")


def test_options_that_a_baseline_cannot_have_are_refused_in_one_sentence() -> None:
    for method in (*ONE_BALLOT, "terngrad"):
        with pytest.raises(ValueError, match=f"overlap=True has no meaning with method='{method}', which needs all"):
            Distributed([parameter(1.0)], method, overlap=True)
        with pytest.raises(ValueError, match=rf"betas=\(0.9, 0.99\) has no meaning with method='{method}'"):
            Distributed([parameter(1.0)], method, betas=(0.9, 0.99))
    for method in ONE_BALLOT:
        with pytest.raises(ValueError, match=f"bucket_bytes=64 has no meaning with method='{method}'"):
            Distributed([parameter(1.0)], method, bucket_bytes=64)
        with pytest.raises(ValueError, match=f"topology='sharded' has no meaning with method='{method}'"):
            Distributed([parameter(1.0)], method, topology="sharded")
    with pytest.raises(ValueError, match=r"momentum_dtype=.* has no meaning with method='signsgd-mavo'"):
        Distributed([parameter(1.0)], "signsgd-mavo", momentum_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("method", "settings", "wrong"),
    [
        ("d-signum-mavo", {"momentum": 0.99}, {"momentum": 1.0}),
        ("d-signum-avg", {"momentum": 0.99}, {"momentum": -0.1}),
        ("signsgd-mavo", {}, {"momentum": 0.9}),
        ("terngrad", {"clip": 2.5, "seed": 0, "momentum": 0.9}, {"clip": -1}),
        ("graddrop", {"keep": 0.01, "threshold": "global", "momentum": 0.9}, {"threshold": "local"}),
        ("dgc", {"keep": 0.001, "momentum": 0.9, "clip": 0.0, "warmup": 0}, {"keep": 0}),
        ("ef-signsgd", {}, {"keep": 0.5}),
        ("powersgd", {"rank": 2, "seed": 0, "momentum": 0.9}, {"rank": 0}),
    ],
)
def test_a_baselines_settings(method: str, settings: dict[str, Any], wrong: dict[str, Any]) -> None:
    group = Distributed([parameter(1.0)], method).param_groups[0]
    assert {name: value for name, value in group.items() if name in SETTINGS} == settings
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Distributed([parameter(1.0)], method, **wrong)


@pytest.mark.parametrize(
    ("method", "name", "most"), [("dgc", "warmup", 10**9), ("powersgd", "rank", 10**9), ("powersgd", "seed", 2**63 - 1)]
)
def test_what_is_counted_has_an_end(method: str, name: str, most: int) -> None:
    for wrong in (most + 1, 2**70, 10**5000):
        with pytest.raises(ValueError, match=rf"{name}=\S.* must be a whole number.*, \d to "):
            Distributed([parameter(1.0)], method, **{name: wrong})
    Distributed([parameter(1.0)], method, **{name: most})
    optimizer = Distributed([parameter(1.0)], bucket_bytes=2**40, verify_every=10**9)
    optimizer.step()
    with pytest.raises(ValueError, match=r"workers=.* must be a number of workers, at least 1 and at most"):
        Simulation(nn.Linear(1, 1), workers=2**70)


def test_settings_are_those_of_the_method_and_live_in_its_groups() -> None:
    groups = [{"params": [parameter(1.0)]}, {"params": [parameter(2.0)], "eps": 1e-3}]
    optimizer = Distributed(groups, "g-adamw", eps=1e-5)
    assert [group["eps"] for group in optimizer.param_groups] == [1e-5, 1e-3]
    with pytest.raises(ValueError, match=r"keep=0\.1 is no setting of method='g-adamw', its settings are eps, amsgrad"):
        Distributed([parameter(1.0)], "g-adamw", keep=0.1)
    with pytest.raises(ValueError, match="eps=1e-05 is no setting of method='dlion-mavo', which has no settings"):
        Distributed([parameter(1.0)], eps=1e-5)
    for wrong in (-1.0, math.nan, math.inf, "small", True, 10**400):
        with pytest.raises(ValueError, match="must be a finite number, 0"):
            Distributed([parameter(1.0)], "g-adamw", eps=wrong)
    for name in ("lr", "weight_decay"):  # no float holds it
        with pytest.raises(ValueError, match=f"{name}=1000.* must be a finite number, 0 or greater"):
            Distributed([parameter(1.0)], **{name: 10**400})
    with pytest.raises(ValueError, match="amsgrad=1 must be True or False"):
        Distributed([{"params": [parameter(1.0)], "amsgrad": 1}], "g-adamw")
    with pytest.raises(TypeError):
        DistributedLion([parameter(1.0)], eps=1e-5)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn])
def test_dtypes_that_cannot_be_voted_on_are_refused_unless_frozen(dtype: torch.dtype) -> None:
    odd = nn.Parameter(torch.ones(2).to(dtype))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"odd is {name}.*float32, float64, bfloat16, float16"):
        DistributedLion([("odd", odd)])
    odd.requires_grad_(False)
    optimizer = DistributedLion([odd, parameter(1.0)])
    optimizer.step()
    odd.requires_grad_(True)
    with pytest.raises(ValueError, match=f"is {name}"):
        optimizer.step()


def test_sparse_gradients_are_refused_and_name_the_remedy() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = DistributedLion(table.parameters())
    table(torch.tensor([1])).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(before, table.weight)
    with pytest.raises(ValueError, match="sparse"):
        DistributedLion([nn.Parameter(torch.eye(2).to_sparse())])


@pytest.mark.parametrize(
    ("given", "sizes"), [({}, (2**20, 2**25)), ({"overlap": True}, (2**17, 2**21)), ({"bucket_bytes": 64}, (64, 64))]
)
def test_buckets_are_larger_on_an_accelerator_unless_something_was_asked_for(
    given: dict[str, Any], sizes: tuple[int, int]
) -> None:
    options = Distributed([parameter(1.0)], **given).options
    assert (options.bucket_on(torch.device("cpu")), options.bucket_on(torch.device("cuda", 1))) == sizes
