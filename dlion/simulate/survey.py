"""A survey among simulated workers: every worker's questions side by side, answered as between processes."""

import torch
from torch import Tensor

from dlion.simulate.table import Table, side_by_side
from dlion.simulate.worker import Worker
from dlion.survey import Question, ask


def conduct(first: dict[int, Question], workers: list[Worker], table: Table) -> list[Tensor]:
    """Answer the questions of a step, of which `first` holds each worker's first one, by rank.

    A worker that is absent says 0 everywhere. Returns all answers.
    """
    asked, answers = first, []
    while asked:
        like = next(iter(asked.values()))
        blank = Question(like.how, torch.zeros_like(like.values))
        answer = _answer([asked.get(worker.rank, blank) for worker in workers], workers, table)
        answers.append(answer)
        # a copy for each: a rule may go on computing in its own
        heard = {rank: workers[rank].hear(answer.clone()) for rank in asked}
        asked = {rank: question for rank, question in heard.items() if question is not None}
    return answers


def _answer(questions: list[Question], workers: list[Worker], table: Table) -> Tensor:
    if len(workers) == 1:
        return questions[0].values.clone()
    consultations = [
        ask(question, worker.seat, worker.stats) for question, worker in zip(questions, workers, strict=True)
    ]
    return side_by_side(consultations, table)
