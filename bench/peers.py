"""Ways to save of other projects, none of which has to be installed: torchsnapshot, DLRover, Orbax."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from contenders import Contender
from machine import fsync_tree
from training import Training

__all__ = ["Dlrover", "Orbax", "SnapshotAsync", "SnapshotTake", "load_dlrover", "load_orbax", "load_snapshot"]


class SnapshotTake(Contender):
    """torchsnapshot's ``Snapshot.take``. It syncs nothing, so ``finish`` does."""

    module = "torchsnapshot"

    def state(self) -> dict[str, Any]:
        return {"model": self.training.model, "optimizer": self.training.optimizer}

    def save(self, step: int) -> None:
        import torchsnapshot

        torchsnapshot.Snapshot.take(str(self.path(step)), self.state())


class SnapshotAsync(SnapshotTake):
    """torchsnapshot's ``Snapshot.async_take``: returns when all is copied."""

    pending: Any = None

    def save(self, step: int) -> None:
        import torchsnapshot

        self._wait()
        self.pending = torchsnapshot.Snapshot.async_take(str(self.path(step)), self.state())

    def _wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()

    def finish(self, step: int) -> None:
        self._wait()
        fsync_tree(self.path(step))


def load_snapshot(training: Training, path: Path) -> float:
    """Seconds."""
    import torchsnapshot

    began = time.perf_counter()
    torchsnapshot.Snapshot(str(path)).restore({"model": training.model, "optimizer": training.optimizer})
    return time.perf_counter() - began


class Dlrover(Contender):
    """DLRover's flash checkpoint, as under plain torchrun: a copy into shared memory, written by a process beside it.

    A save that comes while it writes is left out; ``skipped`` counts them.
    """

    module = "dlrover"

    def __init__(self, training: Training, root: Path) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        super().__init__(training, root)
        # A job of one rank: what torchrun would have set, and the process group that the engine asks for.
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", GROUP_RANK="0")
        os.environ.update(GROUP_WORLD_SIZE="1", ROLE_NAME="default")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self._checkpointer = DdpCheckpointer(str(root))

    @staticmethod
    def path_of(root: Path, step: int) -> Path:
        return root / f"{step}"

    def save(self, step: int) -> None:
        self._checkpointer.save_checkpoint(step, self.training.state_dict())
        self.skipped += self._checkpointer._engine.latest_step != step

    def finish(self, step: int) -> None:
        tracker = self.root / "dlrover_latest.txt"
        deadline = time.monotonic() + 600
        # Steps that were left out never come; then the newest that did is what there is to wait for.
        wanted = self._checkpointer._engine.latest_step
        while not tracker.exists() or tracker.read_text().strip() != str(wanted):
            if time.monotonic() > deadline:
                raise SystemExit(f"step {step} is not on storage after 600 s")
            time.sleep(0.002)
        fsync_tree(self.path(wanted))

    def helpers(self) -> list[int]:
        process = self._checkpointer._engine.saver_proc
        return [process.pid] if process is not None else []

    def close(self) -> None:
        self._checkpointer._engine.close()
        process = self._checkpointer._engine.saver_proc
        if process is not None:
            process.kill()


def load_dlrover(training: Training, path: Path) -> float:
    """Seconds. Its files are torch's; its memory is gone with the process that held its directory."""
    began = time.perf_counter()
    state = torch.load(path / "rank_0.pt")
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    return time.perf_counter() - began


def _arrays(training: Training) -> dict[str, Any]:
    import jax.numpy as jnp

    return {str(index): jnp.array(tensor.numpy()) for index, tensor in enumerate(training.tensors())}


class Orbax(Contender):
    """Orbax's ``AsyncCheckpointer`` of JAX arrays. Those never change, so that it needs no copy: not comparable.

    An update in JAX makes new arrays; ``prepare`` makes them from torch's tensors.
    """

    module = "orbax.checkpoint"

    def __init__(self, training: Training, root: Path) -> None:
        import orbax.checkpoint

        super().__init__(training, root)
        self._checkpointer = orbax.checkpoint.AsyncCheckpointer(orbax.checkpoint.StandardCheckpointHandler())

    def prepare(self) -> None:
        self._state = _arrays(self.training)

    def save(self, step: int) -> None:
        import orbax.checkpoint

        self._checkpointer.save(self.path(step).resolve(), args=orbax.checkpoint.args.StandardSave(self._state))

    def finish(self, step: int) -> None:
        self._checkpointer.wait_until_finished()
        fsync_tree(self.path(step))

    def close(self) -> None:
        self._checkpointer.close()


def load_orbax(training: Training, path: Path) -> float:
    """Seconds, of Orbax alone; copying what it gives into torch's tensors, for the comparison, isn't counted."""
    import numpy
    import orbax.checkpoint

    target = _arrays(training)
    checkpointer = orbax.checkpoint.StandardCheckpointer()
    began = time.perf_counter()
    state = checkpointer.restore(path.resolve(), target)
    seconds = time.perf_counter() - began
    for index, tensor in enumerate(training.tensors()):
        tensor.copy_(torch.from_numpy(numpy.array(state[str(index)])))
    checkpointer.close()
    return seconds
