"""Trainer of Hugging Face: gradients stay local, checkpoints keep every worker's momentum, buffers stay together."""

from pathlib import Path
from typing import Any

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
    from transformers import TrainingArguments as Args
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as error:
    raise ImportError(
        'dlion.integrations.transformers needs transformers: pip install "dlion[transformers]"'
    ) from error

from dlion.integrations import accelerate, ddp, momenta
from dlion.lion import DistributedLion


def optimizer_for(args: Args, **options: Any) -> tuple[type[DistributedLion], dict[str, Any]]:
    """What Trainer takes as `optimizer_cls_and_kwargs`: `DistributedLion` with the learning rate of `args`.

    Weight decay, and which parameters have it, Trainer sets itself. Lion wants a third to a tenth of AdamW's learning
    rate, and 3 to 10 times its weight decay.

    Args:
        options: further arguments of `DistributedLion`.

    Raises:
        ValueError: for `weight_decay`, which Trainer would write over.
    """
    if "weight_decay" in options:
        raise ValueError(
            f"weight_decay={options['weight_decay']!r} would have no effect, since Trainer sets its own: give it to "
            "TrainingArguments"
        )
    return DistributedLion, {"lr": args.learning_rate, **options}


def local_gradients(trainer: Trainer) -> Trainer:
    """Make every worker keep its gradients to itself, and the Trainer's checkpoints keep every worker's momentum.

    Call it on all workers, before `train`.

    Args:
        trainer: modified in place; its optimizer must be dlion's, see `optimizer_for`.

    Returns:
        The same trainer.

    Raises:
        ValueError: it averages gradients in a way that cannot be switched off (FSDP, DeepSpeed, ...).
    """
    accelerate.local_gradients(trainer.accelerator)
    if any(isinstance(callback, EveryWorker) for callback in trainer.callback_handler.callbacks):
        return trainer
    make = trainer.create_accelerator_and_postprocess

    def make_local() -> None:  # a search of hyper-parameters makes an accelerator for each trial
        make()
        accelerate.local_gradients(trainer.accelerator)

    trainer.create_accelerator_and_postprocess = make_local
    callback = EveryWorker()
    trainer.add_callback(callback)
    train = trainer.train

    def train_from(resume_from_checkpoint: str | bool | None = None, *rest: Any, **options: Any) -> Any:
        # no callback is told where training is resumed from
        last = resume_from_checkpoint is True
        path = get_last_checkpoint(trainer.args.output_dir) if last else resume_from_checkpoint
        callback.resumed_from = Path(str(path)) if path else None
        return train(resume_from_checkpoint, *rest, **options)

    trainer.train = train_from
    return trainer


class EveryWorker(TrainerCallback):
    """What all workers do together beside training: save and restore their state, and have the same buffers.

    Attributes:
        resumed_from: the checkpoint from which training begins, None for none.
    """

    def __init__(self) -> None:
        self.resumed_from: Path | None = None

    def on_train_begin(self, args: Args, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        optimizer = accelerate.bare(of["optimizer"])
        if optimizer.options.overlap and (args.max_grad_norm > 0 or args.gradient_accumulation_steps > 1):
            raise ValueError(
                f"overlap=True votes during backward, and Trainer would change gradients later (max_grad_norm="
                f"{args.max_grad_norm}, gradient_accumulation_steps={args.gradient_accumulation_steps}): set them to 0 "
                "and 1, or use overlap=False"
            )
        if self.resumed_from is not None:
            momenta.load(self.resumed_from, [of["model"]], [optimizer])

    def on_step_end(self, args: Args, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        if control.should_evaluate or control.should_save:
            ddp.synchronize_buffers(of["model"])

    on_epoch_end = on_step_end

    def on_train_end(self, args: Args, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        ddp.synchronize_buffers(of["model"])

    def on_save(self, args: Args, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        if args.save_only_model or state.is_hyper_param_search:  # not to be resumed, or in a folder of another name
            return
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        momenta.save(folder, [of["model"]], [accelerate.bare(of["optimizer"])])
