"""Tells of each checkpoint which files it has, and chooses the newest one that is whole.

DeepSpeed names no list of the files that belong to a checkpoint. So each rank saves a note of its own beside its files,
after them. A checkpoint is whole where the notes of all its ranks are of the same save, and all their files are there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rekindle.errors import CorruptError, NotFoundError
from rekindle.files import load, status
from rekindle.format.fields import check_integer, loads

__all__ = ["Entry", "Note", "Sight", "choose", "is_durable", "look", "note_path", "read_latest", "whole"]

_PREFIX = "rekindle-rank-"


@dataclass(frozen=True)
class Entry:
    """One file of a rank."""

    nbytes: int
    replaces: tuple[int, int] | None = None
    """Inode and time of the file that was at its path before."""

    def matches(self, path: Path) -> bool:
        """True if the file itself is at the path: neither a placeholder nor the file that was there before."""
        try:
            found = os.stat(path)
        except OSError:
            return False
        return found.st_size == self.nbytes and (found.st_ino, found.st_mtime_ns) != self.replaces


@dataclass(frozen=True)
class Note:
    """The part that one rank has saved of a checkpoint."""

    tag: str
    number: int
    """Place of the save in the order of all saves."""
    start: str
    """Random name of the start of the job that saved it. Two starts may give the same number."""
    rank: int
    world: int
    named: bool
    """True if ``latest`` is to name it."""
    before: str
    """Tag that ``latest`` named at the save; empty for none."""
    files: dict[str, Entry] = field(default_factory=dict)
    """The rank's files, by their names in the checkpoint's directory."""
    done: bool = True
    """False from the begin of a save to its end, if there was a checkpoint of this tag before."""

    def encode(self) -> bytes:
        """Returns it as JSON."""
        return json.dumps(asdict(self), indent=1).encode()

    @staticmethod
    def decode(data: bytes, tag: str) -> Note | None:
        """Reads a note; None for what is none."""
        try:
            found = loads(data)
            files = {str(name): _entry(value) for name, value in found["files"].items()}
            numbers = [check_integer(found[name]) for name in ("number", "rank", "world")]
            start, before = str(found["start"]), str(found["before"])
            named, done = found["named"] is True, found["done"] is True
            return Note(tag, numbers[0], start, numbers[1], numbers[2], named, before, files, done)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def _entry(value: dict[str, Any]) -> Entry:
    replaces = value["replaces"]
    pair = None if replaces is None else (check_integer(replaces[0]), check_integer(replaces[1]))
    return Entry(check_integer(value["nbytes"]), pair)


def note_path(root: Path, tag: str, rank: int) -> Path:
    """Returns the path of a rank's note."""
    return root / tag / f"{_PREFIX}{rank:05d}.json"


@dataclass(frozen=True)
class Sight:
    """One rank's view of the checkpoints of a root: in the memory of its node, and on storage."""

    latest: str
    """Tag that the file ``latest`` names; empty for none."""
    notes: list[Note]
    there: set[tuple[str, int, str]]
    """The files that can be read: (tag, rank that saved it, name)."""


def look(root: Path, tag: str | None = None, *, storage: bool = True) -> Sight:
    """Looks at memory and, with ``storage``, at storage: at what may be newer than ``latest``, and at a tag.

    One rank's look at storage is enough for all.
    """
    latest, kept = read_latest(root), {found.path for found in status()}
    paths = {Path(path) for path in kept if Path(path).parent.parent == root and Path(path).name.startswith(_PREFIX)}
    if storage:
        paths |= _on_storage(root, latest, {path.parent.name for path in paths} | {latest, tag or latest})
    notes, there = [], set()
    for path in sorted(paths):
        note = _read(path)
        if note is not None:
            notes.append(note)
            for name, entry in note.files.items():
                if str(path.parent / name) in kept or entry.matches(path.parent / name):
                    there.add((note.tag, note.rank, name))
    return Sight(latest, notes, there)


def _on_storage(root: Path, latest: str, wanted: set[str]) -> set[Path]:
    """Lists the notes of some tags, and of all that are not older than ``latest``. Of older ones only one is read."""
    first = {path.parent.name: _read(path) for path in root.glob(f"*/{_PREFIX}00000.json")}
    named = first.get(latest)
    newer = {tag for tag, note in first.items() if note and (named is None or note.number >= named.number)}
    return {path for tag in (newer | wanted) - {""} for path in (root / tag).glob(f"{_PREFIX}*.json")}


def _read(path: Path) -> Note | None:
    """Reads a note, from memory if it is there; None where it can't be read."""
    with suppress(NotFoundError, CorruptError, OSError):
        return Note.decode(load(path, raw=True), path.parent.name)
    return None


def read_latest(root: Path) -> str:
    """Returns the tag that the file ``latest`` names; empty for none."""
    try:
        return (root / "latest").read_text("utf-8").strip()
    except (OSError, ValueError):
        return ""


def whole(sights: list[Sight], *, readable: bool = True) -> dict[str, list[Note]]:
    """Maps the tag of each checkpoint that is whole to the notes of its ranks, in the order of saves.

    Sights are those of all ranks. With ``readable`` each file has to be where one of them can read it.
    """
    by_save: dict[tuple[str, int, str], dict[int, Note]] = {}
    unfinished = {(note.tag, note.rank) for sight in sights for note in sight.notes if not note.done}
    for sight in sights:
        for note in sight.notes:
            by_save.setdefault((note.tag, note.number, note.start), {})[note.rank] = note
    there = set().union(*(sight.there for sight in sights))
    found: dict[str, list[Note]] = {}
    for (tag, _, _), notes in sorted(by_save.items(), key=lambda item: item[0][1]):
        world = next(iter(notes.values())).world
        complete = all(rank in notes and (tag, rank) not in unfinished for rank in range(world))
        if complete and (not readable or _files_of(notes.values()) <= there):
            found[tag] = [notes[rank] for rank in range(world)]
    return found


def _files_of(notes: Iterable[Note]) -> set[tuple[str, int, str]]:
    return {(note.tag, note.rank, name) for note in notes for name in note.files}


def choose(sights: list[Sight]) -> str | None:
    """Returns the tag to go on from; None where it is the one that ``latest`` names, if any.

    ``latest`` names a checkpoint only once storage has it, so a newer one may be in memory. If ``latest`` names one
    without notes that the newer one didn't know of, somebody has saved there without Rekindle since: then it counts.
    """
    complete = {tag: notes for tag, notes in whole(sights).items() if notes[0].named}
    if not complete:
        return None
    tag, notes = max(complete.items(), key=lambda item: item[1][0].number)
    latest = sights[0].latest
    noted = {note.tag for sight in sights for note in sight.notes}
    return tag if latest in noted or latest in ("", notes[0].before) else None


def is_durable(root: Path, tag: str, number: int, start: str) -> bool:
    """True if storage has all notes of a save, and all files that they tell of."""
    rank, world = 0, 1
    while rank < world:
        try:
            note = Note.decode(note_path(root, tag, rank).read_bytes(), tag)
        except OSError:
            return False
        if note is None or not note.done or (note.number, note.start) != (number, start):
            return False
        if not all(entry.matches(root / tag / name) for name, entry in note.files.items()):
            return False
        rank, world = rank + 1, note.world
    return True
