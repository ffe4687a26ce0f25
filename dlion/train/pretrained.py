"""Causal language models of the package `transformers`, from a folder on this machine."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlion.train.legal import shown
from dlion.train.optional import Refused, reading, transformers_for

CAUSAL_LM = "causal-lm"


class PretrainedLm(nn.Module):
    """A `transformers` causal language model as the training loop wants one: i64[b, t] -> f32[b, t, vocabulary].

    Its weights are kept in float32, where steps as small as Lion's are not rounded away; --precision bf16 computes
    in bf16. Sequences are padded on the right, behind everything that counts, so no mask is needed.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm(input_ids=tokens, use_cache=False).logits
        return logits

    def context(self, otherwise: int) -> int:
        """How many tokens the model takes; `otherwise` when its configuration does not say."""
        return int(getattr(self.lm.config, "max_position_embeddings", otherwise))

    @classmethod
    def load(cls, folder: str | None, vocabulary: int, context: int) -> "PretrainedLm":
        """The model in `folder`, in evaluation mode's opposite; under `torch.device("meta")` only its shapes.

        Raises:
            ValueError: no folder, none of that kind, or it knows fewer tokens or shorter windows than are needed.
        """
        if folder is None:
            raise ValueError(f"model {CAUSAL_LM} needs --pretrained FOLDER: one with config.json and the weights")
        if not (Path(folder) / "config.json").is_file():
            raise ValueError(f"--pretrained {folder} holds no model of transformers: it has no config.json")
        transformers = transformers_for(f"model {CAUSAL_LM}")
        with reading(f"--pretrained {folder}"):
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        _check_room(folder, config, vocabulary, context)
        with reading(f"--pretrained {folder}"):
            lm = _made(transformers.AutoModelForCausalLM, config, folder)
        return cls(lm.train())


def _made(auto: Any, config: Any, folder: str) -> Any:
    if torch.get_default_device().type == "meta":
        return auto.from_config(config, dtype=torch.float32)
    how = {"dtype": torch.float32, "local_files_only": True, "output_loading_info": True}
    lm, found = auto.from_pretrained(folder, config=config, **how)
    if missing := sorted(map(str, found["missing_keys"])):
        raise Refused(
            f"the weights in {folder} lack {shown(missing[0])}"
            + (f" and {len(missing) - 1} more tensors" if missing[1:] else "")
            + ", which would begin with random numbers: fetch them again"
        )
    return lm


def _check_room(folder: str, config: Any, vocabulary: int, context: int) -> None:
    longest = getattr(config, "max_position_embeddings", context)
    if config.vocab_size < vocabulary:
        raise ValueError(f"the model in {folder} knows {config.vocab_size:,} tokens, and the tokenizer {vocabulary:,}")
    if longest < context:
        raise ValueError(f"the model in {folder} takes {longest:,} tokens at most: give a smaller --context")
