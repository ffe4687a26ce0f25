"""The tasks of the LM Evaluation Harness, on its own definitions, with the data where they are."""

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dlion.train.data.sets import expanded
from dlion.train.few_shot.settings import FewShotConfig
from dlion.train.legal import said_by
from dlion.train.optional import data_sets, harness, quiet, reading

# The file in which the harness defines each task; its index of all 13,000 tasks takes seconds.
_DEFINED = {
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "piqa": "piqa/piqa.yaml",
    "social_iqa": "siqa/siqa.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
}
_SPLITS = ("train", "validation", "test")
_SEED = 1234  # of the choice of solved examples: the harness's own default


@dataclass(frozen=True)
class Score:
    """What a model reached on one task: shares of 1, and their standard errors over the questions.

    acc: the answer with the largest likelihood is right. acc_norm: with the largest likelihood per byte of the answer;
    None where the harness has none. questions: how many were asked.
    """

    acc: float
    acc_stderr: float
    acc_norm: float | None
    acc_norm_stderr: float | None
    questions: int


def ask(lm: Any, settings: FewShotConfig) -> dict[str, Score]:
    """The scores of `lm`, an `lm_eval.api.model.LM`, on every task of the settings.

    Raises:
        ValueError: the harness is not installed, or a task's data are not there.
    """
    harness()
    evaluator = import_module("lm_eval.evaluator")
    tasks = _tasks(settings)
    if settings.task_data is not None:
        _check(tasks, settings)
    for task in tasks.values():
        task.set_fewshot_seed(seed=_SEED)
    with quiet():
        found = evaluator.evaluate(lm, {"tasks": tasks}, limit=settings.limit, log_samples=False, bootstrap_iters=1)
    return {name: _score(found["results"][name], found["n-samples"][name]["effective"]) for name in tasks}


def _check(tasks: dict[str, Any], settings: FewShotConfig) -> None:
    """Put every question once, before a model judges any: rows of a user's files may be anything."""
    for name, task in tasks.items():
        where = f"a question of {name} in {settings.task_data}"
        with quiet(), reading(where, "give the columns of the published set"):
            task.set_fewshot_seed(seed=_SEED)
            task.build_all_requests(limit=settings.limit, rank=0, world_size=1)
            asked: dict[int, list[Any]] = {}
            for each in task.instances:
                asked.setdefault(each.doc_id, []).append(each)
            for answers in asked.values():
                task.process_results(answers[0].doc, [(-1.0, False)] * len(answers))


def _tasks(settings: FewShotConfig) -> dict[str, Any]:
    """The harness's own definitions, with the number of shots and where the data are changed by its own `include`."""
    module = import_module("lm_eval.tasks")
    definitions = Path(str(module.__file__)).parent
    with TemporaryDirectory() as folder:
        for name in settings.tasks:
            changed: dict[str, Any] = {"task": name, "num_fewshot": settings.shots}
            if settings.task_data is not None:
                files = {"data_files": _files(name, settings.task_data)}
                changed |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": files}
            changed["include"] = str(definitions / _DEFINED[name])
            (Path(folder) / f"{name}.yaml").write_text(json.dumps(changed))  # JSON is YAML
        manager = module.TaskManager(include_defaults=False, include_path=folder)
        return {name: _loaded(manager, name) for name in settings.tasks}


def _loaded(manager: Any, name: str) -> Any:
    data_sets()
    try:
        return manager.load([name])["tasks"][name]
    except Exception as error:  # of files that are damaged nearly anything
        reason = said_by(error)
        raise ValueError(
            f"the data of {name} cannot be had ({reason}): on a machine without a network give --task-data"
        ) from None


def _files(name: str, task_data: str) -> dict[str, str]:
    folder = expanded(task_data) / name
    found = {split: str(folder / f"{split}.jsonl") for split in _SPLITS if (folder / f"{split}.jsonl").is_file()}
    if "train" not in found or len(found) < 2:
        raise ValueError(
            f"{folder} needs train.jsonl, and test.jsonl or validation.jsonl; found: {', '.join(found) or 'nothing'}"
        )
    return found


def _score(results: dict[str, Any], questions: int) -> Score:
    def value(metric: str) -> float | None:
        number = results.get(f"{metric},none")
        return float(number) if isinstance(number, (int, float)) else None

    accuracy, error = value("acc"), value("acc_stderr")
    assert accuracy is not None
    return Score(accuracy, error or 0.0, value("acc_norm"), value("acc_norm_stderr"), questions)
