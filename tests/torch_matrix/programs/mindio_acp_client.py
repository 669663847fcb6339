"""The shortest client of mindio_acp: dies behind its save, and loads in its next start."""

import os
import signal
import sys

import mindio_acp
import torch

path = sys.argv[1] + "/model.pt"
assert mindio_acp.initialize() == 0
if not os.path.exists(sys.argv[1] + "/killed-0-0"):
    assert mindio_acp.save({"step": 3, "weights": torch.arange(1000.0)}, path) == 1
    open(sys.argv[1] + "/killed-0-0", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
found = mindio_acp.load(path)
assert found["step"] == 3 and torch.equal(found["weights"], torch.arange(1000.0))
assert mindio_acp.flush() == 0
assert torch.load(path, weights_only=True)["step"] == 3
