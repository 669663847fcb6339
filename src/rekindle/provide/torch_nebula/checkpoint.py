"""Saves and loads checkpoints by tag and partition. A checkpoint counts once all of its writers have committed it."""

from __future__ import annotations

import json
import logging
import operator
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from rekindle.common.os_errors import describe_error
from rekindle.errors import MemoryStoreError, NotFoundError, RekindleError, UsageError
from rekindle.faults.imports import note_save
from rekindle.files import flush, load
from rekindle.files.contents import Contents, of_bytes
from rekindle.files.saving import save_target
from rekindle.files.settings import current_settings
from rekindle.format.file_receipt import Terms
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import key_of
from rekindle.provide.torch_nebula.catalog import COMPLETE, OK, VOUCHER, Catalog, Versions, voucher_name
from rekindle.provide.torch_nebula.keeping import flush_persistence, keep_in_background
from rekindle.provide.torch_nebula.ranks import agree, newest, rank_and_world, was_asked
from rekindle.provide.torch_nebula.settings import NebulaSettings, canonical_folder, current_nebula

__all__ = [
    "Checkpoint",
    "get_checkpoint",
    "get_latest_checkpoint",
    "get_latest_checkpoint_path",
    "list_checkpoints",
    "settings_of",
]

log = logging.getLogger("rekindle")

_ON_COMMIT = -2
"""``num_of_files`` of a checkpoint that is complete when every rank has committed it."""
_AT_EACH_SAVE = -1

_begun: dict[str, int] = {}
"""Counts how often this process began to write each checkpoint. Its ranks do so equally often."""
_persisted: dict[str, float] = {}
"""Time at which a checkpoint of each folder was last committed to go to storage, by this process's clock."""


@dataclass
class _Writing:
    """One time that a checkpoint is written."""

    folder: str
    version: int
    held: bool
    next: str
    """Key by which the ranks agree on the next time under this tag."""
    begun: bool = False
    """True once memory has the voucher for nobody."""
    names: list[str] = field(default_factory=list)
    """Partitions that this process has saved."""
    unfinished: str = ""
    """Partition that is being saved, or whose save failed."""


class Checkpoint:
    """A checkpoint: partitions under one tag. Any rank may save any of them, in any order.

    It may be written again and again, each time anew: after ``commit``, or once the number of files is there.
    """

    def __init__(
        self, tag: str = "", num_of_files: int = _AT_EACH_SAVE, *, settings: NebulaSettings | None = None
    ) -> None:
        """Names a checkpoint.

        Args:
            tag: its name. Without one a name is drawn at the first save.
            num_of_files: it is complete after so many partitions, -2: after ``commit`` of every rank, -1: after each
                save.
            settings: those of ``init`` if None.

        Raises:
            UsageError: for a tag that can't name a folder.
            TypeError: for a number of files that is no integer.
        """
        self.tag = str(tag)
        self._num_of_files = operator.index(num_of_files)
        self._settings = current_nebula() if settings is None else settings
        self._writing: _Writing | None = None
        self._lock = threading.Lock()
        if self.tag and (self.tag in (".", "..") or "/" in self.tag or "\0" in self.tag):
            raise UsageError(f"tag {self.tag!r}: must be the name of a folder, without '/'")

    def __repr__(self) -> str:
        return f"Checkpoint(tag={self.tag!r})"

    # -- writing --------------------------------------------------------------------------------------------------

    def save(self, name: str, obj: object) -> None:
        """Saves a partition. Returns when it is in this node's memory; storage is not waited for.

        With a number of files the checkpoint begins anew by one that this rank has saved already, or beyond the number.
        A save that failed has to be done again before any rank begins it anew: else it counts for the next time.

        Raises:
            UsageError: ``name`` can't name a file; or several ranks can't agree on the checkpoint.
            MemoryStoreError: memory is full, and there is no ``persistent_storage_path``.
            OSError: memory is full, and storage refuses the file.
        """
        from rekindle.files.pickled import of_object  # noqa: PLC0415  brings torch

        if not name or "/" in name or "\0" in name or name.startswith(VOUCHER) or name in (".", "..", COMPLETE):
            raise UsageError(f"partition {name!r}: must be the name of a file, other than {COMPLETE!r}")
        contents = of_object(obj)
        with self._lock:
            writing = self._begin(name)
            writing.unfinished, names = name, [*writing.names, name]
            self._put(writing, name, contents, Terms(removes=COMPLETE, held=writing.held))
            if self._num_of_files > 0:
                self._vouch(writing, _hash(name), [name])
                vouchers = self._counted(writing, names)
                if len(vouchers) >= self._num_of_files:
                    self._publish(writing, vouchers)
            elif self._num_of_files != _ON_COMMIT:
                whose = f"rank-{rank_and_world()[0]}"
                self._vouch(writing, whose, names)
                self._publish(writing, [whose])
            writing.unfinished, writing.names = "", names

    def commit(self) -> bool:
        """Declares this rank's partitions whole. The checkpoint is complete once every rank has done so.

        Returns:
            True if they are in memory; False, and the log says why, if that failed.
        """
        try:
            with self._lock:
                writing = self._begin()
                rank, world = rank_and_world()
                whose = [f"rank-{number}-of-{world}" for number in range(world)]
                self._vouch(writing, whose[rank], writing.names)
                self._publish(writing, whose)
                self._writing = None
            return True
        except (OSError, RekindleError) as error:
            why = describe_error(error) if isinstance(error, OSError) else error
            log.error("torch_nebula: checkpoint %r is not committed, and stays incomplete: %s", self.tag, why)
            return False

    def _begin(self, name: str = "") -> _Writing:
        """Returns what is written now, for partition ``name``; a new one once that before is over, as by a commit.

        The older of that tag is complete no more.

        What fails here may be done again: the ranks have agreed on this one by then.
        """
        writing = self._writing
        while writing is None or self._is_over(writing, name):  # without this rank, perhaps
            self._writing = writing = self._agree()
        if not writing.begun:
            writing.unfinished = name
            self._vouch(writing, "begun", [])
            store = FilesDir.below(current_settings().base)
            store.give_up(store.kept.files(key_of(f"{writing.folder}/{COMPLETE}")))
            writing.begun = True
        return writing

    def _is_over(self, writing: _Writing, name: str) -> bool:
        """True if a partition of this name is of the next time: one is counted already, or all are.

        One whose save failed is done again until another rank has begun the next time.
        """
        if self._num_of_files <= 0 or not name:
            return False
        if name == writing.unfinished:
            return was_asked(writing.next)
        if name in writing.names or len(set(writing.names)) >= self._num_of_files:
            return True
        return was_asked(self._place(writing, self._num_of_files - 1))

    def _agree(self) -> _Writing:
        """Returns what all ranks write next under this tag."""
        root = self._settings.root
        key = f"{root}/{self.tag}"
        number = _begun.get(key, 0) + 1
        Versions.see(newest(root))
        version = Versions.draw()
        held = self._settings.in_memory_only or self._is_soon()
        tag = self.tag or f"checkpoint-{version}"
        agreed = json.loads(agree(f"{key}/{number}", json.dumps([version, held, tag])))
        _begun[key] = number
        version, held, self.tag = agreed
        newest(root, version)  # whoever agrees does so: the rank that has drawn it may be slow
        folder = f"{root}/{self.tag}"
        return _Writing(folder, Versions.see(version), held, f"{folder}/{_begun.get(folder, 0) + 1}")

    def _is_soon(self) -> bool:
        last = _persisted.get(self._settings.root)
        return last is not None and time.monotonic() - last < self._settings.interval

    def _put(self, writing: _Writing, name: str, contents: Contents, terms: Terms) -> None:
        target = f"{writing.folder}/{name}"
        try:
            save_target(target, contents, terms=terms)
        except MemoryStoreError:
            if self._settings.in_memory_only or current_settings().raises_when_full(target):
                raise
            self._let_go(writing)
            for path in terms.after:
                flush(path)
            if terms.removes is not None:
                Path(writing.folder, terms.removes).unlink(missing_ok=True)
            save_target(target, contents)

    def _let_go(self, writing: _Writing) -> None:
        """Lets what was saved of this checkpoint go to storage: there is no room to wait in memory."""
        if writing.held:
            writing.held = False
            Catalog(self._settings.root).let_go(self.tag)

    def _vouch(self, writing: _Writing, whose: str, names: Sequence[str]) -> None:
        told = json.dumps({"version": writing.version, "partitions": [*names]}).encode()
        terms = Terms([f"{writing.folder}/{name}" for name in names], held=writing.held)
        self._put(writing, voucher_name(writing.version, whose), of_bytes(told), terms)

    def _publish(self, writing: _Writing, vouchers: list[str]) -> None:
        """Has the checkpoint declared complete once storage has all vouchers, of other ranks and nodes too.

        Not if a rank has begun to write it anew, and perhaps replaced a partition.
        """
        if was_asked(writing.next):
            return
        after = [f"{writing.folder}/{voucher_name(writing.version, whose)}" for whose in vouchers]
        try:
            self._put(writing, COMPLETE, of_bytes(OK), Terms(after, held=writing.held))
        except NotFoundError:  # memory is full, and a rank has yet to commit: it finds this one's voucher on storage
            if self._num_of_files != _ON_COMMIT:
                raise
        if was_asked(writing.next):  # by a rank that may have given up the mark before it came
            self._take_back(writing, after)
            return
        if not writing.held:
            _persisted[self._settings.root] = time.monotonic()
        keep_in_background(self._settings)
        note_save()

    def _take_back(self, writing: _Writing, after: list[str]) -> None:
        store = FilesDir.below(current_settings().base)
        for file in store.kept.files(key_of(f"{writing.folder}/{COMPLETE}")):
            with suppress(FileNotFoundError):
                if file.read_receipt().terms.after == after:
                    store.give_up([file])

    def _counted(self, writing: _Writing, names: list[str]) -> list[str]:
        """Returns the vouchers of all ranks, up to that of the last of ``names``: it takes the first free place."""
        if rank_and_world()[1] == 1:
            return [_hash(name) for name in dict.fromkeys(names)]
        whose, vouchers = _hash(names[-1]), list[str]()
        while len(vouchers) < self._num_of_files and whose not in vouchers:
            vouchers.append(agree(self._place(writing, len(vouchers)), whose))
        return vouchers

    def _place(self, writing: _Writing, number: int) -> str:
        """Returns the key of one of as many places as there are partitions."""
        return f"{writing.folder}/{writing.version}/{number}"

    # -- reading --------------------------------------------------------------------------------------------------

    def load(self, name: str, map_location: Any = None) -> Any:
        """Loads a partition, from this node's memory if it is there, else from storage, verified.

        Values are unpickled without limits, as those of DeepSpeed need.

        Raises:
            NotFoundError: there is no such partition.
            CorruptError: it is damaged.
            OSError: storage refuses or fails.
        """
        return load(f"{self._settings.root}/{self.tag}/{name}", map_location, weights_only=False)


def _hash(name: str) -> str:
    return sha256(os.fsencode(name)).hexdigest()[:16]


def settings_of(persist_path: str | os.PathLike[str] | None) -> NebulaSettings:
    """Returns the settings of ``init``, with another folder if one is given."""
    settings = current_nebula()
    if persist_path is None or (root := canonical_folder(persist_path)) == settings.root:
        return settings
    return NebulaSettings(root, False, settings.interval, settings.retention)


def get_checkpoint(tag: str, persist_path: str | os.PathLike[str] | None = None) -> Checkpoint | None:
    """Returns a complete checkpoint by its tag, in memory or in the folder; None, and the log says what there is."""
    settings = settings_of(persist_path)
    catalog = Catalog(settings.root)
    found = catalog.found.get(str(tag))
    if found is not None and found.complete:
        return Checkpoint(found.tag, _ON_COMMIT, settings=settings)
    log.warning("torch_nebula: there is no complete checkpoint %r in %s: %s", tag, settings.root, catalog.describe())
    return None


def get_latest_checkpoint(persist_path: str | os.PathLike[str] | None = None) -> Checkpoint | None:
    """Returns the newest complete checkpoint, in memory or in the folder; None if there is none.

    All ranks get the same one: that which the first of them finds, until one of them begins another.
    """
    settings = settings_of(persist_path)
    begun = newest(settings.root)
    found = Catalog(settings.root).newest()
    tag = agree(f"{settings.root}/latest/{begun}", found.tag if found is not None else "")
    return Checkpoint(tag, _ON_COMMIT, settings=settings) if tag else None


def get_latest_checkpoint_path(name: str, persist_path: str | os.PathLike[str] | None = None) -> str:
    """Returns the path of a partition of the newest complete checkpoint, once storage has it; empty if there is none.

    Of a checkpoint that does not get there, the log says why, and the newest on storage is taken.
    """
    settings = settings_of(persist_path)
    flush_persistence(persist_path=settings.root)
    durable = [found for found in Catalog(settings.root).complete() if found.durable]
    return f"{settings.root}/{durable[0].tag}/{name}" if durable else ""


def list_checkpoints(persist_path: str | os.PathLike[str] | None = None) -> dict[str, dict[str, Any]]:
    """Returns the checkpoints in memory and in the folder, by tag: all of it can be written as JSON."""
    return {
        found.tag: {
            "complete": found.complete,
            "persisted": found.durable,
            "partitions": found.partitions,
            "version": found.version,
        }
        for found in Catalog(settings_of(persist_path).root).found.values()
    }
