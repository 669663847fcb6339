"""Trains with DeepSpeed's own engine for Nebula, on two ranks that ``rekindle run --provide torch_nebula`` starts.

train_nebula.py ROOT --stage N --steps N [--load true|false] [--die-after-save N]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys

import deepspeed
import torch
import torch_nebula

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # compiling it takes minutes, and gloo does without

options = argparse.ArgumentParser()
options.add_argument("root")
options.add_argument("--stage", type=int, default=1)
options.add_argument("--steps", type=int, default=4)
options.add_argument("--load", choices=["true", "false"], help="without it DeepSpeed saves by itself")
options.add_argument("--die-after-save", type=int)
given = options.parse_args()
rank = int(os.environ["RANK"])

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = [torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)]
model = torch.nn.Sequential(*layers).to(torch.bfloat16)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": given.stage},
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "nebula": {
        "enabled": given.load is not None,
        "persistent_storage_path": given.root,
        "persistent_time_interval": 1,
        "num_of_version_in_retention": 2,
        "enable_nebula_load": given.load == "true",
    },
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
assert (type(engine.checkpoint_engine).__name__ == "NebulaCheckpointEngine") == (given.load is not None)
path, client = engine.load_checkpoint(given.root)
start = 0 if path is None else client["step"]
for step in range(start + 1, given.steps + 1):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    loss = (engine(x.to(torch.bfloat16)).float() - rank).pow(2).mean()
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(given.root, client_state={"step": step})
    if given.die_after_save == step:
        os.kill(os.getpid(), signal.SIGKILL)
found = hashlib.sha256()
for group in engine.optimizer.optimizer.state.values():
    for value in group.values():
        found.update(value.detach().float().numpy().tobytes())
for value in engine.module.state_dict().values():
    found.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
assert given.load is None or torch_nebula.flush_persistence()
sys.stdout.write(f"start-{rank} {start}\ndigest-{rank} {found.hexdigest()}\n")
