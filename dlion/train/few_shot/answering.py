"""A model of `dlion train` as the LM Evaluation Harness wants one. Importing this file imports the harness."""

from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from dlion.train.data.encoders import Encoder

_ONLY = "the tasks of dlion few-shot compare given answers"


class Answering(TemplateLM):
    """Judges given answers by their likelihood under `model`: i64[b, t] -> f32[b, t, vocabulary].

    context: the tokens that the model takes; of longer questions the last ones count.
    """

    def __init__(self, model: nn.Module, encode: Encoder, context: int, batch_size: int, device: torch.device) -> None:
        super().__init__()
        self._model = model.to(device).eval()
        self._encode, self._context, self._batch_size = encode, context, batch_size
        self._device = device

    @property
    def eot_token_id(self) -> int:
        return self._encode.end

    @property
    def prefix_token_id(self) -> int:
        """What stands before an answer without a question."""
        return self._encode.begin[0] if self._encode.begin else self._encode.end

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        """Tokens, after the one that begins a text where the tokenizer has it so."""
        begin = [] if add_special_tokens is False else self._encode.begin
        return [*begin, *self._encode([string])[0]]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **others: Any
    ) -> list[tuple[float, bool]]:
        """For each question and answer in tokens: the answer's log-likelihood, and whether it is the greedy one."""
        pairs = [(question, answer) for _, question, answer in requests]
        longest_first = sorted(range(len(pairs)), key=lambda at: -len(pairs[at][0]) - len(pairs[at][1]))
        found: dict[int, tuple[float, bool]] = {}
        for begin in range(0, len(pairs), self._batch_size):
            chosen = longest_first[begin : begin + self._batch_size]
            found |= zip(chosen, self._judged([pairs[at] for at in chosen]), strict=True)
        return [found[at] for at in range(len(pairs))]

    def _judged(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        rows = [[*question, *answer][-(self._context + 1) :] for question, answer in pairs]
        longest = max(len(row) for row in rows) - 1
        inputs = torch.full((len(rows), longest), self._encode.end)
        for row, tokens in zip(inputs, rows, strict=True):
            row[: len(tokens) - 1] = torch.tensor(tokens[:-1])
        logits: Tensor = self._model(inputs.to(self._device))
        results = []
        for row, tokens, (_, answer) in zip(logits, rows, pairs, strict=True):
            count = min(len(answer), len(tokens) - 1)
            told = log_softmax(row[len(tokens) - 1 - count : len(tokens) - 1].float(), 1).cpu()
            targets = torch.tensor(tokens[-count:])
            likelihood = told.gather(1, targets[:, None]).double().sum().item()
            results.append((likelihood, bool((told.argmax(1) == targets).all())))
        return results

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError(_ONLY)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError(_ONLY)
