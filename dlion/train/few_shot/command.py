"""`dlion few-shot`: from a run, or a model of transformers, to a table and a JSON file."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dlion
from dlion.train.data.encoders import Encoder, encoder
from dlion.train.data.instructions import CONTEXT
from dlion.train.few_shot.harness import Score, ask
from dlion.train.few_shot.settings import FewShotConfig
from dlion.train.models import MODELS, Tokenised, build_model
from dlion.train.optional import harness
from dlion.train.pretrained import CAUSAL_LM, PretrainedLm
from dlion.train.runs import RunFolder, write_whole
from dlion.train.weights import load_weights

FILE = "few-shot.json"


def run(place: Path, settings: FewShotConfig, out: Path | None) -> int:
    """Ask the model in `place` and write `out` (few-shot.json in the folder of a run unless given).

    Raises:
        ValueError: there is no model, it is none of language, it has no tokenizer, or data or packages are missing.
    """
    harness()
    answering, device = _answering(), _device(settings.device)
    model, encode, context = _model(place, settings.tokenizer)
    lm = answering(model, encode, context, settings.batch_size, device)
    scores = ask(lm, settings)
    print(table(scores, settings.shots))
    file = out or (place / FILE if (place / "config.toml").is_file() else Path(FILE))
    write_whole(file, (json.dumps(_record(place, settings, scores), indent=2) + "\n").encode())
    print(f"written: {file}")
    return 0


def _device(asked: str) -> torch.device:
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise ValueError(
            "--device cuda needs a GPU that torch can use, and there is none: leave it out, or --device cpu."
        )
    return torch.device("cuda" if there and asked != "cpu" else "cpu")


def _answering() -> Any:
    from dlion.train.few_shot.answering import Answering  # it imports the harness

    return Answering


def _model(place: Path, tokenizer: str | None) -> tuple[nn.Module, Encoder, int]:
    """The model, its tokenizer, and how many tokens it takes."""
    if (place / "config.toml").is_file():
        return _of_run(RunFolder.existing(place), tokenizer)
    if not (place / "config.json").is_file():
        raise ValueError(
            f"{place} holds no model: give the folder of a run of dlion train, or one of transformers with config.json"
        )
    encode = encoder(tokenizer or str(place))
    model = PretrainedLm.load(str(place), encode.vocabulary, 1)
    return model, encode, model.context(CONTEXT)


def _of_run(folder: RunFolder, tokenizer: str | None) -> tuple[nn.Module, Encoder, int]:
    """The model after the last step: the paper trains for a fixed number of epochs."""
    config = folder.read_config()
    folder.read_summary()  # whether it is finished
    if MODELS[config.model].takes_images:
        raise ValueError(f"{folder.path} trained {config.model}, which is no language model")
    tokens = tokenizer or config.tokenizer or config.pretrained
    if tokens is None:
        raise ValueError(f"the run {folder.path} has no tokenizer: give the one that made its tokens with --tokenizer")
    encode = encoder(tokens)
    context = config.context or CONTEXT
    model = build_model(config.model, Tokenised(encode.vocabulary, context), config)
    load_weights(model, folder.last_model)
    if config.model == CAUSAL_LM:  # trained on short examples, it still takes long ones
        assert isinstance(model, PretrainedLm)
        context = model.context(CONTEXT)
    return model, encode, context


def table(scores: dict[str, Score], shots: int) -> str:
    """One line a task; accuracy in percent with its standard error."""
    lines = [f"{f'{shots}-shot':14}  {'acc, %':>6}  {'±':>4}  {'acc_norm, %':>11}  {'±':>4}  questions"]
    for name, score in scores.items():
        line = f"{name:14}  {100 * score.acc:6.2f}  {100 * score.acc_stderr:4.2f}"
        normed, error = score.acc_norm, score.acc_norm_stderr
        line += f"  {100 * normed:11.2f}  {100 * (error or 0.0):4.2f}" if normed is not None else " " * 19
        lines.append(f"{line}  {score.questions:9,}")
    mean = sum(score.acc for score in scores.values()) / len(scores)
    return "\n".join([*lines, f"{'mean':14}  {100 * mean:6.2f}"])


def _record(place: Path, settings: FewShotConfig, scores: dict[str, Score]) -> dict[str, Any]:
    return {
        "model": str(place),
        "settings": asdict(settings),
        "scores": {name: asdict(score) for name, score in scores.items()},
        "versions": {
            "dlion": dlion.__version__,
            "lm_eval": harness().__version__,
            "torch": str(torch.__version__),
        },
    }
