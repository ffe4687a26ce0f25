"""A run of torchtitan's own trainer in tests: one layer of its debug model of Llama, on rows that count up."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from on_cpus import attend, in_sums
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

WORDS = 100
FlexAttention._compiled_flex_attn = staticmethod(attend)


class Counting(BaseDataLoader):
    """Rows that count up from a random word: a function of rank and step."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self.rank, self.rows, self.words, self.step = dp_rank, local_batch_size, seq_len, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            random = torch.Generator().manual_seed(1000 * self.step + self.rank)
            begins = torch.randint(WORDS, (self.rows, 1), generator=random)
            text = (begins + torch.arange(self.words + 1)) % WORDS
            self.step += 1
            positions = torch.arange(self.words).expand(self.rows, -1)
            yield {"input": text[:, :-1], "positions": positions}, text[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {f"step of {self.rank}": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state[f"step of {self.rank}"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        pass

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


def small(config: Trainer.Config) -> Trainer.Config:
    """One layer, short rows, data from here; what Gloo and a CPU can do."""
    spec = config.model_spec
    model = replace(spec.model, layers=spec.model.layers[:1])
    config.model_spec = replace(spec, model=model, parallelize_fn=in_sums(spec.parallelize_fn))
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Counting.Config()
    config.training.local_batch_size, config.training.seq_len = 2, 32
    config.training.mixed_precision_param, config.training.disable_cuda_graphs = "float32", True
    return config


def a_run(folder: Path, replicas: int, steps: int, every: int) -> Trainer.Config:
    """On a mesh of `replicas` and as many shards as there are, to `steps`; a checkpoint after each `every`."""
    config = small(llama3_debugmodel())
    config.dump_folder, config.training.steps = str(folder), steps
    config.parallelism.data_parallel_replicate_degree = replicas
    config.parallelism.spmd_backend = "partial_dtensor"
    config.lr_scheduler.total_steps = 1000  # a longer run of the same schedule
    config.checkpoint.enable, config.checkpoint.interval = True, every
    config.checkpoint.last_save_model_only = False
    return config


def example() -> Trainer.Config:
    from with_torchtitan import llama3_by_votes

    return small(llama3_by_votes())
