"""A committed shard, opened for reading."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rekindle.errors import CorruptError, FormatError
from rekindle.format.receipt import Receipt, open_file, read_file

__all__ = ["OpenShard", "Stream"]


Stream = Callable[[int, int], Iterator[memoryview]]
"""Gives the bytes from one offset to another, piece by piece, each good until the next; fewer at the end of the file.
For any thread. Raises OSError."""


class OpenShard:
    """A shard and its receipt. While a pinned one is open its bytes stay, whatever its writer does next."""

    def __init__(
        self, receipt: Receipt, fd: int, path: Path | str, in_memory: bool, stream: Stream | None = None
    ) -> None:
        """``stream`` takes the place of ``fd``, -1 then, for what is not on a file system."""
        self.receipt = receipt
        self.fd = fd
        self.path = path
        self.in_memory = in_memory
        self.stream = stream

    @staticmethod
    def open(receipt_path: Path, in_memory: bool) -> OpenShard:
        """Open, and in memory pin, the shard that ``receipt_path`` speaks of.

        Raises FileNotFoundError when it is gone or just being recycled, CorruptError when receipt or size is wrong, or
        one of the two is a link: nothing is read outside of the checkpoint's directory.
        """
        path = receipt_path.with_suffix(".safetensors")
        if os.path.islink(str(path.parent)):
            raise FormatError(f"{path.parent}: is a symbolic link, not a directory of checkpoints")
        raw = read_file(receipt_path)
        fd = open_file(path)
        try:
            if in_memory:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.stat(path).st_ino != os.fstat(fd).st_ino or read_file(receipt_path) != raw:
                    raise FileNotFoundError(errno.ENOENT, "recycled meanwhile", str(path))
            receipt = Receipt.decode(raw, receipt_path)
            size = os.fstat(fd).st_size
            if size != receipt.file_bytes:
                raise CorruptError(f"{path}: has {size:,} bytes, should have {receipt.file_bytes:,}")
            return OpenShard(receipt, fd, path, in_memory)
        except BlockingIOError:
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "is being rewritten", str(path)) from None
        except BaseException:
            os.close(fd)
            raise

    def map(self) -> memoryview:
        """The whole file without a copy; stores into it stay private. The pin lasts until the last view is gone."""
        return memoryview(mmap.mmap(self.fd, self.receipt.file_bytes, access=mmap.ACCESS_COPY))

    def corruption(self, block: int) -> CorruptError:
        """The error for data block number ``block``, or for the header when it is -1."""
        where = "its header" if block < 0 else f"tensor {self.receipt.layout.tensor_of(block)!r}"
        return CorruptError(f"{self.path}: {where} of step {self.receipt.stamp.step} differs from its checksum")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> OpenShard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
