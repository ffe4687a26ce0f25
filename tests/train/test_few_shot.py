"""Three-shot evaluation through the harness's own code: a model whose accuracy is known, and one of our own."""

import json
import math
import shutil

import pytest
import torch
from few_shot_questions import QUESTIONS, TASKS, Scripted, write_questions
from tiny_llama import write_tiny_llama
from torch import nn
from torch.nn.functional import log_softmax

from dlion.cli import main
from dlion.train.data.encoders import Bytes
from dlion.train.few_shot.answering import Answering
from dlion.train.few_shot.harness import Score, ask
from dlion.train.few_shot.settings import QUESTIONS as NAMES
from dlion.train.few_shot.settings import FewShotConfig


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    write_questions(folder)
    return str(folder)


def test_a_scripted_model_gets_the_accuracy_it_was_given(questions):
    right = dict(zip(TASKS, (13, 20, 0, 7, 11, 1, 16), strict=True))
    lm = Scripted(right)
    scores = ask(lm, FewShotConfig(task_data=questions))
    assert tuple(scores) == NAMES == tuple(TASKS)
    for task, score in scores.items():
        share = right[task] / QUESTIONS
        assert score.questions == QUESTIONS and math.isclose(score.acc, share)
        assert math.isclose(score.acc_stderr, math.sqrt(share * (1 - share) / (QUESTIONS - 1)), abs_tol=1e-12)
        assert score.acc_norm is None if task in ("boolq", "social_iqa") else math.isclose(score.acc_norm, share)


def test_three_solved_examples_of_the_training_split_come_first(questions):
    lm = Scripted({"arc_easy": 0})
    ask(lm, FewShotConfig(task_data=questions, tasks=("arc_easy",)))
    for context, answer in lm.asked:
        *solved, last = context.split("\n\n")
        assert len(solved) == 3 and all("number 10" in one and "Answer: word " in one for one in solved)
        assert last.endswith("?\nAnswer:") and answer.startswith(" word ")
    lm = Scripted({"piqa": 0})
    ask(lm, FewShotConfig(task_data=questions, tasks=("piqa",), shots=0, limit=5))
    assert len(lm.asked) == 10 and all(context.count("Answer:") == 1 for context, _ in lm.asked)


class Counting(nn.Module):
    """Logits that follow from the position and the token before: a table of 257 rows."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(257, 257, generator=torch.Generator().manual_seed(0)))
        self.longest = 0

    def forward(self, tokens):
        self.longest = max(self.longest, tokens.shape[1])
        return self.table[tokens]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_likelihoods_are_those_of_the_answers_tokens(batch_size):
    model = Counting()
    lm = Answering(model, Bytes(), 12, batch_size, torch.device("cpu"))
    told = log_softmax(model.table.detach().double(), 1)
    pairs = [("ab", "cde"), ("a question that is far longer than the context", " yes"), ("x", "y"), ("", "pq")]
    requests = [type("Request", (), {"args": pair})() for pair in pairs]
    found = lm.loglikelihood(requests, disable_tqdm=True)
    for (question, answer), (likelihood, greedy) in zip(pairs, found, strict=True):
        before = [*question.encode(), *answer.encode()] if question else [256, *answer.encode()]
        tokens = list(answer.encode())
        steps = list(zip(before[-len(tokens) - 1 : -1], tokens, strict=True))
        assert math.isclose(likelihood, sum(told[a, b].item() for a, b in steps), rel_tol=1e-5)
        assert greedy == all(told[a].argmax() == b for a, b in steps)
    assert model.longest == 12


def test_the_command_on_a_model_of_transformers(tmp_path, questions, capsys, monkeypatch):
    write_tiny_llama(tmp_path / "llama", context=512)
    monkeypatch.chdir(tmp_path)
    arguments = ["few-shot", "llama", "--task-data", questions, "--tasks", "boolq", "piqa", "--limit", "4"]
    assert main([*arguments, "--device", "cpu"]) == 0
    written = json.loads((tmp_path / "few-shot.json").read_text())
    output = capsys.readouterr().out
    assert written["settings"]["shots"] == 3 and set(written["scores"]) == {"boolq", "piqa"}
    score = Score(**written["scores"]["piqa"])
    assert score.questions == 4 and score.acc in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert f"{100 * score.acc:.2f}" in output and "few-shot.json" in output


MISTAKES = {
    "no model": (["few-shot", "."], "holds no model"),
    "no data": (["few-shot", "llama", "--task-data", "nowhere", "--device", "cpu"], "arc_easy needs train.jsonl"),
    "no such task": (["few-shot", "llama", "--tasks", "mmlu"], "mmlu"),
    "negative shots": (["few-shot", "llama", "--shots", "-1"], "--shots must be at least 0"),
    "no tokenizer there": (["few-shot", "llama", "--tokenizer", "none"], "no tokenizer at none"),
    "no GPU": (["few-shot", "llama", "--device", "cuda"], "needs a GPU that torch can use"),
    "no network": (["few-shot", "llama", "--tasks", "piqa", "--device", "cpu"], "give --task-data"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_sentence(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments, expected = MISTAKES[mistake]
    if mistake in ("no data", "no tokenizer there", "no network"):
        write_tiny_llama(tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and said.err.startswith("dlion: ") and expected in said.err
    assert not (tmp_path / "few-shot.json").exists()


class Indifferent(Scripted):
    """Prefers nothing."""

    def _score(self, doc, answer, task):
        return -1.0


@pytest.mark.parametrize("change", [{"goal": None}, {"label": 7}, {"label": "x"}, {"sol1": [1]}, None])
def test_questions_that_make_no_sense_are_one_sentence(questions, tmp_path, change):
    place = tmp_path / "piqa"
    shutil.copytree(f"{questions}/piqa", place)
    lines = [json.loads(line) for line in (place / "validation.jsonl").read_text().splitlines()]
    text = "\n".join(json.dumps({**line, **(change or {})}) for line in lines)
    (place / "validation.jsonl").write_text(text if change else text[:500])
    try:
        ask(Indifferent({}), FewShotConfig(task_data=str(tmp_path), tasks=("piqa",)))
    except ValueError as error:
        assert type(error) is ValueError and "piqa" in str(error) and "\n" not in str(error)
