"""Recipes: the paper's numbers, the plan of each without data, and a few steps of each on a stand-in of its data."""

import json
import re
import tomllib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from command import dlion, records
from few_shot_questions import write_questions
from picture_forms import pictures_of_the_subset, write_binary_batches, write_picture_folder
from tiny_llama import write_tiny_llama

from dlion.cli import main
from dlion.methods import METHODS
from dlion.train.compare.cells import first_stage, unchosen
from dlion.train.config import TrainConfig
from dlion.train.config_files import study_named
from dlion.train.few_shot.settings import FewShotConfig
from dlion.train.jobs import data_of
from dlion.train.recipes import built_in, locate, read_recipe

RECIPES = (
    "cifar10-vit",
    "imagenet-vit-b16",
    "imagenet-vit-s16",
    "instruct-llama-7b",
    "openwebtext-gpt2pp-350m",
    "openwebtext-gpt2pp-760m",
)
# Learning rate, betas, weight decay: of Distributed Lion, then of AdamW on the mean gradient.
PAPER = {
    "imagenet-vit-s16": ((3e-4, [0.9, 0.99], 1.0), (3e-3, [0.9, 0.999], 0.1)),
    "imagenet-vit-b16": ((1e-4, [0.9, 0.99], 10.0), (1e-3, [0.9, 0.999], 1.0)),
    "openwebtext-gpt2pp-350m": ((9e-5, [0.9, 0.99], 1.0), (3e-4, [0.95, 0.99], 0.1)),
    "openwebtext-gpt2pp-760m": ((9e-5, [0.9, 0.99], 1.0), (3e-4, [0.95, 0.99], 0.1)),
    "instruct-llama-7b": ((6e-6, [0.9, 0.99], 0.01), (2e-5, [0.9, 0.999], 0.0)),
}
# Workers, samples of all of them in a step, epochs or steps.
SIZES = {
    "cifar10-vit": (4, 128, {"epochs": 200}),
    "imagenet-vit-s16": (32, 4096, {"epochs": 300}),
    "imagenet-vit-b16": (32, 4096, {"epochs": 300}),
    "openwebtext-gpt2pp-350m": (32, 480, {"steps": 14_000}),
    "openwebtext-gpt2pp-760m": (32, 480, {"steps": 30_000}),
    "instruct-llama-7b": (4, 32, {"epochs": 3}),
}


def recipe(name):
    return read_recipe(locate(name))


@pytest.mark.parametrize("name", PAPER)
def test_the_numbers_are_the_paper_s(name):
    lion, adamw = PAPER[name]
    for methods, numbers in ((("dlion-mavo", "dlion-avg", "g-lion"), lion), (("g-adamw",), adamw)):
        for method in methods:
            flags = recipe(name).flags_of(method)
            assert (flags["lr"], flags["betas"], flags["weight-decay"]) == numbers


@pytest.mark.parametrize("name", RECIPES)
def test_the_sizes_are_the_paper_s(name):
    flags = recipe(name).flags
    workers, samples, length = SIZES[name]
    assert flags["workers"] == workers and flags["batch-size"] * workers == samples
    assert {key: flags[key] for key in ("steps", "epochs") if key in flags} == length
    text = locate(name).read_text()
    assert "silent" in text and "paper" in text and len(recipe(name).title) > 20


def test_the_grid_of_cifar10_is_the_paper_s():
    study = study_named(Path("cifar10-vit"))
    assert [value.label for value in study.vary["workers"]] == [4, 8, 16, 32]
    assert [value.label for value in study.vary["seed"]] == [42, 52, 62]
    assert [value.label for value in study.grid["lr"]] == [0.00005, 0.001, 0.005, 0.01]
    assert [value.label for value in study.grid["weight-decay"]] == [0.0005, 0.001, 0.005]
    named = {"dlion-mavo", "dlion-avg", "d-signum-mavo", "d-signum-avg", "terngrad", "graddrop", "dgc"}
    assert {"g-lion", "g-adamw"} | named == set(study.variants) <= set(METHODS)
    assert all(study.variants[name].flags["keep"] == 0.04 for name in ("graddrop", "dgc"))
    assert study.train["model"] == "vit-cifar" and not {"lr", "workers", "method", "seed"} & set(study.train)


def test_the_study_of_a_recipe_is_one_that_compare_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = study_named(Path("cifar10-vit"))
    assert len(first_stage(study)) == len(unchosen(study)) == 108  # as a comment in it says
    assert main(["compare", "--config", "cifar10-vit", "--table"]) == 2
    assert "compare-runs/cifar10-vit holds no study" in capsys.readouterr().err
    assert main(["compare", "--config", "nothing"]) == 2
    assert "unknown recipe 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_every_key_means_something(name):
    found = recipe(name)
    known = set(asdict(TrainConfig()))
    for flags in (found.flags, *found.with_method.values(), dict.fromkeys(found.needs)):
        assert {flag.replace("-", "_") for flag in flags} <= known
    assert set(found.with_method) <= set(METHODS)
    assert set(found.assumed) <= {"train-size", "parameters"}
    if found.few_shot:
        evaluation = FewShotConfig(**{key: tuple(v) if isinstance(v, list) else v for key, v in found.few_shot.items()})
        assert evaluation == FewShotConfig() and evaluation.shots == 3 and len(evaluation.tasks) == 7


PLANS = {
    "cifar10-vit": ["9,519,626 parameters", "312,600 (200 epochs)", "1.79 MB a step, 1.500 bits"],
    "imagenet-vit-s16": ["22,031,464 parameters", "93,900 (300 shared epochs)", "4,096 in all", "1.939 bits"],
    "imagenet-vit-b16": ["86,529,256 parameters", "1,281,167 training samples are assumed"],
    "openwebtext-gpt2pp-350m": ["354,945,024 parameters", "steps: 14,000", "tokens: 6,881,280,000", "1.938 bits"],
    "openwebtext-gpt2pp-760m": ["758,320,128 parameters", "steps: 30,000", "tokens: 14,745,600,000"],
    "instruct-llama-7b": ["6,738,415,616 parameters", "3 shared epochs), which are not given", "memory: 80.9 GB"],
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_dry_run_needs_no_data(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DLION_DATA", raising=False)
    assert main(["train", "--config", name, "--dry-run"]) == 0
    output = capsys.readouterr().out
    for expected in PLANS[name]:
        assert expected in output
    assert not list(tmp_path.iterdir())


def test_the_dry_run_follows_flags_and_data(tmp_path, capsys):
    write_picture_folder(tmp_path, pictures_of_the_subset(), suffix="JPEG", valid="val")
    data = ["--data", str(tmp_path)]
    small = ["--image-size", "32", "--layers", "1", "--workers", "2", "--batch-size", "5", "--epochs", "2"]
    assert main(["train", "--config", "imagenet-vit-s16", "--dry-run", *data, *small, "--warmup-steps", "1"]) == 0
    output = capsys.readouterr().out
    assert "40 training and 20 validation images of 10 classes" in output
    assert "steps: 8 (2 shared epochs): 80 samples" in output and "1.002 bits" not in output
    assert main(["train", "--dry-run", "--epochs", "3", "--method", "g-adamw"]) == 0
    default = capsys.readouterr().out
    assert "105,866 parameters" in default and "(3 epochs)" in default and "memory: 1.69 MB" in default
    assert main(["train", "--dry-run", "--model", "vitt"]) == 2
    assert "did you mean vit" in capsys.readouterr().err


def test_recipes_are_listed_and_printed(capsys):
    assert tuple(built_in()) == RECIPES
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES) and "ViT-S/16" in lines[2]
    assert main(["recipes", "cifar10-vit"]) == 0
    assert capsys.readouterr().out == locate("cifar10-vit").read_text()


MISTAKES = {
    "unknown recipe": (["train", "--config", "cifar10"], "did you mean cifar10-vit"),
    "data are needed": (["train", "--config", "imagenet-vit-s16"], "needs --data: the folder with ImageNet's"),
    "instructions are needed": (
        ["train", "--config", "instruct-llama-7b", "--pretrained", "x"],
        "a file of instructions, because the paper does not name its set",
    ),
    "a model is needed": (["train", "--config", "instruct-llama-7b", "--data", "x"], "needs --pretrained"),
    "no study": (["compare", "--config", "imagenet-vit-s16"], "has no study: give it to `dlion train`"),
    "shared epochs of none": (["train", "--shared-epochs"], "means nothing without --epochs"),
    "a table of a plain file": (["train", "--config", "tables.toml"], "must be tables"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_sentence(mistake, tmp_path, monkeypatch, capsys):
    arguments, expected = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    Path("tables.toml").write_text("with = 3\n")
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and said.err.startswith("dlion: ") and expected in said.err


JUDGED = ["--eval-windows", "9"]


def _cifar(folder):
    write_binary_batches(folder / "data", pictures_of_the_subset())
    return ["--data", "data"]


def _imagenet(folder):
    write_picture_folder(folder / "data", pictures_of_the_subset(), suffix="JPEG", valid="val")
    return ["--data", "data", "--image-size", "32"]


def _tokens(folder):
    (folder / "data").mkdir()
    numbers = np.random.default_rng(0).integers(0, 50257, 3000)
    numbers[:2000].astype("<u2").tofile(folder / "data" / "train.bin")
    numbers[2000:].astype("<u2").tofile(folder / "data" / "val.bin")
    return ["--data", "data", "--context", "16", *JUDGED]


def _rows(folder):
    from datasets import Dataset

    write_tiny_llama(folder / "tokenizer")
    Dataset.from_dict({"text": [f"Page {number} of the web. " * 3 for number in range(300)]}).save_to_disk(
        folder / "data"
    )
    return ["--data", "data", "--task", "hf-text", "--tokenizer", "tokenizer", "--stream", "--context", "16", *JUDGED]


def _instructions(folder):
    write_tiny_llama(folder / "llama", context=512)
    rows = [{"instruction": f"Say {number}.", "input": "", "output": f"{number}"} for number in range(60)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return ["--data", "rows.json", "--pretrained", "llama", "--context", "64"]


TINY_VIT = ["--layers", "1", "--heads", "2", "--width", "16", "--hidden", "16"]
STAND_INS = {
    "cifar10-vit": (_cifar, TINY_VIT),
    "imagenet-vit-s16": (_imagenet, TINY_VIT),
    "imagenet-vit-b16": (_imagenet, TINY_VIT),
    "openwebtext-gpt2pp-350m": (_tokens, TINY_VIT),
    "openwebtext-gpt2pp-760m": (_rows, TINY_VIT),
    "instruct-llama-7b": (_instructions, []),
}


FEW = ["--batch-size", "4", "--steps", "3", "--warmup-steps", "0", "--eval-every", "2", "--device", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_each_runs_to_its_end_on_a_stand_in(name, tmp_path, monkeypatch, capsys):
    write, smaller = STAND_INS[name]
    arguments = ["train", "--config", name, *write(tmp_path), *smaller, *FEW, "--name", "run"]
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()  # what making the stand-in said
    assert main([*arguments, "--simulate", "2"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and "done: " in said.out
    run = tmp_path / "runs" / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["workers"] == 2 and summary["model"] == recipe(name).flags["model"]
    assert 1.0 <= summary["bits_per_param_sent"] < 1.6
    _ask(name, tmp_path, capsys)
    assert main(["eval", "runs/run"]) == 0
    assert f"val_loss {summary['val_loss']:.6f}" in capsys.readouterr().out


REFUSED = {"cifar10-vit": "is no language model", "openwebtext-gpt2pp-350m": "has no tokenizer: give the one"}


def _ask(name, folder, capsys):
    """Three-shot questions to what was trained; images and bare tokens cannot be asked, which one sentence says."""
    arguments = ["few-shot", "runs/run", "--task-data", "questions", "--limit", "4", "--device", "cpu"]
    if name in REFUSED:
        assert main(arguments) == 2
        assert REFUSED[name] in capsys.readouterr().err
    elif name in ("instruct-llama-7b", "openwebtext-gpt2pp-760m"):
        write_questions(folder / "questions")
        assert main(arguments) == 0
        said = capsys.readouterr()
        scores = json.loads((folder / "runs" / "run" / "few-shot.json").read_text())["scores"]
        assert said.err == "" and re.search(r"^mean +\d+\.\d\d$", said.out, re.MULTILINE)
        assert len(scores) == 7 and all(score["questions"] == 4 for score in scores.values())


@pytest.mark.processes
def test_one_runs_in_processes_and_its_method_brings_its_own_numbers(tmp_path):
    arguments = ["--config", "imagenet-vit-b16", "--method", "g-adamw", *_imagenet(tmp_path), *TINY_VIT, *FEW]
    dlion(["train", *arguments, "--workers", "2", "--name", "run", "--lr", "0.5"], tmp_path)
    held = tomllib.loads((tmp_path / "runs" / "run" / "config.toml").read_text())
    assert (held["lr"], held["betas"], held["weight-decay"]) == (0.5, [0.9, 0.999], 1.0)
    assert (held["mixup"], held["autoaugment"], held["shared-epochs"], held["steps"]) == (0.5, True, False, 3)


def test_a_stream_resumes_where_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    of_rows = _rows(tmp_path)
    few = ["--batch-size", "4", "--warmup-steps", "0", "--schedule", "constant", "--log-every", "1", "--device", "cpu"]
    for name, steps in (("whole", "6"), ("parts", "4")):
        arguments = ["--config", "openwebtext-gpt2pp-350m", *of_rows, *TINY_VIT, *few, "--steps", steps, "--name", name]
        assert main(["train", *arguments, "--simulate", "2"]) == 0
    data_of.cache_clear()  # as another process, which has read nothing yet
    assert main(["train", "--resume", "runs/parts", "--steps", "6"]) == 0
    whole, parts = tmp_path / "runs" / "whole", tmp_path / "runs" / "parts"
    assert records(whole) == records(parts)
    assert (whole / "model-last.safetensors").read_bytes() == (parts / "model-last.safetensors").read_bytes()
