"""Checkpoints in a directory: written under temporary names, synced, renamed; the manifest last.

A step is written in ``step-N.<incarnation>.partial``, so shards of different incarnations never meet. It is durable
from the moment its manifest is synced there; the rename to ``step-N`` that follows only gives it its proper name.
Nothing here ever writes over, or removes, a checkpoint before a newer one of the live lineage is durable.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import CorruptError, FormatError
from rekindle.failpoints import reach
from rekindle.snapshot.boxes import lacking
from rekindle.snapshot.documents import Receipt, checksum, parse, read, seal
from rekindle.snapshot.lineage import Incarnation, Stamp, retired
from rekindle.snapshot.names import MANIFEST, MANIFEST_KIND, STEP_DIR, receipt_name, shard_name, shard_pattern, step_dir
from rekindle.storage.copy import copy_shard
from rekindle.storage.pace import Budget
from rekindle.storage.uncached import UncachedFile

__all__ = ["PosixStore", "Published"]


@dataclass(frozen=True)
class Published:
    """A checkpoint on storage. ``kind`` is None once it has its proper name."""

    stamp: Stamp
    path: Path
    kind: str | None


class PosixStore:
    """The checkpoints under one root. Stateless: any number of processes may use the same root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # -- reading ------------------------------------------------------------------------------------------------

    def _directories(self) -> Iterator[tuple[Path, int, str | None, str | None]]:
        """(path, step, incarnation id, kind) of every step's directory; id and kind are None for a proper name."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return
        for name in sorted(names):
            match = STEP_DIR.match(name)
            if match:
                yield self.root / name, int(match["step"]), match["id"], match["kind"]

    def published(self) -> list[Published]:
        """Every durable checkpoint, oldest step first. Raises OSError when the root can't be listed."""
        found = []
        for path, _, _, kind in self._directories():
            stamp = self._stamp(path)
            if stamp is not None:
                found.append(Published(stamp, path, kind))
        return sorted(found, key=lambda p: p.stamp.key)

    @staticmethod
    def _stamp(path: Path) -> Stamp | None:
        """The stamp of a sound manifest."""
        try:
            manifest = parse(read(path / MANIFEST), MANIFEST_KIND, path / MANIFEST)
            return Stamp.from_json(manifest["stamp"])
        except (FileNotFoundError, NotADirectoryError, FormatError):
            return None

    def damaged(self) -> list[tuple[int, Path]]:
        """Step and directory of every checkpoint that has a manifest which can't be read."""
        directories = [(step, path) for path, step, _, _ in self._directories()]
        return [(s, p) for s, p in directories if (p / MANIFEST).exists() and self._stamp(p) is None]

    def find(self, step: int, incarnation: Incarnation | None = None) -> Published | None:
        """The durable checkpoint of ``step``, of one incarnation if given; else the youngest one."""
        match = [p for p in self.published() if p.stamp.step == step]
        if incarnation is not None:
            match = [p for p in match if p.stamp.incarnation == incarnation]
        return match[-1] if match else None

    # -- writing ------------------------------------------------------------------------------------------------

    def partial(self, stamp: Stamp) -> Path:
        return self.root / f"{step_dir(stamp.step)}.{stamp.incarnation.id}.partial"

    def has_shard(self, stamp: Stamp) -> bool:
        """Whether this rank's part of an unfinished checkpoint is already there and synced."""
        return (self.partial(stamp) / receipt_name(stamp.rank, stamp.world)).exists()

    def write_shard(
        self,
        receipt: Receipt,
        source: memoryview,
        progress: Callable[[int], object],
        budget: Budget | None = None,
    ) -> None:
        """Copy one rank's shard, verified on the way, and then its receipt. Synced when this returns.

        The page cache is left as it was; it takes a page-aligned ``source`` to do so at full speed. ``progress`` is
        given byte counts, in the caller's thread. ``budget`` limits bytes per second.

        Raises CorruptError when ``source`` differs from its checksums, OSError when storage refuses.
        """
        stamp = receipt.stamp
        directory = self.partial(stamp)
        os.makedirs(self.root, exist_ok=True)
        directory.mkdir(exist_ok=True)
        _sync_directory(self.root)
        reach("drain.started", stamp.step)
        path = directory / shard_name(stamp.rank, stamp.world)
        with _synced_file(path) as fd, UncachedFile(fd, receipt.file_bytes) as file:
            copy_shard(receipt, source, file, progress, budget or Budget())
            reach("drain.written", stamp.step)
            file.sync()
        reach("drain.shard", stamp.step)
        with _synced_file(directory / receipt_name(stamp.rank, stamp.world)) as fd:
            _write(fd, receipt.raw)
        _sync_directory(directory)
        reach("drain.receipt", stamp.step)

    def discard(self, stamp: Stamp) -> None:
        """Remove an unfinished checkpoint that can't be finished."""
        _remove(self.partial(stamp))

    def publish(self, stamp: Stamp) -> bool:
        """Write the manifest if every rank's part is there. True when the checkpoint is durable.

        Ranks on other nodes may publish the same checkpoint at the same time: what they write is the same. Raises
        CorruptError when the parts don't make up a whole.
        """
        if self._published_as(stamp) is not None:
            return True
        directory = self.partial(stamp)
        try:
            receipts = [self._receipt(directory, rank, stamp.world) for rank in range(stamp.world)]
            problem = lacking(receipts)
            if problem:
                raise CorruptError(f"step {stamp.step} is no whole checkpoint, so it is not published: {problem}")
            body = {
                "saved_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "shards": list(map(_shard_entry, receipts)),
            }
            text = json.dumps(body, separators=(",", ":")).encode()[1:-1]
            # Outside of the directory, which another publisher may rename under us.
            temporary = self.root / f".{directory.name}.{stamp.rank}.tmp"
            with _synced_file(directory / MANIFEST, temporary) as fd:
                _write(fd, seal(Stamp(stamp.step, 0, stamp.world, stamp.incarnation), MANIFEST_KIND, text))
            _sync_directory(directory)
        except FileNotFoundError:
            return self._published_as(stamp) is not None
        reach("drain.manifest", stamp.step)
        self._name(directory, stamp)
        return True

    def _published_as(self, stamp: Stamp) -> Path | None:
        """Where the checkpoint is, if it is durable under either of its names."""
        for path in (self.root / step_dir(stamp.step), self.partial(stamp)):
            found = self._stamp(path)
            if found is not None and found.key == stamp.key:
                return path
        return None

    def durable(self, stamp: Stamp) -> bool:
        """Whether the checkpoint is durable and has its proper name. One look-up, not a listing."""
        found = self._stamp(self.root / step_dir(stamp.step))
        return found is not None and found.key == stamp.key

    @staticmethod
    def _receipt(directory: Path, rank: int, world: int) -> Receipt:
        path = directory / receipt_name(rank, world)
        return Receipt.decode(path.read_bytes(), path)

    def _name(self, directory: Path, stamp: Stamp) -> None:
        """Give a durable checkpoint its proper name. What an older incarnation left there is moved aside."""
        final = self.root / step_dir(stamp.step)
        other = self._stamp(final)
        if other is None and (final / MANIFEST).exists():  # damaged: a person may still want its shards
            os.rename(final, self.root / f"{final.name}.{secrets.token_hex(8)}.retired")
        elif other is None and final.exists():
            _remove(final)
        elif other is not None and other.key != stamp.key:
            if other.incarnation.generation > stamp.incarnation.generation:
                return  # a later start of the job has overtaken this drain
            os.rename(final, self.root / f"{final.name}.{other.incarnation.id}.retired")
            reach("drain.aside", stamp.step)
        try:
            os.rename(directory, final)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise
        _sync_directory(self.root)
        reach("drain.published", stamp.step)

    # -- tidying ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Finish what a killed drain or removal left half done, and remove what nobody can use any more."""
        durable = self.published()
        seen = [p.stamp.incarnation for p in durable]
        live = [p for p in durable if not retired(p.stamp.step, p.stamp.incarnation, seen)]
        newest = live[-1].stamp.step if live else -1
        for entry in durable:
            if entry.kind == "partial":
                self._name(entry.path, entry.stamp)
        known = {entry.path for entry in durable}
        for path, step, _, kind in list(self._directories()):
            if path not in known and (kind != "partial" or step <= newest) and not (path / MANIFEST).exists():
                _remove(path)
        for path in self.root.glob(".step-*.partial.*.tmp"):
            if not (self.root / f"{path.name[1:].rpartition('.partial.')[0]}.partial").exists():
                path.unlink(missing_ok=True)

    def prune(self, keep: int, keep_every: int | None) -> list[int]:
        """Remove surplus checkpoints, and tell their steps. The newest ``keep`` and multiples of ``keep_every`` stay.

        What an incarnation abandoned goes as soon as that incarnation has a checkpoint of its own on storage.
        """
        durable = self.published()
        seen = [p.stamp.incarnation for p in durable]
        live = [p for p in durable if not retired(p.stamp.step, p.stamp.incarnation, seen)]
        stay = {p.path for p in live[-max(keep, 1) :]}
        stay |= {p.path for p in live if keep_every and p.stamp.step % keep_every == 0}
        removed = [p for p in durable if p.path not in stay]
        for entry in removed:
            _remove(entry.path, entry.stamp.step)
        return [entry.stamp.step for entry in removed]


def _shard_entry(receipt: Receipt) -> dict[str, Any]:
    rank, world = receipt.stamp.rank, receipt.stamp.world
    return {
        "file": shard_name(rank, world),
        "bytes": receipt.file_bytes,
        "receipt": receipt_name(rank, world),
        "receipt_checksum": checksum(receipt.raw),
    }


@contextmanager
def _synced_file(path: Path, temporary: Path | None = None) -> Iterator[int]:
    """A new file that gets its name once it is complete and synced. After an error nothing is left of it.

    The temporary name is the same each time, so a killed writer's leftover is written over by its successor.
    """
    temporary = temporary or path.with_name(f".{path.name}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        yield fd
        os.fsync(fd)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(directory: Path, step: int = -1) -> None:
    """Remove a checkpoint, manifest first, so that no moment shows a damaged one. Foreign files are left alone."""
    try:
        (directory / MANIFEST).unlink(missing_ok=True)
        _sync_directory(directory)
        reach("drain.prune", step)
        for path in directory.iterdir():
            name = path.name.removeprefix(".")
            if shard_pattern(name) or name.endswith(".tmp"):
                path.unlink(missing_ok=True)
        directory.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
