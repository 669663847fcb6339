"""Stores checkpoints in a directory: writes under temporary names, syncs, renames; the manifest comes last.

A step is written in ``step-N.<incarnation>.partial``, so shards of different incarnations never meet. It is durable
from the moment its manifest is synced there. The rename to ``step-N`` that follows only gives it its final name.
No method writes over or removes a checkpoint before a newer one of the live lineage is durable.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rekindle.common.failpoints import reach
from rekindle.format.files import Directory
from rekindle.format.lineage import ShardId, drop_superseded
from rekindle.format.metric import Metric
from rekindle.format.names import MANIFEST, PINNED, STEP_DIR, parse_shard_name, receipt_name, shard_name, step_dir
from rekindle.format.receipt import Receipt, open_file, read_file
from rekindle.memory.notes import RootIdentity
from rekindle.storage import disk, identity
from rekindle.storage.claims import remove_temporary_claims
from rekindle.storage.copy import copy_shard
from rekindle.storage.direct_io import UncachedFile
from rekindle.storage.manifest import Head, build_manifest, with_metric
from rekindle.storage.pin_file import has_pin, write_pin
from rekindle.storage.removal import move_aside, read_head_in, read_stamp_in, remove_step
from rekindle.storage.retention import MOST_BY_DEFAULT, surplus_parts
from rekindle.storage.store import Contents, Published, Store, unread_entry
from rekindle.storage.throttle import Budget

__all__ = ["PosixStore", "synced_file", "write_all"]

_TRIES = 10
"""Looks for a checkpoint that other processes move meanwhile."""


class _Durable(NamedTuple):
    """A durable checkpoint and the directory that it lies in."""

    head: Head
    path: Path
    kind: str | None
    """``partial`` or ``retired``; None once the directory has its final name."""
    pinned: bool

    @property
    def stamp(self) -> ShardId:
        return self.head.stamp


class _Scan(NamedTuple):
    """The checkpoints that one listing of the root has shown."""

    durable: list[_Durable]
    damaged: list[tuple[int, Path]]
    unread: list[tuple[int, Path, OSError]]


class PosixStore(Store):
    """The checkpoints in one directory. Stateless."""

    poll = 0.02

    def __init__(self, root: Path) -> None:
        self.root: Path = root

    # -- reading ------------------------------------------------------------------------------------------------

    def _step_directories(self) -> Iterator[tuple[Path, int, str | None, str | None]]:
        """Yields (path, step, incarnation id, kind) of every step's directory; id and kind are None in a final name."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return
        for name in sorted(names):
            match = STEP_DIR.match(name)
            if match:
                yield self.root / name, int(match["step"]), match["id"], match["kind"]

    def contents(self) -> Contents:
        durable, damaged, refused = self._scan()
        return Contents(
            [Published(e.stamp, Directory(e.path), e.head.saved_at, e.pinned, e.head.nbytes) for e in durable],
            [(step, Directory(path)) for step, path in damaged + [(step, path) for step, path, _ in refused]],
            [unread_entry(step, str(path / MANIFEST), error) for step, path, error in refused],
        )

    def _scan(self) -> _Scan:
        found = _Scan([], [], [])
        for path, step, _, kind in self._step_directories():
            try:
                head = read_head_in(path)
                if head is not None:
                    found.durable.append(_Durable(head, path, kind, has_pin(path)))
                elif (path / MANIFEST).exists():
                    found.damaged.append((step, path))
            except OSError as error:
                found.unread.append((step, path, error))
        if found.unread and not found.durable:
            raise found.unread[0][2]
        found.durable.sort(key=lambda p: p.stamp.checkpoint)
        return found

    def trace(self, step: int) -> RootIdentity | None:
        found = identity.identify_root(self.root)
        return found if any(self.root.glob(f"{step_dir(step)}*")) else None

    def was_deleted(self, trace: RootIdentity | None) -> bool:
        return identity.shows_deletion(trace, identity.identify_root(self.root))

    # -- writing ------------------------------------------------------------------------------------------------

    def _partial(self, stamp: ShardId) -> Path:
        """Returns the directory in which a step is written until it is published."""
        return self.root / f"{step_dir(stamp.step)}.{stamp.incarnation.id}.partial"

    def has_shard(self, stamp: ShardId) -> bool:
        return (self._partial(stamp) / receipt_name(stamp.rank, stamp.world)).exists()

    def write_shard(
        self,
        receipt: Receipt,
        source: memoryview,
        progress: Callable[[int], object],
        budget: Budget | None = None,
    ) -> None:
        """Writes past the page cache, at full speed if ``source`` is page-aligned.

        ``progress`` is called in the caller's thread.
        """
        stamp = receipt.stamp
        directory = self._partial(stamp)
        read_stamp_in(self.root / step_dir(stamp.step))  # fails now, not after the copy, if it can't be read
        disk.make_path(self.root)
        disk.mkdir(directory)
        disk.sync(self.root)
        reach("drain.started", stamp.step)
        path = directory / shard_name(stamp.rank, stamp.world)
        with synced_file(path) as fd, UncachedFile(fd, receipt.file_bytes) as file:
            copy_shard(receipt, source, file, progress, budget or Budget())
            reach("drain.written", stamp.step)
            file.sync()
        reach("drain.shard", stamp.step)
        disk.sync(directory)  # else a power cut could leave the receipt and not the shard
        with synced_file(directory / receipt_name(stamp.rank, stamp.world)) as fd:
            write_all(fd, receipt.raw)
        disk.sync(directory)
        reach("drain.receipt", stamp.step)

    def discard(self, stamp: ShardId) -> None:
        """Leaves a step alone that has its manifest: another node may have reported it as durable."""
        directory = self._partial(stamp)
        if directory.exists() and read_stamp_in(directory) is None:
            move_aside(self.root, directory, stamp.step, None)

    def publish(self, stamp: ShardId, before: Callable[[], object] = lambda: None) -> bool:
        if self._sync_published(stamp):
            return True
        directory = self._partial(stamp)
        try:
            receipts = [self._read_receipt(directory, rank, stamp.world) for rank in range(stamp.world)]
            document = build_manifest(receipts, stamp)
            if any(receipt.stamp.pinned for receipt in receipts):
                write_pin(directory)
            disk.sync(directory)  # other writers' receipts may have been found before they were synced
            # Outside of the directory, which another publisher may rename under us, and each publisher its own: a rank
            # that found no room in memory and its node's agent may be two of them.
            temporary = self.root / f".{directory.name}.{stamp.rank}.{os.getpid()}.tmp"
            before()
            with synced_file(directory / MANIFEST, temporary) as fd:
                write_all(fd, document)
            if not _files_of(stamp).issubset(os.listdir(directory)):  # removed meanwhile, and made anew by a rank
                disk.unlink(directory / MANIFEST)
                return self._sync_published(stamp)
            disk.sync(directory)
        except FileNotFoundError:
            return self._sync_published(stamp)
        reach("drain.manifest", stamp.step)
        self._give_final_name(directory, stamp)
        return True

    def _sync_published(self, stamp: ShardId) -> bool:
        """Makes a checkpoint durable that has its manifest, under either of its names. Returns False if it has none.

        A manifest that can be seen is not enough: its writer may have died before syncing it.
        """
        # In this order: it may be renamed from the first to the second meanwhile.
        for path in (self._partial(stamp), self.root / step_dir(stamp.step)):
            found = read_stamp_in(path)
            if found is not None and found.checkpoint == stamp.checkpoint:
                try:
                    disk.sync(path)
                    return True
                except FileNotFoundError:
                    continue
        return False

    def durable(self, stamp: ShardId) -> bool:
        found = read_stamp_in(self.root / step_dir(stamp.step))
        return found is not None and found.checkpoint == stamp.checkpoint

    @staticmethod
    def _read_receipt(directory: Path, rank: int, world: int) -> Receipt:
        path = directory / receipt_name(rank, world)
        return Receipt.decode(read_file(path), path)

    def _give_final_name(self, directory: Path, stamp: ShardId) -> None:
        """Gives a durable checkpoint its final name. A directory of an older incarnation there is moved aside.

        Others may be doing the same for the same checkpoint. A rename never replaces a directory that holds anything.
        """
        final = self.root / step_dir(stamp.step)
        while True:
            try:
                disk.rename(directory, final)
                break
            except FileNotFoundError:  # another publisher was first
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # the last: a file, or a link
                    raise
            other = read_stamp_in(final)
            if other is not None and other.incarnation.generation > stamp.incarnation.generation:
                return  # a later start of the job has superseded this step
            if other is not None and other.checkpoint == stamp.checkpoint:
                return
            move_aside(self.root, final, stamp.step, other)
            reach("drain.aside", stamp.step)
        disk.sync(self.root)
        reach("drain.published", stamp.step)

    def withdraw(self, stamp: ShardId, ranks: Collection[int], keep: int, spared: Collection[int] = ()) -> list[int]:
        begun = {}
        for path, step, start, kind in self._step_directories():
            if kind == "partial" and start == stamp.incarnation.id:
                with suppress(FileNotFoundError):  # another process has just published it
                    names = os.listdir(path)
                    if MANIFEST not in names:
                        begun[step] = {part[0] for part in map(_part_of, names) if part is not None}
        surplus = surplus_parts(begun, ranks, keep, spared)
        return [step for step in surplus if self._withdraw(replace(stamp, step=step), ranks)]

    def _withdraw(self, stamp: ShardId, ranks: Collection[int]) -> bool:
        """Removes the parts of ``ranks`` in an unfinished step. Returns False if it has become durable meanwhile.

        The receipts are hidden before the last look: who publishes looks for them after it has written the manifest.
        """
        directory = self._partial(stamp)
        receipts = [receipt_name(rank, stamp.world) for rank in ranks]
        _rename_in(directory, [(name, f".{name}.tmp") for name in receipts])
        if self._sync_published(stamp):
            for path in (directory, self.root / step_dir(stamp.step)):
                _rename_in(path, [(f".{name}.tmp", name) for name in receipts])
            self._sync_published(stamp)
            return False
        with suppress(FileNotFoundError):  # another node has withdrawn the last part beside these
            for name in os.listdir(directory):
                part = _part_of(name)
                if part is not None and part[0] in ranks:  # and nothing else: others may just have begun
                    disk.unlink(directory / name)
        with suppress(OSError):
            disk.rmdir(directory)
        return True

    # -- tidying ------------------------------------------------------------------------------------------------

    def clean_up(self) -> None:
        durable, _, refused = self._scan()
        live = drop_superseded([entry.stamp for entry in durable])
        newest = max((stamp.step for stamp in live), default=-1)
        kept = {path for _, path, _ in refused}
        for entry in durable:
            named = self.root / step_dir(entry.stamp.step)
            if entry.kind == "retired" and entry.stamp in live and not os.path.lexists(named):
                self._give_final_name(entry.path, entry.stamp)  # who moved it aside died before giving it back
            # Synced before it takes another one's place.
            if entry.kind == "partial" and named not in kept and self._sync_published(entry.stamp):
                self._give_final_name(entry.path, entry.stamp)
        kept |= {entry.path for entry in durable}
        starts = {entry.stamp.incarnation.id for entry in durable}
        for path, step, start, kind in list(self._step_directories()):
            # A start whose only manifest can't be read may still be writing its next step.
            superseded = step <= newest and (start in starts or not refused)
            if path not in kept and (kind != "partial" or superseded) and not (path / MANIFEST).exists():
                remove_step(self.root, path, step, None)
        for path in self.root.glob(".step-*.partial.*.tmp"):
            if not (self.root / f"{path.name[1:].rpartition('.partial.')[0]}.partial").exists():
                disk.unlink(path)
        remove_temporary_claims(self.root)

    def prune(self, keep: int | None, keep_every: int | None, *, keep_best: bool = True) -> list[int]:
        surplus = self.surplus(keep, keep_every, keep_best=keep_best)
        goes = {entry.stamp for entry in surplus}
        durable = self._scan().durable if surplus else []
        newest = drop_superseded([entry.stamp for entry in durable])[-max(keep or MOST_BY_DEFAULT, 1) :]
        try:
            for entry in durable:
                if entry.stamp in newest and entry.stamp not in goes:
                    disk.sync(entry.path)  # another publisher's manifest may be seen before it is synced
        except FileNotFoundError:
            return []  # it is just being renamed: prune at the next publish instead
        chosen = [entry for entry in durable if entry.stamp in goes and not entry.pinned]
        return [e.stamp.step for e in chosen if remove_step(self.root, e.path, e.stamp.step, e.stamp)]

    def pin(self, stamp: ShardId) -> None:
        def write(path: Path) -> bool:
            write_pin(path)
            found = read_stamp_in(path)  # None if it was surplus, and is being removed
            return found is not None and found.checkpoint == stamp.checkpoint

        self._change(stamp, write)

    def unpin(self, stamp: ShardId) -> None:
        entry = self._find_durable(stamp)
        if entry is not None and entry.pinned:
            disk.unlink(entry.path / PINNED)
            disk.sync(entry.path)

    def note_metric(self, stamp: ShardId, metric: Metric) -> None:
        def write(path: Path) -> bool:
            document = with_metric(read_file(path / MANIFEST), metric, path)
            with synced_file(path / MANIFEST) as fd:
                write_all(fd, document)
            disk.sync(path)
            return True

        self._change(stamp, write)

    def _change(self, stamp: ShardId, write: Callable[[Path], bool]) -> None:
        """Writes beside a durable checkpoint's shards, in its directory. Raises FileNotFoundError without one."""
        for number in range(_TRIES):  # it may be getting its final name, or be moved aside, removed and given back
            time.sleep(self.poll if number else 0)
            entry = self._find_durable(stamp)
            with suppress(FileNotFoundError):
                if entry is not None and write(entry.path):
                    return
        raise FileNotFoundError(errno.ENOENT, f"there is no checkpoint of step {stamp.step}", str(self.root))

    def _find_durable(self, stamp: ShardId) -> _Durable | None:
        return next((entry for entry in self._scan().durable if entry.stamp.checkpoint == stamp.checkpoint), None)

    def write_extra(self, name: str, data: bytes, *, exclusive: bool = False) -> None:
        path = self.root / name
        if exclusive:
            self._create_extra(path, data)
        else:
            disk.make_path(path.parent)
            _write_file(disk.create(path), data)

    def _create_extra(self, path: Path, data: bytes) -> None:
        """Links the finished file to its name: of several names that come at once, a file system takes one."""
        if not path.parent.is_dir():  # else its name would be synced again, which takes a disk some milliseconds
            disk.make_path(path.parent)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            _write_file(disk.create(temporary), data)
            _link(temporary, path, data)
        finally:
            disk.unlink(temporary)

    def take_away(self, name: str) -> None:
        disk.unlink(self.root / name)

    def extras(self, directory: str) -> list[str]:
        try:
            names = os.listdir(self.root / directory)
        except FileNotFoundError:
            return []
        return sorted(f"{directory}/{name}" for name in names if not name.startswith("."))

    def read_extra(self, name: str, most: int) -> bytes:
        with open(open_file(self.root / name), "rb") as file:
            return file.read(most)

    def check_writable(self) -> None:
        """Checks the root or, before it is made, the nearest directory above it."""
        path = next(path for path in (self.root, *self.root.parents) if path.exists())
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def capability_warning(self) -> str | None:
        return None


def _files_of(stamp: ShardId) -> set[str]:
    """Returns the names of all shards and receipts of a checkpoint."""
    ranks, world = range(stamp.world), stamp.world
    return {name(rank, world) for rank in ranks for name in (shard_name, receipt_name)}


def _part_of(name: str) -> tuple[int, int, str] | None:
    """Returns what ``parse_shard_name`` does, also for the name of a file that is being written."""
    return parse_shard_name(name.removeprefix(".").removesuffix(".tmp"))


def _rename_in(directory: Path, names: list[tuple[str, str]]) -> None:
    """Renames those of the files that are in ``directory``."""
    for before, after in names:
        with suppress(FileNotFoundError):
            disk.rename(directory / before, directory / after)


@contextmanager
def synced_file(path: Path, temporary: Path | None = None) -> Iterator[int]:
    """Opens a new file that gets its name once it is complete and synced. After an error nothing is left of it.

    The temporary name is the same each time, so the next writer overwrites what a killed one left.
    """
    temporary = temporary or path.with_name(f".{path.name}.tmp")
    fd = disk.create(temporary)
    try:
        yield fd
        disk.fsync(fd)
        disk.rename(temporary, path)
    except BaseException:
        disk.unlink(temporary)
        raise
    finally:
        os.close(fd)


def _link(file: Path, name: Path, data: bytes) -> None:
    """Gives a file with ``data`` a second name. Raises FileExistsError where something has that name.

    Where no file has two names another one is made. That is as good, but that others may see it before its bytes.
    """
    try:
        disk.link(file, name)
    except FileExistsError:
        raise
    except OSError:
        fd = disk.create_new(name, 0o644)
        try:
            _write_file(fd, data)
        except OSError:
            disk.unlink(name)
            raise


def _write_file(fd: int, data: bytes) -> None:
    """Writes a new file that is open as ``fd``, and closes it."""
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Writes all of ``data`` where the last write ended."""
    view = memoryview(data)
    while view:
        view = view[disk.write(fd, view) :]
