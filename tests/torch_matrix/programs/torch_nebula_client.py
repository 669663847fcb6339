"""The shortest client of torch_nebula: dies behind its commit, and loads in its next start."""

import os
import signal
import sys

import torch
import torch_nebula

torch_nebula.init(sys.argv[1] + "/nebula", persistent_time_interval=1)
if not os.path.exists(sys.argv[1] + "/killed-0-0"):
    checkpoint = torch_nebula.Checkpoint("step3", -2)
    checkpoint.save("rank_0.pt", {"step": 3, "weights": torch.arange(1000.0)})
    checkpoint.commit()
    open(sys.argv[1] + "/killed-0-0", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
latest = torch_nebula.get_latest_checkpoint()
assert latest is not None and latest.tag == "step3"
found = latest.load("rank_0.pt", map_location="cpu")
assert found["step"] == 3 and torch.equal(found["weights"], torch.arange(1000.0))
assert torch_nebula.flush_persistence()
