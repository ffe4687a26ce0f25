"""What other packages read for dlion: tokenizers, data sets, language models, questions. They are slow, and get few."""

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

from fuzz import Parser
from fuzz_files import written
from mutations import spoiled_json, spoiled_lines

from dlion.train.data.encoders import encoder
from dlion.train.data.hub import hub_text, streamed_text
from dlion.train.few_shot.harness import ask
from dlion.train.few_shot.settings import FewShotConfig
from dlion.train.pretrained import PretrainedLm

TEXT = "The paper says that one bit is enough. Answer the question in a few words, please."
SLOW = 60.0  # seconds


def tokenizers(folder: Path) -> Iterator[Parser]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how: Any = {"vocab_size": 270, "special_tokens": ["<s>", "</s>"], "show_progress": False}
    tokenizer.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(initial_alphabet=alphabet, **how))
    file = folder / "tokenizer.json"

    def use() -> None:
        encode = encoder(str(file))
        encode(["one bit", ""])

    yield Parser("tokenizer.json", [tokenizer.to_str().encode()], written(file, use), 0.5, spoiled_json, SLOW)


def sets(folder: Path) -> Iterator[Parser]:
    from datasets import Dataset, disable_progress_bars

    rows = [{"text": f"Row {number} has text.\n"} for number in range(30)]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    csv = b"text\n" + b"".join(b"row %d\n" % number for number in range(30))
    disable_progress_bars()
    made = Dataset.from_list(rows)
    parquet = io.BytesIO()
    made.to_parquet(parquet)
    for kind, content in (("jsonl", lines), ("csv", csv), ("parquet", parquet.getvalue())):
        file = folder / f"set.{kind}"
        read = partial(hub_text, str(file), None, None)
        spoil = {"spoil": spoiled_lines} if kind == "jsonl" else {}
        yield Parser(f"data set .{kind}", [content], written(file, read), 0.04, seconds=SLOW, **spoil)
    stream = folder / "stream.jsonl"

    def read_stream() -> None:
        rows = streamed_text(str(stream), None, None, 20).rows(0, 0, 1)
        for _ in range(5):
            next(rows)

    yield Parser("stream of .jsonl", [lines], written(stream, read_stream), 0.04, spoiled_lines, SLOW)
    kept = folder / "kept"
    made.save_to_disk(str(kept))
    arrow = next(kept.glob("*.arrow"))
    whole = partial(hub_text, str(kept), None, None)
    yield Parser("data set on disk", [arrow.read_bytes()], written(arrow, whole), 0.04, seconds=SLOW)
    info = folder / "info"
    made.save_to_disk(str(info))
    whole_info = partial(hub_text, str(info), None, None)
    state = info / "state.json"
    yield Parser("data set's state", [state.read_bytes()], written(state, whole_info), 0.04, spoiled_json, SLOW)


def language_models(folder: Path) -> Iterator[Parser]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    for name in ("config.json", "model.safetensors"):
        place = folder / f"llama-{name}"
        with redirect_stderr(io.StringIO()):
            LlamaForCausalLM(LlamaConfig(vocab_size=20, num_key_value_heads=1, **sizes)).save_pretrained(place)
        read = partial(PretrainedLm.load, str(place), 10, 16)
        spoil = {"spoil": spoiled_json} if name == "config.json" else {}
        good = (place / name).read_bytes()
        yield Parser(f"pretrained {name}", [good], written(place / name, read), 0.1, seconds=SLOW, **spoil)


def questions(folder: Path) -> Iterator[Parser]:
    """Those of one task of `dlion few-shot`, by a model that prefers nothing."""
    rows = [{"goal": f"Mend {n}", "sol1": "a", "sol2": "b", "label": n % 2} for n in range(6)]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    place = folder / "questions" / "piqa"
    place.mkdir(parents=True)
    (place / "train.jsonl").write_bytes(lines)
    settings = FewShotConfig(task_data=str(place.parent), tasks=("piqa",))

    def put() -> None:
        from lm_eval.api.model import LM

        class Indifferent(LM):
            def loglikelihood(self, requests: Any, **others: Any) -> Any:
                return [(-1.0, False) for _ in requests]

            loglikelihood_rolling = generate_until = loglikelihood

        ask(Indifferent(), settings)

    file = place / "validation.jsonl"
    yield Parser("few-shot questions", [lines], written(file, put), 0.02, spoiled_lines, SLOW)


def packages(folder: Path) -> Iterator[Parser]:
    """All of them."""
    for kind in (tokenizers, sets, language_models, questions):
        yield from kind(folder)
