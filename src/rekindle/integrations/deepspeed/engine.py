"""Saves and loads DeepSpeed's checkpoint files through the memory store, as one of its checkpoint engines."""

from __future__ import annotations

import logging
import os
import sys
import time
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import with_timeout
from rekindle.common.workers import Workers
from rekindle.errors import CorruptError, NotDurableError
from rekindle.faults.imports import note_save
from rekindle.files import load, status
from rekindle.files.contents import of_bytes
from rekindle.files.pickled import of_object
from rekindle.files.saving import canonical_target_within, save_target
from rekindle.integrations.deepspeed.latest import LatestKeeper
from rekindle.integrations.deepspeed.notes import Entry, Note, Sight, choose, look, note_path, read_latest, whole
from rekindle.integrations.deepspeed.stable import freeze, stable_storages
from rekindle.session.group import ProcessGroup, SingleProcess

__all__ = ["RekindleCheckpointEngine"]

log = logging.getLogger("rekindle")

_AT_ONCE = 64 << 20
"""Bytes of a file up to which ``save`` copies it before it returns, in some 20 ms."""
_ARRIVES = 600.0
"""Seconds that a load waits for a file that only another node's memory has."""
_POLL = 0.05
_LOOK = 3.0
"""Seconds that storage gets to show what is at a path."""


class RekindleCheckpointEngine:
    """Checkpoint engine of one rank, for the checkpoints of one directory. ``attach`` makes it.

    It has the methods of DeepSpeed's ``CheckpointEngine``. All that it doesn't know, and all other directories, are
    left to the engine that was there before. Every method is called on all ranks, in the same order.
    """

    def __init__(self, engine: Any, root: Path, group: ProcessGroup | SingleProcess, start: str, number: int) -> None:
        self.name = "RekindleCheckpointEngine"
        self._engine, self._before = engine, engine.checkpoint_engine
        self._root, self._group = root, group
        self._start, self._number = start, number
        self._info: Any = None
        """DeepSpeed's words about the checkpoint that is being saved, up to its commit."""
        self._note: Note | None = None
        """That of this rank about it, if it belongs to the directory."""
        self._copies: list[Future[object]] = []
        self._threads = Workers(1, "rekindle-deepspeed")
        self._expected: dict[str, Entry] = {}
        """Files of the checkpoint that is being loaded, by path."""
        self._latest = LatestKeeper(root, start) if group.rank == 0 else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._before, name)

    def is_ours(self, directory: str | os.PathLike[str]) -> bool:
        """True if the checkpoints of this directory go through the memory store."""
        return canonical_target_within(Path(directory) / "latest") == str(self._root / "latest")

    # -- saving -------------------------------------------------------------------------------------------------

    def is_decoupled(self) -> bool:
        """True: DeepSpeed calls ``commit`` before the next update. False for the checkpoint of another directory."""
        return self._info is None or self._note is not None

    def create(self, info: Any) -> None:
        """Begins a checkpoint. Waits until the one before is in memory."""
        self.wait_for_copies()
        self._info, self._note = info, None
        if not self.is_ours(info.save_dir):
            self._before.create(info)
            return
        self._number += 1
        rank, world = self._group.rank, self._group.world
        latest = read_latest(self._root)
        self._note = Note(info.tag, self._number, self._start, rank, world, info.save_latest, latest)

    def save(self, state_dict: Any, path: str) -> None:
        """Saves one file of the checkpoint. A large one is copied in the background, up to the next update."""
        target = canonical_target_within(path)
        note = self._note
        if note is None or Path(target).parent != self._root / note.tag:
            self._before.save(state_dict, path)
            return
        if not note.files:
            self._begin(note)
        contents = of_object(state_dict)
        note.files[os.path.basename(target)] = Entry(contents.nbytes, _identity(target))
        at_once = contents.nbytes <= _AT_ONCE or not self._overlaps()
        if not at_once:
            freeze(contents, stable_storages(self._engine))
        copy = self._threads.submit(lambda: save_target(target, contents, placeholder=True))
        self._copies.append(copy)
        if at_once:
            wait([copy])

    def _begin(self, note: Note) -> None:
        """Lets an older checkpoint of the same tag count no longer, before a file of it is replaced."""
        path = note_path(self._root, note.tag, note.rank)
        if path.exists() or _is_kept(str(path)):
            if self._latest is not None:
                self._latest.drop(note.tag)
            self._copies.append(self._threads.submit(lambda: _save_note(path, replace(note, files={}, done=False))))

    def _overlaps(self) -> bool:
        """True if weights change only in ``engine.step``, which waits for copies. Not so with pipelines and ZenFlow."""
        return not (hasattr(self._engine, "train_batch") or getattr(self._engine, "zenflow", False))

    def end(self) -> None:
        """Ends the checkpoint: once its files are in memory, this rank's note tells so."""
        note, copies = self._note, list(self._copies)
        if note is None:
            return

        def conclude() -> None:
            for copy in copies:
                copy.result()
            _save_note(note_path(self._root, note.tag, note.rank), note)
            if self._latest is not None and note.named:
                self._latest.add(note)

        at_once = all(copy.done() for copy in copies)
        self._copies = [self._threads.submit(conclude)]
        if at_once:
            wait(self._copies)
        note_save()
        self._group.barrier()

    def get_commit_info(self) -> Any:
        """Returns what ``commit`` is to be called with. DeepSpeed writes no ``latest``: it would be too early."""
        return None if self._info is None else replace(self._info, save_latest=False)

    def commit(self, info: Any) -> bool:
        """Waits until the checkpoint is in memory. DeepSpeed calls it before the next update."""
        self.wait_for_copies()
        ours, self._info, self._note = self._note is not None, None, None
        return ours or bool(self._before.commit(info))

    def wait_for_copies(self) -> None:
        """Waits until all files are in memory. One that can't be saved is a warning, and training goes on."""
        copies, self._copies = self._copies, []
        errors = [error for copy in copies if (error := copy.exception()) is not None]
        if errors:
            log.warning(
                "rank %d: its part of a checkpoint could not be saved. Training goes on, and the checkpoint before "
                "stays the newest: %s",
                self._group.rank,
                describe_error(errors[0]),
            )

    def cleanup(self) -> None:
        """Ends the work of this engine: waits until all is in memory, and rank 0 for storage."""
        self.wait_for_copies()
        self._info = self._note = None
        if self._latest is not None and not sys.is_finalizing():
            self._latest.finish()

    def name_newest(self, sights: list[Sight]) -> None:
        """Lets ``latest`` name the newest checkpoint, if a start that was killed has left that to do."""
        tag = choose(sights)
        if self._latest is not None and tag not in (None, sights[0].latest):
            self._latest.add(whole(sights)[str(tag)][0])

    # -- loading ------------------------------------------------------------------------------------------------

    def find(self, tag: str | None) -> str | None:
        """Returns the tag to load if none is given; None if DeepSpeed finds it by ``latest``, or finds nothing.

        Raises CorruptError where that is a checkpoint of which a part is missing.
        """
        self.wait_for_copies()
        sights = self._group.gather(look(self._root, tag, storage=self._group.rank == 0))
        latest = sights[0].latest
        if tag is None:
            tag = choose(sights)
            if tag is not None and self._group.rank == 0:
                log.info("%s: goes on from %s; on storage the newest is %s", self._root, tag, latest or "none")
        complete = whole(sights)
        wanted = latest if tag is None else tag
        if wanted not in complete and wanted in {note.tag for sight in sights for note in sight.notes}:
            raise CorruptError(
                f"{self._root / wanted}: files of this checkpoint are missing: it was not saved to its end, or memory "
                "that was lost had them. load_checkpoint(..., tag=...) loads another one"
            )
        notes = complete.get(wanted, [])
        self._expected = {str(self._root / wanted / name): one for note in notes for name, one in note.files.items()}
        return tag

    def load(self, path: str, map_location: Any = None) -> Any:
        """Loads one file, from memory if it is there. As DeepSpeed's own files do, it may run code."""
        target = canonical_target_within(path)
        if self._root not in Path(target).parents:
            return self._before.load(path, map_location)
        self._await(target)
        return load(target, map_location, weights_only=False)

    def _await(self, target: str) -> None:
        """Waits for a file that the memory of another node has: its agent carries it to storage."""
        entry = self._expected.get(target)
        if entry is None or _is_kept(target):
            return
        until = time.monotonic() + _ARRIVES
        while not entry.matches(Path(target)):
            if time.monotonic() > until:
                raise NotDurableError(
                    f"{target}: is in the memory of another node, and has not come to storage within {_ARRIVES:.0f} s: "
                    "see 'rekindle ls --files' there"
                )
            time.sleep(_POLL)


def _is_kept(target: str) -> bool:
    """True if this node's memory has a file."""
    return any(kept.path == target for kept in status())


def _identity(target: str) -> tuple[int, int] | None:
    """Returns what tells the file that is at a path now from the one that will be."""
    try:
        found = with_timeout(_LOOK, target, lambda: os.stat(target))
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _save_note(path: Path, note: Note) -> None:
    save_target(canonical_target_within(path), of_bytes(note.encode()))
