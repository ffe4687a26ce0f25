"""The flags of `dlion few-shot`. Nothing here imports torch, so that `dlion --help` stays fast."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from dlion.train.legal import require, require_count

Question = Literal["arc_easy", "arc_challenge", "boolq", "piqa", "social_iqa", "hellaswag", "openbookqa"]
QUESTIONS: tuple[Question, ...] = get_args(Question)
SEVERAL = Parameter(consume_multiple=True, negative="", show_default=lambda values: " ".join(map(str, values)))


@dataclass(frozen=True, kw_only=True)
class FewShotConfig:
    """One evaluation. Each field is a flag of `dlion few-shot`, and a key of the table [few-shot] of a recipe.

    Raises:
        ValueError: a value is out of range.
    """

    tasks: Annotated[tuple[Question, ...], SEVERAL] = QUESTIONS
    """What to ask, by the names of the LM Evaluation Harness."""
    shots: int = 3
    """Solved examples before each question."""
    task_data: str | None = None
    """Folder with TASK/train.jsonl and TASK/validation.jsonl or TASK/test.jsonl, in the columns of the published data
    sets: for machines without a network. Unless given, the harness fetches them."""
    limit: int | None = None
    """Questions of each task: all unless given."""
    tokenizer: str | None = None
    """Folder of a tokenizer of transformers, or a tokenizer.json: the run's or the model's own unless given."""
    batch_size: int = 16
    """Answers that are judged at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where it is."""

    def __post_init__(self) -> None:
        require_count("shots", self.shots, 0)
        require_count("batch_size", self.batch_size)
        require_count("limit", self.limit)
        require(bool(self.tasks), "tasks", "nothing", f"one or more of {', '.join(QUESTIONS)}")
