"""Puts files into an object store, where an object appears as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache

from rekindle.common.failpoints import reach
from rekindle.memory.kept import Identity
from rekindle.storage.bucket import Bucket, Object
from rekindle.storage.place import Pieces, Place

__all__ = ["ObjectPlace"]

_SMALL = 16 << 20
"""Most bytes that are sent in one request, from one buffer."""


class ObjectPlace(Place):
    """An object at a URL."""

    def __init__(self, url: str) -> None:
        self.target = url
        above, _, self._name = url.rpartition("/")
        self._bucket = _open_bucket(above, os.getpid())

    def check(self) -> None:
        """Asks nothing: an object can be put wherever the credentials reach, and the upload will tell."""

    def _head(self) -> Object | None:
        try:
            return self._bucket.head(self._name)
        except FileNotFoundError:
            return None

    def identify(self) -> Identity | None:
        found = self._head()
        return None if found is None else [found.size, found.etag, found.version]

    def size(self) -> int:
        return self._bucket.head(self._name).size

    def write(self, pieces: Pieces, whole: memoryview, progress: Callable[[int], object]) -> Identity:
        def sent() -> Iterator[memoryview]:
            for piece, _ in pieces:
                yield piece
                progress(len(piece))
                reach("upload.copying", 0)
            reach("upload.written", 0)

        self._bucket.upload(self._name, sent(), len(whole), whole)
        return self.identify() or []

    def write_stream(self, chunks: Iterator[memoryview], nbytes: int) -> Identity:
        def sent() -> Iterator[memoryview]:
            for chunk in chunks:
                yield chunk
                reach("upload.copying", 0)

        whole = b"".join(chunks) if nbytes <= _SMALL else b""
        self._bucket.upload(self._name, iter([]) if whole else sent(), nbytes, memoryview(whole))
        return self.identify() or []

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        if start < stop:
            yield from self._bucket.stream(self._name, start, stop)


@lru_cache(maxsize=64)
def _open_bucket(url: str, _process: int) -> Bucket:
    """Returns the client of the objects below a URL: one per process, as connections don't survive a fork."""
    return Bucket(url)
