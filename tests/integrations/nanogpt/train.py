"""Train a small GPT, on one process or, under torchrun, on several with DistributedDataParallel.

torchrun --nproc-per-node 2 train.py --data=folder --max_iters=2000
"""

import math
import os
import sys
import time
from contextlib import nullcontext

import numpy as np
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

from model import GPT

settings = {
    "data": "data",  # folder of train.bin and val.bin: tokens, u16
    "out": "out",
    "init_from": "scratch",  # or "resume"
    "eval_interval": 200,
    "eval_iters": 20,
    "log_interval": 10,
    "batch_size": 8,
    "length": 64,
    "accumulate": 4,  # micro-batches of a step, over all processes
    "vocabulary": 256,
    "layers": 4,
    "heads": 4,
    "width": 128,
    "learning_rate": 6e-4,
    "min_lr": 6e-5,
    "warmup_iters": 20,
    "max_iters": 2000,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "dtype": "float32",  # or "bfloat16", "float16"
    "compile": "",  # a backend of torch.compile
    "seed": 1337,
}
for argument in sys.argv[1:]:
    key, value = argument.removeprefix("--").split("=")
    settings[key] = type(settings[key])(value)
s = type("Settings", (), settings)

parallel = int(os.environ.get("RANK", -1)) != -1
if parallel:
    init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
master = rank == 0
accumulate = s.accumulate // world_size
device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
kind = device.split(":")[0]
os.makedirs(s.out, exist_ok=True)
torch.manual_seed(s.seed + rank)
autocast = nullcontext() if s.dtype == "float32" else torch.autocast(kind, getattr(torch, s.dtype))


def say(text):
    if master:
        print(text, flush=True)


def get_batch(split, *place):
    tokens = np.memmap(os.path.join(s.data, f"{split}.bin"), dtype=np.uint16, mode="r")
    starts = np.random.default_rng([s.seed, rank, *place]).integers(len(tokens) - s.length - 1, size=s.batch_size)
    rows = torch.from_numpy(np.stack([tokens[i : i + s.length + 1] for i in starts]).astype(np.int64)).to(device)
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = {}
    for split in ("train", "val"):
        found = [raw_model(*get_batch(split, i))[1].item() for i in range(s.eval_iters)]
        losses[split] = sum(found) / len(found)
    model.train()
    return losses


def get_lr(step):
    if step < s.warmup_iters:
        return s.learning_rate * (step + 1) / (s.warmup_iters + 1)
    along = min((step - s.warmup_iters) / max(s.max_iters - s.warmup_iters, 1), 1)
    return s.min_lr + 0.5 * (1 + math.cos(math.pi * along)) * (s.learning_rate - s.min_lr)


step = 0
model = GPT(s.vocabulary, s.length, s.layers, s.heads, s.width).to(device)
checkpoint_file = os.path.join(s.out, "ckpt.pt")
scaler = torch.amp.GradScaler(kind, enabled=s.dtype == "float16")
groups = model.parameter_groups(s.weight_decay)
optimizer = torch.optim.AdamW(groups, lr=s.learning_rate, betas=(s.beta1, s.beta2))
if s.init_from == "resume":
    checkpoint = torch.load(checkpoint_file, map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    step = checkpoint["step"]

raw_model = model
if s.compile:
    model = torch.compile(model, backend=s.compile)
if parallel:
    model = DDP(model)

began = time.time()
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)

    if step % s.eval_interval == 0 and master:
        losses = estimate_loss()
        say(f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        state = {
            "model": raw_model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "settings": settings,
        }
        torch.save(state, checkpoint_file)
    if step >= s.max_iters:
        break

    for micro in range(accumulate):
        if parallel:
            model.require_backward_grad_sync = micro == accumulate - 1
        with autocast:
            logits, loss = model(*get_batch("train", s.eval_iters + step, micro))
        scaler.scale(loss / accumulate).backward()
    if s.grad_clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % s.log_interval == 0:
        say(f"iter {step}: loss {loss.item():.4f}, {time.time() - began:.1f} s")
    step += 1

if parallel:
    destroy_process_group()
