"""Opens a committed shard for reading, and pins it while it lies in a memory store."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from rekindle.errors import CorruptError, FormatError
from rekindle.format.receipt import Receipt, open_file, read_file

__all__ = ["OpenShard", "Receive", "Remote", "Stream", "open_pinned"]


Stream = Callable[[int, int], Iterator[memoryview]]
"""Yields the bytes between two offsets in pieces, each valid until the next. Stops early at the end of the file.

May be called from any thread. Raises OSError.
"""

Receive = Callable[[list[memoryview]], None]
"""Fills each of these views in turn with the bytes that come next. Raises OSError."""


class Remote(Protocol):
    """Gives the bytes of a shard in another node's memory. Safe to use from any thread, except for ``close``."""

    def ask(self, start: int, stop: int) -> AbstractContextManager[Receive]:
        """Asks for the bytes between two offsets, all of which are then received in this thread. Raises OSError."""

    def close(self) -> None:
        """Closes all connections. May be called again."""


def open_pinned(receipt_path: Path) -> tuple[bytes, int]:
    """Returns the receipt at ``receipt_path``, not parsed, and a descriptor of its shard's file that pins it.

    Raises FileNotFoundError when the shard is gone or being recycled, FormatError when a name is a symbolic link.
    """
    path = _shard_of(receipt_path)
    raw = read_file(receipt_path)  # before the shard: after the pin it must still be the same
    fd = open_file(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.stat(path).st_ino != os.fstat(fd).st_ino or read_file(receipt_path) != raw:
            raise FileNotFoundError(errno.ENOENT, "was recycled meanwhile", str(path))
        return raw, fd
    except BlockingIOError:
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "is being rewritten", str(path)) from None
    except BaseException:
        os.close(fd)
        raise


def _shard_of(receipt_path: Path) -> Path:
    """Returns the file of the receipt's shard. Nothing is read outside of the checkpoint's directory."""
    if os.path.islink(str(receipt_path.parent)):
        raise FormatError(f"{receipt_path.parent}: is a symbolic link, not a directory of checkpoints")
    return receipt_path.with_suffix(".safetensors")


class OpenShard:
    """Holds an open shard and its receipt. In memory it is pinned: its bytes stay, whatever its writer does next."""

    def __init__(
        self,
        receipt: Receipt,
        fd: int,
        path: Path | str,
        *,
        in_memory: bool,
        stream: Stream | None = None,
        remote: Remote | None = None,
    ) -> None:
        """Takes over ``fd``, or ``remote``.

        For a shard that is not on a file system ``fd`` is -1: ``stream`` or ``remote`` gives the bytes.
        """
        self.receipt = receipt
        self.fd = fd
        self.path = path
        self.in_memory = in_memory
        self.stream = stream
        self.remote = remote

    @staticmethod
    def open(receipt_path: Path, *, in_memory: bool) -> OpenShard:
        """Opens the shard of the receipt at ``receipt_path``, and pins it if it is ``in_memory``.

        Raises FileNotFoundError when it is gone or being recycled, CorruptError when its receipt or size is wrong, or
        when one of the two is a symbolic link.
        """
        path = _shard_of(receipt_path)
        raw, fd = open_pinned(receipt_path) if in_memory else (read_file(receipt_path), open_file(path))
        try:
            receipt = Receipt.decode(raw, receipt_path)
            receipt.check_size(os.fstat(fd).st_size, path, in_memory=in_memory)
            return OpenShard(receipt, fd, path, in_memory=in_memory)
        except BaseException:
            os.close(fd)
            raise

    def map(self) -> memoryview:
        """Maps the whole shard without a copy; writes into the view stay private. The pin lasts as long as any view."""
        return memoryview(mmap.mmap(self.fd, self.receipt.file_bytes, access=mmap.ACCESS_COPY))

    def corruption(self, block: int) -> CorruptError:
        """Returns the error for damage to data block number ``block``, or to the header when it is -1."""
        where = "its header" if block < 0 else f"tensor {self.receipt.layout.tensor_of(block)!r}"
        return CorruptError(f"{self.path}: {where} of step {self.receipt.stamp.step} differs from its checksum")

    def close(self) -> None:
        """Closes the file, or the connections. May be called again."""
        if self.remote is not None:
            self.remote.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> OpenShard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
