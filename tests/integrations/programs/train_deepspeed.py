"""Trains with ZeRO on two ranks, saves each step, and dies or goes on.

train_deepspeed.py ROOT --stage N --steps N [--alone | --die-after-save N | --die-after-update N] [--late]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import threading

import deepspeed
import torch

from rekindle.integrations.deepspeed import attach
from rekindle.integrations.deepspeed import engine as ours

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # compiling it takes minutes, and gloo does without

options = argparse.ArgumentParser()
options.add_argument("root")
options.add_argument("--stage", type=int, default=1)
options.add_argument("--steps", type=int, default=5)
options.add_argument("--die-after-save", type=int)
options.add_argument("--die-after-update", type=int)
options.add_argument("--alone", action="store_true", help="DeepSpeed saves by itself")
options.add_argument("--late", action="store_true", help="copies begin when the next update has")
given = options.parse_args()
rank = int(os.environ["RANK"])
updating = threading.Event()


def copy_late() -> None:
    """Lets copies wait for the update that has to wait for them: what could change before has changed by then."""
    save_target = ours.save_target

    def late(*args, **kwargs):
        assert updating.wait(60)
        return save_target(*args, **kwargs)

    ours.save_target, ours._AT_ONCE = late, 0


def digest(*values: object) -> str:
    """A hash of all bytes of tensors, and of numbers."""
    found = hashlib.sha256()

    def walk(value):
        if isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for _, item in sorted(value.items(), key=lambda item: str(item[0])):
                walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif isinstance(value, (int, float)):
            found.update(repr(value).encode())

    walk(values)
    return found.hexdigest()


deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = [torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Linear(32, 4)]
model = torch.nn.Sequential(*layers).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": given.stage},
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
if not given.alone:
    attach(engine, given.root)
path, client = engine.load_checkpoint(given.root)
start = 0 if path is None else client["step"]
assert path is None or (client["notes"] == start).all(), client
print("start", start, flush=True)
if given.late:
    copy_late()
notes = torch.zeros(8)  # of the user, who changes it at once
for step in range(start + 1, given.steps + 1):
    # The same for all ranks, as are the buffers of batch norm then: DeepSpeed saves those of rank 0 alone.
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    loss = (engine(x.to(torch.bfloat16)).float() - rank).pow(2).mean()
    engine.backward(loss)
    if given.late and step > start + 1:
        threading.Timer(0.3, updating.set).start()  # while the update waits
    engine.step()
    updating.clear()
    if given.die_after_update == step:
        os.kill(os.getpid(), signal.SIGKILL)
    notes.fill_(step)
    engine.save_checkpoint(given.root, client_state={"step": step, "notes": notes})
    notes.fill_(-1)
    if given.die_after_save == step:
        os.kill(os.getpid(), signal.SIGKILL)
updating.set()
print("digest", digest(engine.module.state_dict(), engine.optimizer.state_dict()), flush=True)
weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
engine.destroy()
if rank == 0:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(given.root)
    for name, value in found.items():
        whole = weights[name].numel() == value.numel()  # ZeRO-3 has parts
        assert not whole or torch.equal(value.to(torch.bfloat16), weights[name].to(torch.bfloat16)), name
    print("converted", len(found), flush=True)
