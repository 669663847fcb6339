"""Files that are written and read as such: ``create_file`` and ``open_file``, which MindSpore uses."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from rekindle.files.contents import Contents, segment_of
from rekindle.format.file_receipt import BYTES
from rekindle.provide.mindio_acp.errors import as_runtime_error
from rekindle.provide.mindio_acp.loading import read_bytes
from rekindle.provide.mindio_acp.saving import put

__all__ = ["ReadableFile", "WritableFile", "create_file", "open_file"]


class WritableFile:
    """A file that is being written. It exists once it is closed, and not at all after an exception or a ``drop``.

    Its chunks are kept until then, so that it is copied into memory as a whole. For one thread.
    """

    def __init__(self, path: str, mode: int) -> None:
        self._path, self._mode = path, mode
        self._chunks: list[bytes] | None = []

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Takes bytes, behind those of before. Returns 0. Raises RuntimeError after ``close`` or ``drop``."""
        if self._chunks is None:
            raise RuntimeError(f"{self._path}: is closed: nothing more is written to it")
        self._chunks.append(data if isinstance(data, bytes) else memoryview(data).tobytes())
        return 0

    def close(self) -> None:
        """Saves the file, memory first. May be called again. Raises RuntimeError if it isn't saved."""
        chunks, self._chunks = self._chunks, None
        if chunks is None:
            return
        segments, at = [], 0
        for chunk in filter(None, chunks):
            segments.append(segment_of(memoryview(chunk), at))
            at += len(chunk)
        with as_runtime_error("was not saved", self._path):
            put(self._path, Contents(BYTES, at, segments), self._mode)

    def drop(self) -> None:
        """Gives up what was written. What was saved at the path before stays."""
        self._chunks = None

    def __enter__(self) -> WritableFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.drop()


class ReadableFile:
    """A file that is open for reading. All of it is in this process's memory."""

    def __init__(self, path: str) -> None:
        self._path = path
        with as_runtime_error("can't be read", path):
            self._data: bytes | None = read_bytes(path)

    def read(self, offset: int = 0, count: int = -1) -> bytes:
        """Returns ``count`` bytes from ``offset`` on, or all of them. Raises RuntimeError where there are fewer."""
        data = self._data
        if data is None:
            raise RuntimeError(f"{self._path}: is closed: nothing is read from it")
        stop = len(data) if count < 0 else offset + count
        if not 0 <= offset <= stop <= len(data):
            raise RuntimeError(f"{self._path}: has no bytes {offset:,} to {stop:,}: its size is {len(data):,}")
        return data[offset:stop]

    def close(self) -> None:
        """Lets go of the bytes. May be called again."""
        self._data = None

    def __enter__(self) -> ReadableFile:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def create_file(path: str, mode: int = 0o600) -> WritableFile:
    """Returns a file to be written at a path, with the rights ``mode``, best in a ``with`` block."""
    return WritableFile(os.fspath(path), mode)


def open_file(path: str) -> ReadableFile:
    """Opens a file, from memory if it is there, verified. Raises RuntimeError where it can't be read."""
    return ReadableFile(os.fspath(path))
