"""Files that get their name when they are whole, and memory that the kernel can write to disk whenever it needs room.

Everything large is a mapping of a file that has its place on the disk already: what is put there is never memory that
only this process can give back, and a full disk is an error before the first byte instead of a signal in the middle.
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
"""Bytes: what torch aligns storages to in its own files, and enough for any element."""

Key = TypeVar("Key")


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """An empty directory beside ``out``. What is still in it at the end is removed, and what a killed one left too.

    Raises UsageError when ``out`` exists, NotFoundError when its parent doesn't, BusyError when somebody else is at it.
    """
    path = out.parent / f".{out.name}.tmp"
    if not path.is_dir():  # what a killed one has left goes, though it had given ``out`` its name already
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
            with suppress(OSError):  # NFS keeps a file of no name as one with a strange name, while it is mapped
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
    """Sync a file, or a directory and the files in it, and give it its name.

    Raises UsageError when something has that name by now.
    """
    for path in sorted(temporary.iterdir()) if temporary.is_dir() else ():
        disk.sync(path)
    disk.sync(temporary)
    _check(out)
    disk.rename(temporary, out)
    disk.sync(out.parent)


def os_error(error: BaseException | None) -> OSError | None:
    """What the operating system said, where torch, closing its file, only tells that the end is missing."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def write_file(path: Path, data: bytes) -> None:
    """A new file of these bytes. Raises OSError when there is no room."""
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
    """A new file of ``nbytes``, at least one, to be written through memory. Raises OSError when there is no room."""
    fd = disk.create(path)
    try:
        return _allocated(fd, nbytes)
    finally:
        os.close(fd)


def map_scratch(directory: Path, nbytes: int) -> memoryview:
    """Memory with a file of no name in ``directory`` behind it: gone with the last view, however the process ends.

    Raises OSError when there is no room.
    """
    if not nbytes:
        return memoryview(bytearray())
    with tempfile.TemporaryFile(dir=directory) as file:
        return _allocated(file.fileno(), nbytes)


def lay_out(sizes: Mapping[Key, int]) -> tuple[dict[Key, slice], int]:
    """Where pieces of so many bytes lie, aligned, in one piece of memory, and how large that is."""
    places, first = {}, 0
    for key, nbytes in sizes.items():
        first = -(-first // _ALIGNED) * _ALIGNED
        places[key] = slice(first, first + nbytes)
        first += nbytes
    return places, first


def tensor_view(data: memoryview, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """Bytes as a tensor that shares them, in a storage of just these bytes. Never write to one of read-only bytes."""
    shape = tuple(shape)
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    if not data.readonly:
        return torch.frombuffer(data, dtype=dtype).view(shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=dtype).view(shape)
