"""Who gets which kernels: by the device of the parameters, and said once. No GPU is needed, nor Triton."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dlion import DistributedLion, ops
from dlion.ops import library, reference

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def said_anew() -> Iterator[None]:
    ops._announce.cache_clear()
    yield
    ops._announce.cache_clear()


def with_triton(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """As if Triton's kernels were this module; the reference where they cannot be imported."""
    monkeypatch.setattr(ops, "_gpu_kernels", lambda: module)
    monkeypatch.setattr(ops, "find_spec", lambda name: find_spec("torch"))


@pytest.mark.processes
def test_triton_is_not_imported_before_there_is_a_gpu_tensor() -> None:
    code = (
        "import sys, torch, dlion, dlion.ops, dlion.optim, dlion.simulate\n"
        "early = 'triton' in sys.modules\n"  # torch's own optimizers import it when the first is made
        "p = torch.nn.Parameter(torch.ones(70)); p.grad = torch.ones(70)\n"
        "dlion.DistributedLion([p]).step()\n"
        "print(early, [name for name in sys.modules if name.startswith('dlion.ops.triton')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.stdout.strip() == "False []", done.stderr


def test_parameters_on_a_gpu_get_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with_triton(monkeypatch, ModuleType("kernels"))
    with caplog.at_level(logging.INFO, "dlion"):
        for _ in range(2):
            assert ops.choose("auto", "cuda") == ops.choose("triton", "cuda:1") == ("triton", torch.ops.dlion)
        assert ops.choose("reference", "cuda") == ("reference", reference)
    assert caplog.messages == ["kernels: triton", "kernels: reference"]


def test_without_triton_a_gpu_gets_the_reference_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_triton(monkeypatch, reference)
    with caplog.at_level(logging.WARNING, "dlion"):
        assert ops.choose("auto", "cuda") == ops.choose("auto", "cuda") == ("reference", reference)
    assert len(caplog.records) == 1 and "there is no Triton to import" in caplog.text
    with pytest.raises(ValueError, match="found a triton that cannot be imported"):
        ops.choose("triton", "cuda")


def test_other_devices_get_the_reference() -> None:
    assert ops.choose("auto", "meta") == ("reference", reference)


def test_triton_that_is_not_installed_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="kernels='triton' needs the package triton"):
        DistributedLion([torch.nn.Parameter(torch.ones(3))], kernels="triton")


def test_kernels_of_another_device_are_an_error_at_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch, ModuleType("kernels"))
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = DistributedLion([param], kernels="triton")
    before = param.detach().clone()
    with pytest.raises(ValueError, match="kernels='triton' is not for parameters on cpu: move the model"):
        optimizer.step()
    assert torch.equal(param.detach(), before) and not optimizer.state
    monkeypatch.setattr(library, "_loaded", [object()])
    with pytest.raises(ValueError, match="kernels='native' is not for parameters on cuda"):
        ops.choose("native", "cuda")


def test_an_operator_for_the_gpu_is_looked_up_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ModuleType("kernels")
    kernels.tally_count = lambda ballots, planes: (ballots, planes)  # type: ignore[attr-defined]
    with_triton(monkeypatch, kernels)
    assert ops._on_gpu("tally_count")(1, 2) == (1, 2)
