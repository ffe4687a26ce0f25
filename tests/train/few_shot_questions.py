"""Made-up questions in the columns of the seven published data sets, and a model whose accuracy is known."""

import json

from lm_eval.api.model import LM

QUESTIONS = 20  # of each task, and five solved ones
NUMBERS = ("zero", "one", "two", "three")


def _arc(number, right):
    return {
        "id": f"made-up-{number}",
        "question": f"Which word is number {number}?",
        "choices": {"text": [f"word {name}" for name in NUMBERS], "label": ["A", "B", "C", "D"]},
        "answerKey": "ABCD"[right],
    }


def _boolq(number, right):
    passage = f"Text {number} says that the door is {'open' if right else 'shut'}."
    return {"question": "is the door open", "passage": passage, "idx": number, "label": right}


def _piqa(number, right):
    solutions = [f"Take tool {name}." for name in NUMBERS[:2]]
    return {"goal": f"Mend thing {number}", "sol1": solutions[0], "sol2": solutions[1], "label": right}


def _siqa(number, right):
    answers = dict(zip(("answerA", "answerB", "answerC"), (f"felt {name}" for name in NUMBERS), strict=False))
    asked = {"context": f"Alex met friend {number}.", "question": "How did Alex feel?"}
    return asked | answers | {"label": str(right + 1)}


def _hellaswag(number, right):
    return {
        "ind": number,
        "activity_label": "Cooking",
        "ctx_a": f"Person {number} stands at a stove.",
        "ctx_b": "the person",
        "ctx": f"Person {number} stands at a stove. the person",
        "endings": [f"stirs pot {name}." for name in NUMBERS],
        "source_id": f"made-up~{number}",
        "split": "val",
        "split_type": "indomain",
        "label": str(right),
    }


def _openbookqa(number, right):
    return {
        "id": f"made-up-{number}",
        "question_stem": f"Thing {number} is made of",
        "choices": {"text": [f"stuff {name}" for name in NUMBERS], "label": ["A", "B", "C", "D"]},
        "answerKey": "ABCD"[right],
    }


# Task: its columns, the number of answers, the split that the harness asks, and the right answer in words.
TASKS = {
    "arc_easy": (_arc, 4, "test", "word {}"),
    "arc_challenge": (_arc, 4, "test", "word {}"),
    "boolq": (_boolq, 2, "validation", None),
    "piqa": (_piqa, 2, "validation", "Take tool {}."),
    "social_iqa": (_siqa, 3, "validation", "felt {}"),
    "hellaswag": (_hellaswag, 4, "validation", "stirs pot {}."),
    "openbookqa": (_openbookqa, 4, "test", "stuff {}"),
}


def write_questions(folder):
    """TASK/train.jsonl with solved examples (numbers from 100 on) and the split that is asked, for all seven."""
    for task, (row, answers, split, _) in TASKS.items():
        (folder / task).mkdir(parents=True, exist_ok=True)
        for name, numbers in (("train", range(100, 105)), (split, range(QUESTIONS))):
            lines = [json.dumps(row(number, number % answers)) for number in numbers]
            (folder / task / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


class Scripted(LM):
    """Prefers the right answer to a task's questions with numbers below `right[task]`, a wrong one to all others."""

    def __init__(self, right):
        super().__init__()
        self.right = right
        self.asked = []

    def loglikelihood(self, requests, disable_tqdm=False):
        self.asked += [request.args for request in requests]
        return [(self._score(request.doc, request.args[1].strip(), request.task_name), False) for request in requests]

    def _score(self, doc, answer, task):
        row, answers, _, words = TASKS[task]
        number = next(n for n in range(QUESTIONS) if row(n, n % answers).items() <= doc.items())
        chosen = (number + (number >= self.right[task])) % answers
        named = ("no", "yes")[chosen] if words is None else words.format(NUMBERS[chosen])
        return -1.0 if answer == named else -50.0

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def generate_until(self, requests, disable_tqdm=False):
        raise NotImplementedError
