"""Stages files that get their name when they are whole, and provides memory that the kernel can write to disk.

Everything large is a mapping of a file whose blocks are allocated: the kernel can reclaim its memory at any time, and a
full disk is an error before the first byte instead of a signal in the middle.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch

from rekindle.errors import BusyError, NotFoundError, UsageError
from rekindle.storage import disk

__all__ = ["map_new_file", "os_error", "publish", "write_file", "map_scratch", "lay_out", "staging", "tensor_view"]

_ALIGNED = 64
"""Alignment in bytes: that of storages in torch's own files, and enough for any element."""

Key = TypeVar("Key")


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """Makes an empty directory beside ``out``, and removes it at the end with all that is still in it.

    Empties one that a killed process left. Raises UsageError when ``out`` exists, NotFoundError when its parent
    doesn't, BusyError when another process is writing ``out``.
    """
    path = out.parent / f".{out.name}.tmp"
    if not path.is_dir():  # else empty it first: a killed process may have left it after giving ``out`` its name
        _check(out)
    disk.mkdir(path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{out}: another process is writing it") from None
        _empty(path)
        try:
            _check(out)
            yield path
        finally:
            with suppress(OSError):  # NFS keeps an unnamed file under a strange name while it is mapped
                _empty(path)
                disk.rmdir(path)
    finally:
        os.close(fd)


def _check(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out}: exists already; give another name, or remove it first")
    if not out.parent.is_dir():
        raise NotFoundError(f"{out.parent}: is not a directory; make it first")


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            _empty(path)
            disk.rmdir(path)
        else:
            disk.unlink(path)


def publish(temporary: Path, out: Path) -> None:
    """Syncs a file, or a directory and the files in it, and gives it its name.

    Raises UsageError when something has that name by now.
    """
    for path in sorted(temporary.iterdir()) if temporary.is_dir() else ():
        disk.sync(path)
    disk.sync(temporary)
    _check(out)
    disk.rename(temporary, out)
    disk.sync(out.parent)


def os_error(error: BaseException | None) -> OSError | None:
    """Returns the OSError behind an error of torch, which reports only that its file could not be closed."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def write_file(path: Path, data: bytes) -> None:
    """Writes a new file. Raises OSError when there is no room."""
    fd = disk.create(path)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[disk.write(fd, rest) :]
    finally:
        os.close(fd)


def _allocated(fd: int, nbytes: int) -> memoryview:
    disk.reserve(fd, nbytes)
    return memoryview(mmap.mmap(fd, nbytes))


def map_new_file(path: Path, nbytes: int) -> memoryview:
    """Makes and maps a new file of ``nbytes``, at least one. Raises OSError when there is no room."""
    fd = disk.create(path)
    try:
        return _allocated(fd, nbytes)
    finally:
        os.close(fd)


def map_scratch(directory: Path, nbytes: int) -> memoryview:
    """Maps an unnamed file in ``directory``, which goes with the last view, however the process ends.

    Raises OSError when there is no room.
    """
    if not nbytes:
        return memoryview(bytearray())
    with tempfile.TemporaryFile(dir=directory) as file:
        return _allocated(file.fileno(), nbytes)


def lay_out(sizes: Mapping[Key, int]) -> tuple[dict[Key, slice], int]:
    """Lays out pieces of these sizes, aligned, in one piece of memory. Returns their places and its size."""
    places, first = {}, 0
    for key, nbytes in sizes.items():
        first = -(-first // _ALIGNED) * _ALIGNED
        places[key] = slice(first, first + nbytes)
        first += nbytes
    return places, first


def tensor_view(data: memoryview, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """Returns a tensor that shares these bytes and no others. Never write to a tensor of read-only bytes."""
    shape = tuple(shape)
    if not len(data):
        return torch.empty(shape, dtype=dtype, device="cpu")
    if not data.readonly:
        return torch.frombuffer(data, dtype=dtype).view(shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=dtype).view(shape)
