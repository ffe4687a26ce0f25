"""Trainer with two real ranks: local gradients, bytes, all momenta in its checkpoints, LoRA, and what is reported."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from language import Text, tiny_model
from peft import LoraConfig, get_peft_model
from processes import launch
from ranks import bytes_sent, gradients, held, meet_as_launched, refusal, told
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import scripts
from dlion.integrations.accelerate import LocalGradients
from dlion.integrations.transformers import local_gradients, optimizer_for

pytestmark = pytest.mark.timeout(240)  # with frameworks to import, and other work on the machine
STEPS, SAVED = 6, 3


class Seen(TrainerCallback):
    """Gradients of each step, and buffers when the model is evaluated."""

    def __init__(self) -> None:
        self.gradients: list[list[float]] = []
        self.buffers: list[list[float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        self.gradients.append(gradients(of["model"]))

    def on_evaluate(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        self.buffers.append([x for buffer in of["model"].buffers() for x in buffer.flatten().tolist()])


class Normed(nn.Module):
    """With statistics of BatchNorm, which each rank has for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.body(input_ids.float() / 64)
        return {"loss": (out - labels[:, :1]).square().mean(), "logits": out}


class Run:
    def __init__(self, folder: Path, model: nn.Module, steps: int, votes: dict[str, Any] | None, **more: Any) -> None:
        args = TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            save_steps=SAVED,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            weight_decay=0.1,
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            report_to=[],
            **more,
        )
        chosen = {} if votes is None else {"optimizer_cls_and_kwargs": optimizer_for(args, topology="sharded", **votes)}
        self.seen = Seen()
        data = {"train_dataset": Text(40), "eval_dataset": Text(4)}
        self.trainer = Trainer(model=model, args=args, callbacks=[self.seen], **data, **chosen)
        self.optimizer: Any = None

    def train(self, resume: str | bool | None = None) -> "Run":
        self.trainer.train(resume_from_checkpoint=resume)
        self.optimizer = self.trainer.optimizer.optimizer
        return self

    def held(self) -> list[list[float]]:
        return held(self.trainer.model, self.optimizer)


def lora() -> nn.Module:
    config = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    torch.manual_seed(0)
    return get_peft_model(tiny_model(), config)


def resumed(folder: Path, rank: int, build: Callable[[], nn.Module]) -> dict[str, Any]:
    """A run, and one that goes on from its checkpoint, in the same folder: what it saves takes the other's place."""
    warned: list[str] = []
    with told(warned):
        whole = Run(folder, build(), STEPS, {})
        assert local_gradients(local_gradients(whole.trainer)) is whole.trainer
        whole.train()
        again = Run(folder, build(), STEPS, {})
        local_gradients(again.trainer)
        again.train(str(folder / f"checkpoint-{SAVED}"))
    trained = [param for param in whole.trainer.model.parameters() if param.requires_grad]
    return {
        "gradients": whole.seen.gradients,
        "bytes": [whole.optimizer.stats.bytes_sent, STEPS * bytes_sent(trained, 2)],
        "trained": sum(param.numel() for param in trained),
        "all": sum(param.numel() for param in whole.trainer.model.parameters()),
        "whole": whole.held(),
        "again": again.held(),
        "kept": sum(file.stat().st_size for file in (folder / f"checkpoint-{SAVED}" / "dlion").iterdir()),
        "ended": [whole.trainer.state.global_step, again.trainer.state.global_step],
        "warned": [text for text in warned if "dlion" in text],
    }


def compiled(folder: Path) -> dict[str, Any]:
    run = Run(folder, tiny_model(), 3, {}, torch_compile=True, torch_compile_backend="eager")
    local_gradients(run.trainer)
    run.train()
    return {"gradients": run.seen.gradients, "parameters": run.held()[: -len(run.optimizer.state)]}


def normed(folder: Path) -> dict[str, Any]:
    run = Run(folder, Normed(), 4, {}, eval_strategy="steps", eval_steps=2)
    local_gradients(run.trainer)
    run.train()
    run.trainer.evaluate()
    return {"buffers": run.seen.buffers}


def reported(folder: Path, whole: Path) -> dict[str, Any]:
    """What Trainer's users do wrong."""
    averaging: list[str] = []
    wrong = Run(folder / "wrong", tiny_model(), 4, {})
    with told(averaging):
        wrong.train()

    incomplete: list[str] = []
    wrong.trainer.accelerator.wait_for_everyone()
    if wrong.trainer.is_world_process_zero():
        shutil.rmtree(whole / f"checkpoint-{STEPS}" / "dlion")
    wrong.trainer.accelerator.wait_for_everyone()
    lost = Run(whole, tiny_model(), STEPS + 1, {})
    local_gradients(lost.trainer)
    with told(incomplete):
        lost.train(True)

    adamw = Run(folder / "adamw", tiny_model(), 2, None)
    overlapping = Run(folder / "overlap", tiny_model(), 2, {"overlap": True})
    refused = []
    for run in (adamw, overlapping):
        local_gradients(run.trainer)
        refused.append(refusal(run.train))
    refused.append(refusal(lambda: local_gradients(wrong.trainer)))
    return {"averaging": averaging, "averaged": wrong.seen.gradients, "incomplete": incomplete, "refused": refused}


def work(rank: int, size: int, folder: Path) -> dict[str, Any]:
    meet_as_launched(folder, rank, size)
    return {
        "whole": resumed(folder / "whole", rank, tiny_model),
        "lora": resumed(folder / "lora", rank, lora),
        "compiled": compiled(folder / "compiled"),
        "normed": normed(folder / "normed"),
        "reported": reported(folder, folder / "whole"),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(tmp_path_factory.mktemp("trainer"), 2, work, seconds=110, preload=scripts.PRELOADED)


@pytest.mark.parametrize("what", ["whole", "lora"])
def test_gradients_stay_local_and_parameters_equal(ranks: list[dict[str, Any]], what: str) -> None:
    first, second = (rank[what] for rank in ranks)
    assert len(first["gradients"]) == STEPS
    assert all(a != b for a, b in zip(first["gradients"], second["gradients"], strict=True))
    equal = sum(a == b for a, b in zip(first["whole"], second["whole"], strict=True))
    momenta = 12 * 2 + 4 if what == "whole" else 2 * 2
    assert equal == len(first["whole"]) - momenta
    assert not first["warned"] and not second["warned"]


@pytest.mark.parametrize("what", ["whole", "lora"])
def test_bytes_are_those_of_the_formula(ranks: list[dict[str, Any]], what: str) -> None:
    for rank in ranks:
        sent, expected = rank[what]["bytes"]
        assert sent == expected


def test_frozen_parameters_cost_nothing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["lora"]["trained"] == 2 * 4 * (32 + 96) and rank["lora"]["all"] > 20_000
        assert 8 * rank["lora"]["bytes"][0] / STEPS < 1.6 * rank["lora"]["trained"]  # 1 bit, and headers of 32 bytes
        assert rank["lora"]["kept"] < rank["whole"]["kept"] / 5  # nor are they written twice


@pytest.mark.parametrize("what", ["whole", "lora"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(ranks: list[dict[str, Any]], what: str) -> None:
    for rank in ranks:
        assert rank[what]["again"] == rank[what]["whole"]
        assert rank[what]["ended"] == [STEPS, STEPS]


def test_a_compiled_model_keeps_its_gradients_local_too(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["compiled"] for rank in ranks)
    assert all(a != b for a, b in zip(first["gradients"], second["gradients"], strict=True))
    assert len(first["gradients"]) == 3 and first["parameters"] == second["parameters"]


def test_all_ranks_evaluate_the_same_model(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["normed"]["buffers"] for rank in ranks)
    assert first == second and len(first) == 3 and first[0] != first[1]


def test_what_is_set_up_wrongly_is_reported(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["reported"]["averaged"] == ranks[1]["reported"]["averaged"]
    for rank in ranks:
        said = rank["reported"]
        assert [text for text in said["averaging"] if "averaged already" in text]
        assert [text for text in said["incomplete"] if f"checkpoint-{STEPS}" in text and "is missing" in text]
        adamw, overlapping, late = said["refused"]
        assert "AdamW" in adamw and "train apart" in adamw
        assert "max_grad_norm=1.0" in overlapping and "before accelerator.prepare" in late


def test_what_the_trainer_sets_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weight_decay=0.5 would have no effect.*TrainingArguments"):
        optimizer_for(TrainingArguments(str(tmp_path), use_cpu=True), weight_decay=0.5)


def test_a_search_of_hyper_parameters_keeps_gradients_local(tmp_path: Path) -> None:
    """It makes an accelerator for each trial."""
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = local_gradients(Trainer(tiny_model(), args, optimizer_cls_and_kwargs=optimizer_for(args)))
    for _ in range(2):
        trainer.create_accelerator_and_postprocess()
        assert isinstance(trainer.accelerator.ddp_handler, LocalGradients)
    assert local_gradients(trainer) is trainer
