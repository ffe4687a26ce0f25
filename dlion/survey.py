"""What all workers must know before the first ballot of a step can be written, asked and answered.

A method's survey is a generator of questions that is sent the answers. Every worker asks the same questions, equally
long ones, in the same order, whatever its gradients are.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dlion.channel import Channel, nbytes
from dlion.layout import from_shards, into_shards
from dlion.lines import Awaited, Line
from dlion.phases import Phases
from dlion.stats import Stats
from dlion.tallies import in_rank_order

GATHERED = 1024  # numbers, up to which one call with everybody's is quicker than two with shards


@dataclass(frozen=True)
class Question:
    """One number for each place, to be put together over all workers.

    Attributes:
        how: "sum" or "largest", elementwise and in rank order; a NaN is an answer too, so leave it out of `values`.
        values: f[n], this worker's; n and the dtype are equal on all workers.
    """

    how: Literal["sum", "largest"]
    values: Tensor


Questions = Generator[Question, Tensor, None]


def together(how: str, rows: Tensor) -> Tensor:
    """Every worker's values f[workers, n] -> the answer f[n]."""
    return in_rank_order(rows, Tensor.add_ if how == "sum" else _raise_to)


class Survey:
    """Puts the questions of each step to all workers.

    Args:
        channel: to them; None for one worker alone, whose own values are the answer.
        stats: counts what is moved.
        phases: times it: "ballot" for making questions, "wait" for the answers.

    Attributes:
        answers: of the step at hand, in the order of its questions.
    """

    def __init__(self, channel: Channel | None, stats: Stats, phases: Phases) -> None:
        self._channel = channel
        self._stats = stats
        self._phases = phases
        self._asked: list[Question] = []
        self.answers: list[Tensor] = []

    def conduct(self, questions: Questions) -> None:
        """Ask the questions of a step and send their generator the answers."""
        asked: list[Question] = []
        answer: Tensor | None = None
        self.answers = []
        while True:
            with self._phases("ballot"):
                try:
                    question = next(questions) if answer is None else questions.send(answer)
                except StopIteration:
                    break
            asked.append(_blank(question))
            with self._phases("wait"):
                answer = self._answer(question)
            self.answers.append(answer.clone())  # a rule may go on computing in its own
        self._asked = asked

    def take_part(self) -> list[Tensor]:
        """Answer the questions that were asked the last time with blanks, and return what all answered.

        For a worker whose layout changed: the others do not know of it yet and would wait for it.
        """
        return [self._answer(question) for question in self._asked]

    def _answer(self, question: Question) -> Tensor:
        values = question.values
        if self._channel is None:
            return values.clone()
        consultation = ask(Question(question.how, values.to(self._channel.device)), self._channel, self._stats)
        with self._channel.during("survey"):
            while True:
                try:
                    next(consultation).wait()
                except StopIteration as end:
                    answer: Tensor = end.value
                    return answer.to(values.device)


def ask(question: Question, line: Line, stats: Stats) -> Generator[Awaited[Any], None, Tensor]:
    """Put one question to all workers: yields each call that it needs to be over, and returns the answer."""
    mine = question.values
    if line.size == 2 or mine.numel() <= GATHERED:
        stats.moved(*[(line.size - 1) * nbytes(mine)] * 2)
        call = line.all_gather(mine)
        yield call
        return together(question.how, call.result)
    rows = into_shards(mine[:0], mine[None], line.size)
    stats.moved(*[(line.size - 1) * nbytes(rows[0])] * 2)
    call = line.all_to_all(rows)
    yield call
    shard = together(question.how, call.result)
    stats.moved(*[(line.size - 1) * nbytes(shard)] * 2)
    call = line.all_gather(shard)
    yield call
    return from_shards(call.result, 1, mine.numel())[0]


def _blank(question: Question) -> Question:
    """As long an answer that changes nothing; one number stands in the place of all of them."""
    neutral = 0.0 if question.how == "sum" else -torch.inf
    return Question(question.how, question.values.new_full((), neutral).expand(question.values.shape))


def _raise_to(total: Tensor, values: Tensor) -> None:
    torch.maximum(total, values, out=total)
