"""Waits until files are on storage."""

from __future__ import annotations

import os
import time

from rekindle.common.timeouts import check_timeout, with_timeout
from rekindle.errors import FormatError, NotDurableError, NotFoundError
from rekindle.files import client as clients
from rekindle.files.finding import renamed_here
from rekindle.files.listing import failures
from rekindle.files.saving import canonical_target_within
from rekindle.files.settings import current_settings
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import KeptFile, key_of
from rekindle.storage.open import open_place
from rekindle.storage.path_place import PathPlace

__all__ = ["check_there", "describe_pending", "flush", "pending_files"]

_POLL = 0.01
_LOOK = 3.0
"""Seconds that storage gets to show what is at a path."""
_NAMED = 3
"""Files that an error names at most."""


def flush(path: str | os.PathLike[str] | None = None, *, timeout: float = 600.0) -> None:
    """Returns when all files of this node are on storage, whoever saved them, or the one of ``path``.

    Raises:
        NotDurableError: some are not after ``timeout`` seconds, with the reason; or memory was removed before that.
        NotFoundError: nothing was saved at ``path``, and nothing is there.
        UsageError: ``path`` can't name a file.
    """
    until = time.monotonic() + check_timeout(timeout)
    target = None if path is None else canonical_target_within(path, follow=True)
    client = clients.current_client()
    store = client.store if client is not None else FilesDir.below(current_settings().base)
    while pending := pending_files(store, target):
        if client is None:
            client = clients.the_client()  # nobody else may see to it that an agent runs
        client.look()
        if time.monotonic() > until:
            raise NotDurableError(describe_pending(store, pending, timeout))
        time.sleep(_POLL)
    if client is not None:
        client.check_memory(target)
    if target is not None and store.kept.find(key_of(target)) is None:  # given up, or never there
        check_there(target)


def pending_files(store: FilesDir, target: str | None) -> list[KeptFile]:
    """Lists the files that storage lacks and is to get, or that of ``target`` if storage lacks it.

    Where storage doesn't show what is at the target, any file may be that one whose placeholder can be renamed.
    """
    if target is None:
        return store.kept.newest(stored=False)
    file = store.kept.find(key_of(target))
    if file is None or file.is_stored():
        try:
            file = renamed_here(store, target) or store.kept.find(key_of(target))  # where it may belong by now
        except OSError:
            return [other for other in store.kept.newest(stored=False) if _has_mark(other)]
    return [] if file is None or file.is_stored() else [file]


def _has_mark(file: KeptFile) -> bool:
    try:
        return bool(file.read_receipt().mark)
    except (OSError, FormatError):
        return False


def check_there(target: str) -> None:
    """Raises unless storage has a file that memory doesn't know: given up by memory, or never there."""
    place = open_place(target)
    if with_timeout(_LOOK, target, place.identify) is None:
        raise NotFoundError(f"{target}: nothing was saved there, or it was removed since")
    if isinstance(place, PathPlace) and with_timeout(_LOOK, target, place.holds_placeholder):
        raise NotDurableError(f"{target}: is a placeholder: the file is in another node's memory, or was lost with it")


def describe_pending(store: FilesDir, pending: list[KeptFile], timeout: float) -> str:
    """Returns the message about files that storage lacks after ``timeout`` seconds."""
    failed, otherwise, carrier = failures(store), store.notes.drain_error(), store.agent()
    if not otherwise:
        otherwise = "storage is slow, or hangs, or drain_limit is low"
        if carrier not in (None, 0, os.getpid()):  # 0: it is unknown
            otherwise += f", or process {carrier}, which carries files, is stopped"
    lines = []
    for file in pending[:_NAMED]:
        name, held = file.name(), file.held.exists()
        lines.append(
            f"{name}: {'is held in memory until its program lets it go' if held else failed.get(name, otherwise)}"
        )
    more = f"; and {len(pending) - _NAMED} more" if len(pending) > _NAMED else ""
    return f"not on storage after {timeout:.0f} s, memory keeps them: {'; '.join(lines)}{more}"
