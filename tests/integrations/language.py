"""A causal language model small enough for tests, built from a config, and text for it: nothing is downloaded."""

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH, VOCABULARY = 16, 64


def tiny_model(seed: int = 0) -> GPT2LMHeadModel:
    """With dropout: a resumed run must go on with the right random numbers."""
    torch.manual_seed(seed)
    size = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **size))


class Text(Dataset[dict[str, Tensor]]):
    """Rows of a text, letters as numbers."""

    def __init__(self, rows: int) -> None:
        text = ("the quick brown fox jumps over the lazy dog and " * rows).encode()
        self.rows = torch.tensor([letter % VOCABULARY for letter in text[: rows * LENGTH]]).view(rows, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}
