"""Saves objects: ``save`` and ``multi_save``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rekindle.faults.imports import note_save
from rekindle.files import flush
from rekindle.files.client import forked
from rekindle.files.contents import Contents
from rekindle.files.saving import canonical_target_within, save_target, write_straight
from rekindle.provide.mindio_acp.earlier import Earlier
from rekindle.provide.mindio_acp.errors import as_runtime_error
from rekindle.provide.mindio_acp.format import of_bytes
from rekindle.provide.mindio_acp.paths import LONGEST

__all__ = ["multi_save", "put", "save", "save_at_once"]

log = logging.getLogger("rekindle")

IN_MEMORY, WRITTEN = 1, 2
"""Values that ``save`` returns."""
_MEMORY = "memfs"
_FLUSH_WITHIN = 600.0
_earlier = Earlier()
"""This process's saves. One, as a process takes part in one training."""


def save(obj: Any, path: str, open_way: str = _MEMORY) -> int:
    """Saves an object at a path, memory first. A ``torch.save`` file arrives there; of bytes, one in MindIO's format.

    Waits until the checkpoint before is on storage: see ``rekindle.provide.mindio_acp.earlier``.

    Args:
        obj: anything that ``torch.save`` takes, on any device; or bytes.
        path: a path. Directories that are missing are made, and a placeholder stands there until the file arrives.
        open_way: "memfs", or anything else to return only when the file is at its path.

    Returns:
        1: it is in memory, and arrives by itself. 2: it is on storage, as memory was full or ``open_way`` says so.

    Raises:
        RuntimeError: it was not saved, with the reason.
    """
    return _save_all(obj, [path], open_way)


def multi_save(obj: Any, path_list: list[str]) -> int | None:
    """Saves an object at several paths, serialised once: see ``save``.

    Returns:
        0 for no path; 1 if all are in memory; 2 if some were written straight to storage. None, and nothing is saved,
        where ``path_list`` is no list of texts of at most 1024 characters.

    Raises:
        RuntimeError: one was not saved, with the reason. Those before it in the list were.
    """
    if not isinstance(path_list, list) or not all(isinstance(path, str) and len(path) <= LONGEST for path in path_list):
        log.error("mindio_acp.multi_save: nothing is saved: needs a list of paths of at most %d characters", LONGEST)
        return None
    return _save_all(obj, path_list, _MEMORY) if path_list else 0


def _save_all(obj: Any, paths: Sequence[str], open_way: str) -> int:
    if not forked():
        _earlier.wait(paths)
    results = save_at_once(obj, paths)
    in_memory = [path for path, result in zip(paths, results, strict=True) if result == IN_MEMORY]
    _earlier.note(in_memory)
    if open_way == _MEMORY:
        return max(results)
    for path in in_memory:
        with as_runtime_error("is in memory, and not yet on storage", path):
            flush(path, timeout=_FLUSH_WITHIN)
    return WRITTEN


def save_at_once(obj: Any, paths: Sequence[str]) -> list[int]:
    """Saves an object at paths, serialised once, and waits for no other. Returns what ``save`` would for each.

    Raises RuntimeError.
    """
    with as_runtime_error("was not saved", paths[0]):
        contents = of_bytes(obj) if isinstance(obj, bytes) else _of_object(obj)
    results = []
    for path in paths:
        with as_runtime_error("was not saved", path):
            results.append(put(path, contents))
    return results


def _of_object(obj: object) -> Contents:
    from rekindle.files.pickled import of_object  # noqa: PLC0415  brings torch

    return of_object(obj)


def put(path: str, contents: Contents, mode: int | None = None) -> int:
    """Saves contents at a path, with the rights ``mode`` if nothing is there yet. Returns as ``save``.

    Raises the errors of ``rekindle.save``.
    """
    target = canonical_target_within(path)
    if forked():  # such as a worker that writes the checkpoint in its parent's place: its bytes are worth the wait
        write_straight(target, contents)
        return WRITTEN
    result = save_target(target, contents, placeholder=True, mode=mode)
    note_save()
    return IN_MEMORY if result == "memory" else WRITTEN
