"""Finds out which files the ranks of this node have saved by their paths, and where they are."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rekindle.common.os_errors import explain
from rekindle.common.timeouts import with_timeout
from rekindle.errors import RekindleError
from rekindle.files.listing import FileStatus, list_files
from rekindle.files.telling import SAVED
from rekindle.memory.files_dir import FilesDir
from rekindle.storage.open import open_place
from rekindle.storage.path_place import is_placeholder
from rekindle.storage.place import Place

__all__ = ["describe_saved_files", "files_saved_since"]

_ANSWERS_WITHIN = 5.0
"""Seconds that storage gets to show what is at a path."""


@dataclass(frozen=True)
class _Saved:
    """A file that a rank has told of."""

    at: float
    target: str
    memory: str
    """The memory store that it was saved into."""


def _saved_files(place: Path) -> list[_Saved]:
    """Returns the newest word of each file, oldest first. A line that is not whole is passed over."""
    found = []
    for path in place.glob(f"*{SAVED}"):
        for line in path.read_text("ascii", "replace").splitlines():
            with suppress(ValueError, TypeError):
                at, target, memory = json.loads(line)
                found.append(_Saved(float(at), str(target), str(memory)))
    newest = {saved.target: saved for saved in sorted(found, key=lambda saved: saved.at)}
    return sorted(newest.values(), key=lambda saved: saved.at)


def files_saved_since(place: Path, begun: float) -> dict[str, float]:
    """Maps each file that was saved since then to the seconds that had passed, in the order of the saves.

    A file that is saved again within a minute counts with its first save.
    """
    return {saved.target: saved.at - begun for saved in _saved_files(place) if saved.at >= begun}


def describe_saved_files(place: Path) -> str | None:
    """Describes the newest file that the ranks of this node have saved, and how far all are; None without any."""
    told = _saved_files(place)
    if not told:
        return None
    try:
        kept = _kept(told)
    except (OSError, RekindleError) as error:
        why = explain(error) if isinstance(error, OSError) else error
        return f"{told[-1].target}: was saved; can't tell if it is on storage: {why}"
    last = max((kept[saved.target].saved_at if saved.target in kept else saved.at, saved.target) for saved in told)[1]
    where = _describe(kept[last]) if last in kept else _describe_stored(last)
    which = f"the newest of {len(told):,} files" if len(told) > 1 else "the only file"
    others = sum(file.state == "memory" for path, file in kept.items() if path != last)
    more = f"; of the others {others:,} are not on storage yet" if others else ""
    return f"{last}: {which} saved, {where}{more}"


def _kept(told: list[_Saved]) -> dict[str, FileStatus]:
    """Returns those of the files that are in memory, by their paths. Raises MemoryStoreError, OSError."""
    wanted = {(saved.memory, saved.target) for saved in told}
    return {
        file.path: file
        for memory in sorted({saved.memory for saved in told})
        for file in list_files(FilesDir.below(Path(memory)))
        if (memory, file.path) in wanted
    }


def _describe(file: FileStatus) -> str:
    if file.state == "both":
        return "on storage"
    why = "" if file.problem is None else f", as {file.problem}"
    return f"in this node's memory, and not on storage yet{why}: 'rekindle flush' waits for it"


def _describe_stored(target: str) -> str:
    """Describes a file that memory has given up, or never had."""
    place = open_place(target)
    try:
        there = with_timeout(_ANSWERS_WITHIN, target, lambda: _is_there(place))
    except (OSError, RekindleError) as error:
        return f"and can't tell if it is on storage: {explain(error) if isinstance(error, OSError) else error}"
    return "on storage" if there else "and no longer there: somebody has removed it"


def _is_there(place: Place) -> bool:
    return place.identify() is not None and not is_placeholder(b"".join(bytes(piece) for piece in place.read(0, 64)))
