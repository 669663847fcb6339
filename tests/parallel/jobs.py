"""A job that saves, and one of another shape that goes on from there: what runs on their ranks, and their stores."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle.format.names import root_path
from rekindle.memory.job_dir import JobDir
from tests.faults.harness import end_agent
from tests.parallel.launch import Answer, on_ranks

__all__ = ["AFTER", "SAVED", "Resumed", "Saved", "Stores", "resume", "save", "state_of"]

SAVED = 3
"""The step that is saved."""
AFTER = 5
"""Steps made after it, by the unbroken run and by the one that goes on."""


@dataclass(frozen=True)
class Stores:
    """A root, and the memory that belongs to it."""

    root: Path
    memory: Path

    @staticmethod
    def under(place: Path, memory: Path) -> Stores:
        """New ones that nobody has used."""
        root = Path(tempfile.mkdtemp(dir=place)) / "run"
        return Stores(root, Path(tempfile.mkdtemp(dir=memory)))

    @property
    def job(self) -> JobDir:
        return JobDir.of(root_path(self.root), self.memory / f"rekindle-{os.getuid()}")

    def take(self, other: Stores, where: str) -> None:
        """Copy what ``other`` holds, of which it keeps everything: all that is in memory, or all that is on storage."""
        if where == "storage":
            shutil.copytree(other.root, self.root, symlinks=True)
            return
        self.job.create()
        for directory in other.job.snapshots.step_dirs():
            shutil.copytree(directory, self.job.path / directory.name)

    def remove(self) -> None:
        """Whoever still serves them is ended."""
        end_agent(self.job)
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.root.parent, ignore_errors=True)


@dataclass
class Saved:
    """What a job left when it had saved step ``SAVED`` and went on for ``AFTER`` more."""

    kind: str
    world: int
    stores: Stores
    answers: list[Answer]

    @property
    def truth(self) -> Path:
        return self.stores.root.parent / "truth.pt"

    @property
    def losses(self) -> list[list[float]]:
        return _losses(self.answers)


@dataclass
class Resumed:
    """What became of a job that went on from what another one saved."""

    kind: str
    world: int
    answers: list[Answer] = field(default_factory=list)

    @property
    def losses(self) -> list[list[float]]:
        return _losses(self.answers)

    @property
    def error(self) -> str:
        """What the first rank that failed has to say; empty if all is well."""
        return next((f"{a.error}: {a.message}" for a in self.answers if a.error), "")


def _losses(answers: list[Answer]) -> list[list[float]]:
    """Of each rank that has the loss, and each step."""
    return [answer["losses"] for answer in answers if answer["losses"][0] is not None]


def save(kind: str, world: int, place: Path, memory: Path) -> Saved:
    """Train from the start, save, train on."""
    saved = Saved(kind, world, Stores.under(place, memory), [])
    saved.answers = on_ranks(world, saving, kind, saved.stores, saved.truth, grouped=kind != "single")
    end_agent(saved.stores.job)
    assert not any(a.error for a in saved.answers), next(a.trace or a.message for a in saved.answers if a.error)
    return saved


def resume(saved: Saved, kind: str, world: int, where: str, place: Path, memory: Path) -> Resumed:
    """Go on, with a job of another shape, from what ``saved`` left in memory or on storage; the other is empty."""
    stores = Stores.under(place, memory)
    try:
        stores.take(saved.stores, where)
        grouped = kind != "single"
        return Resumed(kind, world, on_ranks(world, resuming, kind, stores, saved.truth, grouped=grouped))
    finally:
        stores.remove()


# -- what runs on a rank --------------------------------------------------------------------------------------------


def state_of(part: Any, **notes: Any) -> dict[str, Any]:
    """The state that the job gives to its checkpoints."""
    import rekindle

    return {
        "model": part.model,
        "optimizer": part.optimizer,
        "scheduler": part.scheduler,
        "notes": rekindle.Values(**notes),
    }


def saving(rank: int, world: int, kind: str, stores: Stores, truth: Path) -> dict[str, Any]:
    import torch

    import rekindle
    from tests.parallel.kinds import build
    from tests.parallel.truth import gather

    part = build(kind, world)
    torch.manual_seed(100 + rank)
    state = state_of(part, rank=rank, seen=0)
    ckpt = rekindle.Checkpointer(stores.root, state, memory=stores.memory)
    assert ckpt.restore() == 0
    counts = []
    for step in range(1, SAVED + 1):
        part.step(step)
        state["notes"].seen = step
        before = messages()
        ckpt.step(step) if step < SAVED else ckpt.save(step, wait="durable", timeout=30)
        counts.append([before, messages()])
    whole = gather(part)
    if rank == 0:
        torch.save(whole, truth)
    return _go_on(part) | {"messages": counts}


def messages() -> list[int]:
    """How many collectives and messages each process group of this rank has carried, as torch itself counts them."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return []
    return [group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map]


def resuming(rank: int, world: int, kind: str, stores: Stores, truth: Path) -> dict[str, Any]:
    import torch

    import rekindle
    from tests.parallel.kinds import build
    from tests.parallel.truth import differences, gather

    part = build(kind, world, seed=99, wrong=True)
    state = state_of(part, rank=-1, seen=-1)
    ckpt = rekindle.Checkpointer(stores.root, state, memory=stores.memory)
    done = ckpt.restore()
    found = {"step": done, "place": ckpt.metrics.restored_from, "notes": [state["notes"].rank, state["notes"].seen]}
    whole = gather(part)
    if rank == 0:
        found["different"] = differences(torch.load(truth), whole)
    return found | _go_on(part)


def _go_on(part: Any) -> dict[str, Any]:
    import torch

    draws = torch.rand(3).tolist()
    return {"draws": draws, "losses": [part.step(SAVED + 1 + i) for i in range(AFTER)]}
