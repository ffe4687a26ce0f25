"""A survey among simulated workers: every worker's questions side by side, answered as between processes."""

import torch
from torch import Tensor

from dlion.simulate.faults import LATE
from dlion.simulate.table import Table, side_by_side
from dlion.simulate.worker import Worker
from dlion.survey import Question, ask

NEUTRAL = {"sum": 0.0, "largest": float("-inf")}


def conduct(first: dict[int, Question], workers: list[Worker], table: Table) -> list[Tensor]:
    """Answer the questions of a step, of which `first` holds each worker's first one, by rank.

    For a worker that is absent or late stands what changes no answer; who is late hears the answers. Returns all.
    """
    asked, answers = first, []
    while asked:
        like = next(iter(asked.values()))
        blank = Question(like.how, torch.full_like(like.values, NEUTRAL[like.how]))
        counted = {rank: question for rank, question in asked.items() if workers[rank].act != LATE} or asked
        answer = _answer([counted.get(worker.rank, blank) for worker in workers], workers, table)
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
