"""Sees to it that checkpoints get to storage, and that only so many of them stay."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import check_timeout, in_background
from rekindle.errors import NotDurableError, NotFoundError, RekindleError
from rekindle.files import flush
from rekindle.files.settings import current_settings
from rekindle.memory.files_dir import FilesDir
from rekindle.provide.torch_nebula.catalog import COMPLETE, VOUCHER, Catalog, Found, newest_version
from rekindle.provide.torch_nebula.ranks import rank_and_world
from rekindle.provide.torch_nebula.settings import NebulaSettings, canonical_folder, current_nebula
from rekindle.storage import disk

__all__ = ["drop", "flush_persistence", "keep_in_background"]

log = logging.getLogger("rekindle")

_used: dict[str, int] = {}
"""Process that has written checkpoints into each folder."""
_keeping: dict[str, Future[None]] = {}
"""The work under way, by folder."""
_lock = threading.Lock()


def keep_in_background(settings: NebulaSettings) -> None:
    """Removes checkpoints that have too many newer ones. Nobody waits for it; what it misses the next call does."""
    with _lock:
        _used[settings.root] = os.getpid()
        before = _keeping.get(settings.root)
        if before is None or before.done():
            _keeping[settings.root] = in_background(lambda: keep(settings), "rekindle-nebula-keep")


def keep(settings: NebulaSettings) -> None:
    """Removes checkpoints that have too many newer ones.

    As many as are to stay do so among those on storage, and among all. An incomplete one goes when it is older than
    all that stay.
    """
    catalog = Catalog(settings.root)
    if not catalog.answered:
        return
    number, complete = settings.retention, catalog.complete()
    durable = complete if settings.in_memory_only else [found for found in complete if found.durable]
    oldest = durable[number - 1].version if len(durable) >= number else 0
    stay = {found.tag for found in (*complete[:number], *durable[:number])}
    for found in catalog.found.values():
        if found.tag not in stay and found.ours and (found.version < oldest or (found.held and found.complete)):
            with suppress(OSError, RekindleError):  # the next checkpoint's turn comes
                drop(settings, catalog, found)


def drop(settings: NebulaSettings, catalog: Catalog, found: Found) -> None:
    """Removes a checkpoint from this node's memory and, by one rank, from storage. Raises OSError."""
    # What makes it complete was saved last, and goes first: this process may be killed meanwhile.
    FilesDir.below(current_settings().base).give_up(reversed(catalog.kept(found.tag)))
    if rank_and_world()[0] == 0 and not settings.in_memory_only:
        _remove(Path(settings.root, found.tag), found.version)


def _remove(folder: Path, version: int) -> None:
    """Removes a checkpoint's folder: first what makes it complete, and last what shows whose it is.

    A folder that is written again since stays: the voucher for nobody came before anything else.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        names = sorted(os.listdir(folder), key=lambda name: (name != COMPLETE, name.startswith(VOUCHER)))
        if newest_version(names) > version:
            return
        for name in names:
            disk.unlink(folder / name)
        disk.rmdir(folder)


def flush_persistence(
    tag: str | None = None, *, timeout: float = 600.0, persist_path: str | os.PathLike[str] | None = None
) -> bool:
    """Waits until the newest complete checkpoint, and all that is on its way to storage, is there.

    Args:
        tag: waits for this checkpoint instead.
        timeout: seconds to wait at most.
        persist_path: the folder; that of ``init`` if None.

    Returns:
        True if storage has it. False, and the log says why, if not; also where there is nothing to persist to.
    """
    until = time.monotonic() + check_timeout(timeout)
    settings = current_nebula()
    root = settings.root if persist_path is None else canonical_folder(persist_path)
    if settings.in_memory_only and root == settings.root:
        log.error("torch_nebula: nothing is persistent: there is no persistent_storage_path")
        return False
    try:
        Catalog(root).let_newest_go()
        catalog = Catalog(root)
        for found in catalog.found.values():
            if _is_awaited(found, catalog.newest(), tag):
                for target in catalog.pending(found.tag):
                    with suppress(NotFoundError):  # removed, as newer ones are there
                        flush(target, timeout=max(0.0, until - time.monotonic()))
        catalog = Catalog(root)
        wanted = catalog.newest() if tag is None else catalog.found.get(tag)
        if wanted is None or not wanted.durable:
            raise NotDurableError(f"of complete checkpoints {catalog.describe()}")
    except (OSError, RekindleError) as error:
        why = describe_error(error) if isinstance(error, OSError) else error
        log.error("torch_nebula: not all is persistent in %s: %s", root, why)
        return False
    if root == settings.root:
        keep(settings)
    return True


def _is_awaited(found: Found, newest: Found | None, tag: str | None) -> bool:
    """True for a checkpoint that is waited for. An incomplete one that is older than the newest never gets whole."""
    if tag is not None:
        return found.tag == tag
    return found.complete or newest is None or found.version > newest.version


def _at_end() -> None:
    for root, pid in _used.items():
        if pid == os.getpid():
            with suppress(OSError, RekindleError):
                Catalog(root).let_newest_go()


atexit.register(_at_end)
"""Runs before the end of ``rekindle.files``, which was imported, and so registered, before it."""
