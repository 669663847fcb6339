"""Loads objects: ``load``, and ``preload`` ahead of it."""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from typing import Any

from rekindle import files
from rekindle.common.os_errors import explain
from rekindle.common.timeouts import in_background
from rekindle.errors import FormatError, NotFoundError, RekindleError
from rekindle.files.contents import Contents
from rekindle.files.saving import canonical_target_within
from rekindle.provide.mindio_acp.errors import as_runtime_error
from rekindle.provide.mindio_acp.format import as_torch_file, bytes_of, read_map
from rekindle.provide.mindio_acp.harmless import harmless
from rekindle.provide.mindio_acp.paths import LONGEST, beside_it
from rekindle.storage.open import open_place

__all__ = ["load", "preload", "read_bytes"]

log = logging.getLogger("rekindle")

_LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
"""First bytes of a file of ``torch.save`` before torch 1.6."""
_NAMED = 3
"""Other files that an error names at most."""
_preloads: dict[str, Future[None]] = {}
"""The last preload of each target. A load of it waits for that rather than read it a second time."""
os.register_at_fork(after_in_child=_preloads.clear)


def load(path: str, open_way: str = "memfs", map_location: Any = None, weights_only: bool = True) -> Any:
    """Loads what was saved at a path, from memory if it is there, else from the path: see ``rekindle.load``.

    Args:
        path: a file of ``torch.save``, or one in MindIO's format.
        open_way: doesn't matter. Memory is taken only where it has the newest, or what the path shows.
        map_location: as for ``torch.load``: any device.
        weights_only: as for ``torch.load``, whatever the file's format. Namespaces and NumPy's arrays of numbers, which
            Megatron saves, are loaded too.

    Raises:
        RuntimeError: it can't be loaded, with the reason. Of a file that isn't there the other checkpoints' are named.
    """
    with as_runtime_error("can't be loaded", path, (Exception,)), _naming_others(path):
        _wait_for_preload(path)
        with harmless() if weights_only else nullcontext():
            try:
                return files.load(path, map_location, weights_only)
            except FormatError:
                return _load_other(path, map_location, weights_only)


def read_bytes(path: str) -> bytes:
    """Returns the bytes of a file, from memory if it is there. Raises the errors of ``rekindle.load``."""
    with _naming_others(path):
        _wait_for_preload(path)
        found: bytes = files.load(path, raw=True)
        return found


def _load_other(path: str, map_location: Any, weights_only: bool) -> Any:
    data = read_bytes(path)
    if data.startswith(_LEGACY):
        return _torch_load(io.BytesIO(data), map_location, weights_only)
    table = read_map(data, path)
    found = bytes_of(data, table, path)
    return _torch_load(_Reader(as_torch_file(data, table)), map_location, weights_only) if found is None else found


def _torch_load(file: Any, map_location: Any, weights_only: bool) -> Any:
    import torch  # noqa: PLC0415  bytes are loaded without it

    return torch.load(file, map_location=map_location, weights_only=weights_only)


class _Reader(io.RawIOBase):
    """Reads contents as a file, where they lie."""

    def __init__(self, contents: Contents) -> None:
        self._contents, self._at = contents, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._contents.nbytes)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        to = memoryview(buffer).cast("B")
        begin, end = self._at, min(self._at + len(to), self._contents.nbytes)
        for segment, start, stop in self._contents.between(begin, end):
            to[start - begin : stop - begin] = segment.view()[start - segment.start : stop - segment.start]
        self._at = max(begin, end)
        return self._at - begin


@contextmanager
def _naming_others(path: str) -> Iterator[None]:
    try:
        yield
    except NotFoundError as error:
        others = beside_it(path)[:_NAMED]
        hint = f"storage has of other checkpoints, the newest first: {', '.join(others)}" if others else ""
        raise NotFoundError("; ".join(filter(None, [str(error), hint]))) from error


def preload(*path: str) -> int:
    """Begins to bring files from storage into this node's memory, verified. A load waits for that.

    Returns:
        0 once it has begun; 1 where nothing is brought, with the reason in the log: no path, one of more than 1024
        characters, or no file there.
    """
    if not path or not all(isinstance(one, str) and len(one) <= LONGEST for one in path):
        log.error("mindio_acp.preload: nothing is brought: needs paths of at most %d characters", LONGEST)
        return 1
    try:
        targets = [canonical_target_within(one) for one in path]
        for target in targets:
            if open_place(target).identify() is None:
                raise NotFoundError(f"{target}: there is no such file")
    except (RekindleError, OSError) as error:
        log.error("mindio_acp.preload: nothing is brought: %s", explain(error))
        return 1
    for target in targets:
        running = _preloads.get(target)
        if running is None or running.done():
            _preloads[target] = in_background(lambda target=target: _bring(target), "mindio-preload")  # type: ignore[misc]
    return 0


def _bring(target: str) -> None:
    try:
        files.preload(target)
    except (RekindleError, OSError) as error:
        log.warning("%s: is not preloaded, a load will read it from storage: %s", target, explain(error))


def _wait_for_preload(path: str) -> None:
    running = _preloads.get(canonical_target_within(path))
    if running is not None:
        wait([running])
