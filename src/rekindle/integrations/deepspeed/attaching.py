"""Puts the memory store under a DeepSpeed engine that has been made."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from rekindle.errors import UsageError
from rekindle.files.saving import canonical_target_within
from rekindle.integrations.deepspeed.engine import RekindleCheckpointEngine
from rekindle.integrations.deepspeed.notes import look
from rekindle.integrations.versions import warn_if_untested
from rekindle.session.group import this_group

__all__ = ["attach"]

_TESTED = ("0.19", "0.19")
"""First and last series of deepspeed that the tests have run with."""


def attach(engine: Any, root: str | os.PathLike[str]) -> RekindleCheckpointEngine:
    """Lets the checkpoints of a DeepSpeed engine go to memory first, by its own ``save_checkpoint``.

    To be called on all ranks, after ``deepspeed.initialize``. Files of up to 64 MiB are in memory when
    ``save_checkpoint`` returns, larger ones before the next update. Agents carry them to their paths, and then
    ``latest`` names the checkpoint. ``load_checkpoint`` without a tag goes on from the newest checkpoint that is whole,
    in memory or on storage.

    Args:
        engine: what ``deepspeed.initialize`` returns.
        root: the ``save_dir`` of the checkpoints, which all nodes see. Other directories are left as they were.

    Returns:
        The checkpoint engine, which is ``engine.checkpoint_engine`` from now on.

    Raises:
        UsageError: the engine keeps its optimizer on NVMe, has an asynchronous checkpoint writer, or has been attached;
            or ``root`` is no directory's path.
    """
    _check(engine, root)
    warn_if_untested("deepspeed", *_TESTED)
    directory = Path(canonical_target_within(Path(root) / "latest")).parent
    group = this_group()
    sights = group.gather(look(directory, storage=group.rank == 0))
    numbers = [note.number for sight in sights for note in sight.notes]
    start = group.gather(secrets.token_hex(8))[0]
    ours = RekindleCheckpointEngine(engine, directory, group, start, max(numbers, default=0))
    ours.name_newest(sights)
    save, load = engine.save_checkpoint, engine.load_checkpoint

    def save_checkpoint(*args: Any, **options: Any) -> Any:
        done = save(*args, **options)
        ours.end()
        return done

    def load_checkpoint(load_dir: str, tag: str | None = None, *args: Any, **options: Any) -> Any:
        if ours.is_ours(load_dir) and not engine.load_universal_checkpoint():
            tag = ours.find(tag)
        return load(load_dir, tag, *args, **options)

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
    engine.checkpoint_engine = ours
    return ours


def _check(engine: Any, root: str | os.PathLike[str]) -> None:
    if "://" in os.fspath(root):
        raise UsageError(f"root is {root!r}: DeepSpeed saves into directories: give one")
    if isinstance(engine.checkpoint_engine, RekindleCheckpointEngine):
        raise UsageError("this engine is attached already")
    if engine.checkpoint_engine.is_decoupled():
        raise UsageError(
            "this engine has an asynchronous checkpoint writer of its own: take 'writer' out of 'checkpoint' in the "
            "configuration of DeepSpeed"
        )
    if engine.zero_nvme_offload_optimizer():
        raise UsageError(
            "this engine keeps its optimizer's state on NVMe, and DeepSpeed copies those files by itself: they can't "
            "go through memory"
        )
