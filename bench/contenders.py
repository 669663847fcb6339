"""Ways to save that come with torch, and Rekindle's: what a training loop calls, and what it has to wait for.

torch.distributed.checkpoint takes a second to import, so only those who use it do.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from machine import fsync_tree
from training import Training

import rekindle

__all__ = [
    "KEEP",
    "Contender",
    "DcpAsync",
    "DcpSave",
    "DcpStager",
    "Rekindle",
    "RekindleAtOnce",
    "RekindleSnapshots",
    "TorchSave",
    "load_dcp",
    "load_torch",
    "wait_for_memory",
]

KEEP = 2
"""Checkpoints that stay on disk; Rekindle's default, and the others are tidied to the same."""


class Contender:
    """One way to save. Everything is as its library has it by default, unless its docstring says otherwise."""

    module = ""
    """Packages that it needs, beside torch."""

    def __init__(self, training: Training, root: Path) -> None:
        self.training, self.root = training, root
        self.skipped = 0
        """Saves that the library left out without being told to."""
        root.mkdir(exist_ok=True)

    @staticmethod
    def path_of(root: Path, step: int) -> Path:
        return root / f"{step}"

    def path(self, step: int) -> Path:
        return self.path_of(self.root, step)

    def prepare(self) -> None:
        """Does what training itself would have done before a save; not timed."""

    def save(self, step: int) -> None:
        """Saves as the training loop does, which waits for this call."""
        raise NotImplementedError

    def ready(self) -> None:
        """Wait until the state may change again."""

    def finish(self, step: int) -> None:
        """Wait, in another thread, until the bytes of ``step`` are on the disk."""
        fsync_tree(self.path(step))

    def tidy(self, step: int) -> None:
        """Remove a surplus checkpoint, outside of all that is timed."""
        old = self.path(step - KEEP)
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)

    def helpers(self) -> list[int]:
        """Processes that work for this contender."""
        return []

    def close(self) -> None:
        pass


class TorchSave(Contender):
    """``torch.save`` to a file. It doesn't sync, so ``finish`` does."""

    def save(self, step: int) -> None:
        torch.save(self.training.state_dict(), self.path(step))


class DcpSave(Contender):
    """``dcp.save``. It syncs its files but not the directories, so ``finish`` does that."""

    def __init__(self, training: Training, root: Path) -> None:
        import torch.distributed.checkpoint

        super().__init__(training, root)
        self.dcp = torch.distributed.checkpoint

    def save(self, step: int) -> None:
        self.dcp.save(self.training.state_dict(), checkpoint_id=self.path(step))


class DcpAsync(DcpSave):
    """``dcp.async_save`` as it comes: a copy into new memory inside of the call, written by a thread."""

    upload: Future[Any] | None = None

    def _wait(self) -> None:
        """For the save before, as everybody does who doesn't want two states in memory and more."""
        if self.upload is not None:
            self.upload.result()

    def save(self, step: int) -> None:
        self._wait()
        self.upload = self.dcp.async_save(self.training.state_dict(), checkpoint_id=self.path(step))

    def finish(self, step: int) -> None:
        self._wait()
        super().finish(step)


class DcpStager(DcpAsync):
    """``dcp.async_save`` with a stager that is kept: its thread copies into shared memory that is used again.

    Nothing in torch stops an update while that copy runs; the caller has to wait, as ``ready`` does.
    """

    staging: Future[Any] | None = None
    pinned = False
    """Whether copies of a device's tensors go into page-locked memory, without waiting for them: torch's default."""

    def __init__(self, training: Training, root: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(training, root)
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=self.pinned,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=self.pinned,
            )
        )

    def save(self, step: int) -> None:
        self._wait()
        state, path = self.training.state_dict(), self.path(step)
        response = self.dcp.async_save(state, checkpoint_id=path, async_stager=self.stager)
        self.staging, self.upload = response.staging_completion, response.upload_completion

    def ready(self) -> None:
        if self.staging is not None:
            self.staging.result()

    def close(self) -> None:
        self.stager.close()


class Rekindle(Contender):
    """A save into memory; the agent carries it to the disk and syncs it there."""

    settings: dict[str, Any] = {"snapshot_every": 1, "persist_seconds": 0}

    def __init__(self, training: Training, root: Path) -> None:
        super().__init__(training, root)
        state = {"model": training.model, "optimizer": training.optimizer}
        self.checkpointer = rekindle.Checkpointer(root, state, keep=KEEP, strict=True, **self.settings)
        self.checkpointer.restore()

    @staticmethod
    def path_of(root: Path, step: int) -> Path:
        return root / f"step-{step:010d}"

    def prepare(self) -> None:
        wait_for_memory(self.checkpointer)

    def save(self, step: int) -> None:
        self.checkpointer.step(step)

    def finish(self, step: int) -> None:
        manifest = self.path(step) / "checkpoint.json"  # it is written last, everything else being synced
        deadline = time.monotonic() + 600
        while not manifest.exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"step {step} is not durable after 600 s")
            time.sleep(0.002)

    def tidy(self, step: int) -> None:
        pass  # the agent does it

    def helpers(self) -> list[int]:
        status = Path(os.environ["REKINDLE_MEMORY"]).glob("rekindle-*/*/agent.json")
        return [json.loads(path.read_bytes())["pid"] for path in status]

    def close(self) -> None:
        self.checkpointer.close()


class RekindleAtOnce(Rekindle):
    """``overlap=False``: everything is copied inside of the call."""

    settings = {"snapshot_every": 1, "persist_seconds": 0, "overlap": False}


class RekindleSnapshots(Rekindle):
    """A ``persist_every`` out of reach: snapshots only. For a loop, to tell their cost from that of the drain."""

    settings = {"snapshot_every": 1, "persist_every": 10**9}

    def finish(self, step: int) -> None:
        self.checkpointer.latest()  # it looks once the newest save is in memory


def wait_for_memory(checkpointer: rekindle.Checkpointer) -> None:
    """Wait until a snapshot needs no memory to be made. The steps before that are ``bench/first.py``'s business."""
    memory = checkpointer._saver.memory
    if memory is None or not memory.slots.wait_made(600):
        raise SystemExit("there is no memory for snapshots")


def load_torch(training: Training, path: Path) -> float:
    """Seconds."""
    began = time.perf_counter()
    state = torch.load(path)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    return time.perf_counter() - began


def load_dcp(training: Training, path: Path) -> float:
    """Seconds. dcp loads into tensors that exist, so the caller must have made AdamW's."""
    import torch.distributed.checkpoint as dcp

    began = time.perf_counter()
    state = training.state_dict()
    dcp.load(state, checkpoint_id=path)  # straight into the live tensors, so the model needs no load_state_dict()
    training.optimizer.load_state_dict(state["optimizer"])
    return time.perf_counter() - began
