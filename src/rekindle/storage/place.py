"""Defines the contract of a place: where one file belongs, on a file system or in an object store."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from urllib.parse import unquote, urlsplit

from rekindle.errors import UsageError
from rekindle.format.names import canonical_root
from rekindle.memory.kept import Identity

__all__ = ["Pieces", "Place", "canonical_target"]

Pieces = Iterator[tuple[memoryview, int]]
"""Yields all bytes of a file in order, as pieces with their offsets, which are multiples of a page."""


class Place(ABC):
    """One file on storage, there or not. Any number of processes may use the same place.

    Every method raises OSError where storage refuses or fails.
    """

    target: str
    mode: int = 0o644
    """Rights of a file at a path where none is yet."""

    @abstractmethod
    def check(self) -> None:
        """Raises UsageError where no file can be put now: a directory in its place, no right to write."""

    def trace(self) -> list[int] | None:
        """Identifies the directory that the file is put in, for ``check_mounted``; None where there is nothing to."""
        return None

    def check_mounted(self, trace: list[int]) -> None:
        """Raises FileNotFoundError where the directory of ``trace`` was not removed, but is not mounted.

        What is written below the place of a mount is hidden by the next mount.
        """
        return None

    @abstractmethod
    def identify(self) -> Identity | None:
        """Returns what tells the file that is there from any other; None where none is."""

    def has_arrived(self) -> bool:
        """True if the file itself is there, not something that stands for it."""
        return self.identify() is not None

    @abstractmethod
    def size(self) -> int:
        """Returns the size of the file in bytes. Raises FileNotFoundError."""

    @abstractmethod
    def write(self, pieces: Pieces, whole: memoryview, progress: Callable[[int], object]) -> Identity:
        """Puts a file there, durable on return, in place of an older one. Readers see either, never a part.

        ``pieces`` are those of ``whole``, and an error of theirs leaves the old file. ``progress`` is given byte
        counts. One writer at a time for each ``owner``: it holds ``FilesDir.writing``.
        """

    @abstractmethod
    def write_stream(self, chunks: Iterator[memoryview], nbytes: int) -> Identity:
        """Puts a file there as ``write`` does, from chunks of any size that are together ``nbytes``.

        They have to stay as they are until the return.
        """

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yields a range's bytes in pieces, each valid until the next; fewer where the file ends before."""


def canonical_target(path: str | os.PathLike[str], *, resolve: bool = True) -> str:
    """Returns the one form of a file's path or URL, so that all ways to write it compare equal.

    Links in the directories above are followed, which may hang with storage; not with ``resolve=False``. Raises
    UsageError for what can't name a file.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise UsageError(f"path is {path!r}: must be a path or a URL, as a str or an os.PathLike") from None
    scheme, separator, _ = text.partition("://")
    one_slash = not separator and text.partition(os.sep)[0] in ("file:", "s3:", "gs:", "az:")
    if one_slash or (separator and scheme != "file"):
        return str(canonical_root(text, what="path"))
    if separator:
        text = _path_of_url(text)
    name = text.rpartition(os.sep)[2]
    if name in ("", ".") or ".." in text.split(os.sep):
        raise UsageError(f"path {text!r}: must name a file, without '..' (os.path.abspath takes it out)")
    if "\0" in text:
        raise UsageError(f"path {text!r}: can't be the name of a file: it has a NUL")
    try:
        whole = os.path.abspath(os.path.expanduser(text))
    except FileNotFoundError as error:
        raise UsageError(
            f"path {text!r}: the working directory was removed: change to another one, or give an absolute path"
        ) from error
    try:
        os.fsencode(whole)
    except ValueError as error:  # a lone surrogate
        raise UsageError(f"path {text!r}: can't be the name of a file: {error}") from error
    above, name = os.path.split(whole)
    return os.path.join(os.path.realpath(above) if resolve else above, name)


def _path_of_url(text: str) -> str:
    try:
        url = urlsplit(text)
    except ValueError as error:
        raise UsageError(f"path {text!r}: {error}") from error
    if url.netloc not in ("", "localhost") or url.query or url.fragment:
        raise UsageError(f"path {text!r}: must be file:///PATH; write ? as %3F and # as %23, or give the path")
    return unquote(url.path)
