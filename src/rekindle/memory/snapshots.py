"""Finds and removes the snapshots in a job's directory."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from rekindle.common.failpoints import reach
from rekindle.errors import FormatError
from rekindle.format.lineage import ShardId
from rekindle.format.names import STEP_DIR, parse_shard_name
from rekindle.format.receipt import STAMP_LIMIT, read_stamp
from rekindle.memory.pages import allocate
from rekindle.memory.paths import RANK_SLOTS, JobPaths, matching, rank_of, remove_any

__all__ = ["Known", "Snapshots", "keep_spare", "write_receipt"]

Known = tuple[tuple[int, int], ShardId]
"""Inode and modification time of a receipt, and its shard id. A receipt is replaced, never written over."""

_LOOKS = 20
"""Most looks at a job whose snapshots all vanished before they were read: if it saves every few milliseconds, a process
that gets little time on a busy machine reads too late."""


class Snapshots:
    """Finds and removes one job's snapshots. Safe to use from any thread or process."""

    def __init__(self, paths: JobPaths) -> None:
        self._paths = paths

    def shard_ids(self, known: dict[str, Known] | None = None) -> Iterator[tuple[ShardId, Path]]:
        """Yields every committed snapshot as (shard id, path of its receipt). Skips damaged and vanished ones.

        ``known`` is a cache that the caller keeps. With it, a receipt that has not changed since is not read again,
        which takes 2 microseconds instead of 30.
        """
        found: list[tuple[ShardId, Path]] = []
        for _ in range(_LOOKS):
            vanished = False
            for directory in self.step_dirs():
                vanished |= _add_shards(found, directory, known)
            if found or not vanished:
                break
        yield from found

    def step_dirs(self) -> list[Path]:
        """Returns the directories that may hold snapshots."""
        directory = self._paths.directory
        try:
            names = [name for name in os.listdir(directory) if STEP_DIR.match(name)]
            return [path for path in (directory / name for name in names) if not path.is_symlink()]
        except OSError:
            return []

    def rank_files(self, rank: int) -> list[Path]:
        """Returns all shards and free files of a rank."""
        found = matching(self._paths.slots, f"rank-{rank:05d}-*.slot")
        for directory in self.step_dirs():
            found += matching(directory, f"shard-{rank:05d}-of-*.safetensors")
        return found

    def ranks(self) -> set[int]:
        """Returns the ranks that have files: snapshots, whole or not, and free files."""
        found = {rank_of(path) for path in matching(self._paths.slots, RANK_SLOTS)}
        names = [parse_shard_name(path.name) for directory in self.step_dirs() for path in matching(directory, "*")]
        return found | {name[0] for name in names if name is not None}

    def remove(self, rank: int | None = None, spared: Collection[Path] = ()) -> None:
        """Removes the snapshots, free files and local state of one rank, or of all ranks.

        Snapshots whose receipts are ``spared`` stay; if there are any, the local state stays too.
        """
        self.remove_shards(rank, spared)
        for kind in () if spared else ("plan", "small-?", "spare"):
            for path in matching(
                self._paths.directory, f"rank-*.{kind}" if rank is None else f"rank-{rank:05d}.{kind}"
            ):
                remove_any(path)

    def remove_shards(self, rank: int | None = None, spared: Collection[Path] = ()) -> None:
        """Removes the snapshots and free files of one rank, or of all ranks, and leaves local states alone.

        Receipts go first, so that no half-removed snapshot is ever visible. Snapshots whose receipts are ``spared``
        stay.
        """
        pattern = "shard-*" if rank is None else f"shard-{rank:05d}-of-*"
        for name in (f"{pattern}.json", f".{pattern}.json.tmp", f"{pattern}.safetensors"):
            for directory in self.step_dirs():
                for path in matching(directory, name):
                    if path.with_suffix(".json") not in spared:
                        remove_any(path)
        for path in matching(self._paths.slots, "*.slot" if rank is None else f"rank-{rank:05d}-*.slot"):
            remove_any(path)
        for directory in self.step_dirs():
            try:
                directory.rmdir()
            except OSError:
                continue


def _add_shards(found: list[tuple[ShardId, Path]], directory: Path, known: dict[str, Known] | None) -> bool:
    """Adds the committed snapshots in ``directory``. Returns True if something vanished meanwhile."""
    try:
        entries = list(os.scandir(directory))
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    vanished = False
    for entry in entries:
        match = parse_shard_name(entry.name)
        if match and match[2] == "json":
            try:
                stamp = _shard_id(entry, known)
            except (OSError, FormatError) as error:
                vanished |= isinstance(error, FileNotFoundError)
                continue
            if match[:2] == (stamp.rank, stamp.world):
                found.append((stamp, directory / entry.name))
    return vanished


def _shard_id(entry: os.DirEntry[str], known: dict[str, Known] | None) -> ShardId:
    if known is None:
        return read_stamp(Path(entry.path))
    info = entry.stat()
    mark = info.st_ino, info.st_mtime_ns
    found = known.get(entry.path)
    if found is None or found[0] != mark:
        found = known[entry.path] = mark, read_stamp(Path(entry.path))
    return found[1]


def write_receipt(path: Path, receipt: bytes, step: int, spare: Path) -> None:
    """Writes or replaces the receipt of ``step``, as a whole or not at all. Raises OSError.

    Replacing takes the memory of the file ``spare`` where there is no other: see ``keep_spare``.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        try:
            with open(temporary, "wb", buffering=0) as file:
                _write_receipt(file.fileno(), receipt, step)
        except OSError:
            if not (path.exists() and spare.exists()):
                raise
            os.replace(spare, temporary)
            with open(temporary, "r+b", buffering=0) as file:
                _write_receipt(file.fileno(), receipt, step)
                file.truncate(len(receipt))
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)


def keep_spare(spare: Path, receipt: bytes) -> None:
    """Sets memory aside for a replacement of ``receipt`` with another stamp, if there is any.

    A step that is in memory can then be marked for storage when memory is full. Costs 10 microseconds.
    """
    nbytes = len(receipt) + STAMP_LIMIT
    with suppress(OSError), open(spare, "ab") as file:
        if os.fstat(file.fileno()).st_size < nbytes:
            allocate(file.fileno(), 0, nbytes)


def _write_receipt(fd: int, receipt: bytes, step: int) -> None:
    half = len(receipt) // 2  # for the failpoint, at which a test ends the process
    _write(fd, receipt[:half])
    reach("save.receipt", step)
    _write(fd, receipt[half:])


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
