"""A small language model fine-tuned with LoRA through Trainer, by votes of one bit per parameter of the adapter.

torchrun --nproc-per-node 4 examples/with_trainer.py
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from dlion.integrations.transformers import local_gradients, optimizer_for

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--out", default="trainer-out", help="folder for checkpoints")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
given = parser.parse_args()

# The sources of Python's own library, letter by letter; a model from a config: nothing is downloaded.
sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
letters = torch.tensor(list(b"".join(path.read_bytes() for path in sources[:40])))
rows = [{"input_ids": row, "labels": row} for row in letters[: len(letters) // 64 * 64].view(-1, 64)]
torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=given.width, n_layer=2, n_head=2)
model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True))

args = TrainingArguments(
    output_dir=given.out,
    max_steps=given.steps,
    per_device_train_batch_size=8,
    learning_rate=3e-4,
    weight_decay=0.1,
    save_steps=given.steps // 2,
    eval_strategy="steps",
    eval_steps=given.steps // 2,
    logging_steps=max(given.steps // 10, 1),
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows[100:],
    eval_dataset=rows[:100],
    optimizer_cls_and_kwargs=optimizer_for(args),
)
local_gradients(trainer).train(resume_from_checkpoint=given.resume)

if trainer.is_world_process_zero():
    votes, (adapter, whole) = trainer.optimizer.optimizer, model.get_nb_trainable_parameters()
    print(f"{adapter:,} of {whole:,} parameters vote: {votes.stats.bits_per_param_sent:.2f} bits of each sent a step")
