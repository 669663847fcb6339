"""The training that experiments on a device kill; by a launcher: user_job.py rekindle|torch ROOT STEPS OPTIONS.

OPTIONS is a JSON object: ``shape``, as ``on_gpu.user_model.Shape`` has it, and ``every``, the steps between calls of
``torch.save``. Each rank reports every moment of its start, and a fingerprint of its state after each step.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from recovery_job import connect, started_at, tell


def main() -> None:
    own, root, steps, options = sys.argv[1] == "torch", Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    connect()
    tell("started", at=started_at(), warm="torch" in sys.modules)
    import torch.distributed as dist
    from on_gpu.user_model import Shape, UserJob, fingerprint
    from recovery_model import TorchCheckpoints

    if not own:  # else nothing of Rekindle is imported
        from rekindle import Checkpointer
    tell("imported")
    dist.init_process_group("gloo")
    dist.barrier()
    tell("grouped")
    job = UserJob(Shape(*options["shape"]), ddp=dist.get_world_size() > 1)
    ckpt: Any = TorchCheckpoints(root, job.state, options["every"]) if own else Checkpointer(root, job.state)
    done = ckpt.restore()
    tell("restored", step=done, digest=fingerprint(job) if done else "")
    with nullcontext() if own else ckpt.guard():
        for step in range(done + 1, steps + 1):
            job.work()
            job.update()
            digest = fingerprint(job)  # waits for the device: a step that is reported is complete
            ckpt.step(step)
            tell("step", step=step)
            tell("digest", step=step, digest=digest)
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
