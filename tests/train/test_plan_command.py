"""Guards the command `dlion plan`: its tables and files, where sizes come from, and mistakes of the user."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import dlion, environment
from safetensors.torch import save_file

from dlion.cli import main
from dlion.train.bench.model import build_gpt
from dlion.train.bench.settings import BenchConfig
from dlion.train.models import MODELS
from dlion.train.plan.methods import METHODS
from dlion.train.plan.settings import PlanConfig
from dlion.train.plan.sizes import Sizes
from dlion.train.plan.sources import model_shapes, sizes_of
from dlion.train.pretrained import CAUSAL_LM

RECIPES = [
    ("cifar10-vit", 9_519_626, 4),
    ("openwebtext-gpt2pp-760m", 758_300_000, 32),
    ("instruct-llama-7b", 6_738_415_616, 4),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan's files."""
    out = tmp_path_factory.mktemp("plan") / "here"
    assert main(["plan", "--workers", "16", "--out", str(out)]) == 0
    return out


def test_both_files_are_written_and_open_offline(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["index.html", "plan.json"]
    page = (folder / "index.html").read_text()
    assert page.count("<svg") == 4 and "http" not in page.replace("http://www.w3.org", "")
    assert "What this leaves out" in page and "ddp-powersgd" in page and "≥ " in page


def test_the_json_holds_every_method_and_adds_up(folder: Path) -> None:
    result: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    assert list(result["methods"]) == list(METHODS)
    assert result["model"] == {"name": "model bench", "parameters": 4902144, "tensors": 45}
    for found in [*result["methods"].values(), *result["topologies"].values()]:
        assert found["seconds"] == pytest.approx(found["compute"] + found["local"] + found["exposed"])
        assert found["bits_per_parameter"] == 8 * found["sent"] / 4902144
    for name, row in result["bandwidths"]["seconds"].items():
        assert row == sorted(row, reverse=True), name  # a quicker link is never slower
    assert set(result["topologies"]) == {
        f"{name}, {topology}"
        for name in ("dlion-mavo", "dlion-avg")
        for topology in ("sharded", "replicated", "server")
    }


def test_the_tables_name_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--parameters", "1e6", "--workers", "1000"]) == 0
    said = capsys.readouterr().out
    assert "1,000,000 parameters (1 tensor); 1,000 workers on 125 nodes of 8" in said
    for words in ("break-even", "N = 100,000", "not within 2%", "What this leaves out", "lower bound"):
        assert words in said, words


@pytest.mark.parametrize("workers", ["1", "2", "4"])
def test_few_workers_have_a_plan(workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--parameters", "1e5", "--workers", workers, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert ("1 worker on one node" in said) is (workers == "1") and "on one node" in said
    result = json.loads((tmp_path / "plan.json").read_text())
    evens = [found["break_even"] for found in result["methods"].values()]
    assert (evens == [None] * len(evens)) is (workers == "1")
    assert (tmp_path / "index.html").stat().st_size > 10_000


@pytest.mark.processes
def test_a_count_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from dlion.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    arguments = [sys.executable, "-c", code, "plan", "--parameters", "7e9"]
    subprocess.run(arguments, cwd=tmp_path, env=environment(), check=True, stdout=subprocess.DEVNULL)


@pytest.mark.processes
def test_nothing_is_written_without_a_folder(tmp_path: Path) -> None:
    dlion(["plan", "--parameters", "1e6"], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--parameters", "0"], "--parameters must be a whole number, at least 1, and 0.0 was given."),
        (["--parameters", "1.5"], "--parameters must be a whole number, at least 1, and 1.5 was given."),
        (["--parameters", "5", "--tensors", "6"], "--tensors must be 1 to --parameters, and 6 was given."),
        (["--tensors", "6"], "--tensors must be left out, or beside --parameters, and 6 was given."),
        (["--parameters", "5", "--model", "gpt"], "all say what is trained: give one of them."),
        (["--bucket-cap-mb", "1e-9"], "--bucket-cap-mb must be large enough for one parameter of 4 bytes, and 1e-09"),
        (["--workers", "0"], "--workers must be at least 1, and 0 was given."),
        (["--bandwidth", "0"], "--bandwidth must be a finite number above 0, and 0.0 was given."),
        (["--latency", "-1"], "--latency must be a finite number, 0 or greater, and -1.0 was given."),
        (["--adamw-ns", "nan"], "--adamw-ns must be a finite number, 0 or greater, and nan was given."),
        (["--backward-share", "1.5"], "--backward-share must be 0 to 1, and 1.5 was given."),
        (["--model", "gtp"], "unknown model 'gtp': did you mean gpt?"),
        (["--recipe", "cifar"], "unknown recipe 'cifar': did you mean cifar10-vit?"),
        (["--model", "causal-lm"], "unknown model 'causal-lm'"),
        (["--keep", "0"], "--keep must be above 0 and at most 1, and 0.0 was given."),
        (["--safetensors", "nowhere"], "--safetensors nowhere cannot be read: No such file or directory."),
    ],
)
def test_mistakes_take_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and sentence in said.err


def test_a_plan_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "plan.json").read_bytes()
    assert main(["plan", "--parameters", "1e6", "--out", str(folder)]) == 2
    assert "holds a plan already" in capsys.readouterr().err
    assert (folder / "plan.json").read_bytes() == before


def test_shapes_of_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "1.safetensors", {"format": "pt"})
    save_file({"c": torch.zeros(3, 5, dtype=torch.bfloat16)}, tmp_path / "2.safetensors")
    files = (tmp_path / "1.safetensors", tmp_path / "2.safetensors")
    sizes = sizes_of(PlanConfig(safetensors=files))
    assert dict(sizes.shapes) == {(3, 5): 2, (7,): 1} and (sizes.parameters, sizes.tensors) == (37, 3)
    for content in (b"", b"12345678", (10).to_bytes(8, "little") + b"{" * 10, (2).to_bytes(8, "little") + b"[]"):
        files[0].write_bytes(content)
        with pytest.raises(ValueError, match="is not a safetensors file"):
            sizes_of(PlanConfig(safetensors=files))


@pytest.mark.parametrize(("parameters", "tensors"), [(1, None), (7, 3), (10**6 + 1, 10), (7_000_000_000, None)])
def test_a_count_is_kept(parameters: int, tensors: int | None) -> None:
    sizes = Sizes.assumed(parameters, tensors)
    assert sizes.parameters == parameters
    if tensors is not None:
        assert sizes.tensors in (tensors, tensors + 1)


@pytest.mark.parametrize("name", ["bench", *(name for name in MODELS if name != CAUSAL_LM)])
def test_models_have_their_shapes(name: str) -> None:
    sizes = Sizes.of(name, model_shapes(name))
    known = {"bench": 4_902_144, "conv": 105_866, "gpt2pp-350m": 354_900_000, "gpt2pp-760m": 758_300_000}
    assert sizes.parameters == pytest.approx(known.get(name, sizes.parameters), rel=1e-3) and sizes.tensors > 5


@pytest.mark.parametrize(("name", "parameters", "workers"), RECIPES)
def test_recipes_have_their_sizes_and_workers(
    name: str, parameters: float, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--recipe", name]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Recipe {name} (") and f"; {workers} workers" in " ".join(said.split())
    assert sizes_of(PlanConfig(recipe=name)).parameters == pytest.approx(parameters, rel=1e-3)
    assert main(["plan", "--recipe", name, "--workers", "7"]) == 0
    assert "; 7 workers" in " ".join(capsys.readouterr().out.split())


def test_factors_are_those_of_torchs_hook() -> None:
    """Of dlion bench's model 57,984 numbers, as its PowerSGD counted (bench/results/network)."""
    shapes = [tuple(param.shape) for param in build_gpt(BenchConfig(), torch.device("cpu")).parameters()]
    assert sum(Sizes.of("bench", shapes).factors(2)) == 347904 * 4 / 6 / 4
