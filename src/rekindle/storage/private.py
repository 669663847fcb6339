"""Keeps files of a root that only this user may have written, because their contents are going to be run.

They lie in one folder of the root, two levels deep. In a directory, the owners and modes of folders and files are
checked at each look. An object store has no owners: who may write to the bucket is up to its policy.
"""

from __future__ import annotations

import os
import secrets
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.format.names import Root
from rekindle.storage import disk

if TYPE_CHECKING:
    from rekindle.storage.bucket import Bucket

__all__ = ["PrivateFiles", "StoredFile", "open_private"]


@dataclass(frozen=True)
class StoredFile:
    """A file as it was when it was listed."""

    name: str
    """``folder/file``. Unfinished files are listed too, under names that begin with a dot."""
    size: int
    changed: float
    """Time of the last change by storage's own clock, in seconds since 1970."""


class PrivateFiles(ABC):
    """Files in one folder of a root, each written once, as a whole.

    All methods raise OSError when storage fails. PermissionError means that somebody else may have written there.
    """

    where: str
    """Path or URL of the folder."""

    @abstractmethod
    def list(self) -> list[StoredFile]:
        """Lists all files; none where the folder is missing."""

    @abstractmethod
    def read(self, name: str, most: int) -> bytes:
        """Returns the first ``most`` bytes of a file. Raises FileNotFoundError."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Writes a file, durable on return. It appears as a whole, over an older one if there is one.

        Makes folders, but not the root.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file. One that isn't there is no error."""


def open_private(root: Root, folder: str) -> PrivateFiles:
    """Returns the private files in a folder of a root. Sends no request to a server.

    Raises UsageError when the package that a URL needs is not installed, or not configured.
    """
    if "://" not in str(root):
        return _InDirectory(Path(root) / folder)
    from rekindle.storage.bucket import Bucket  # noqa: PLC0415  8 MB that the agent of a directory saves

    return _InBucket(Bucket(f"{root}/{folder}"))


class _InDirectory(PrivateFiles):
    def __init__(self, path: Path) -> None:
        self._path, self.where = path, str(path)

    def list(self) -> list[StoredFile]:
        found = []
        with suppress(FileNotFoundError), _folder(self._path) as top:
            for folder in sorted(os.listdir(top)):
                with suppress(NotADirectoryError), _folder(self._path / folder, top) as fd:
                    for name in sorted(os.listdir(fd)):
                        with suppress(FileNotFoundError):  # somebody has just removed it
                            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                            if stat.S_ISREG(info.st_mode):
                                found.append(StoredFile(f"{folder}/{name}", info.st_size, info.st_mtime))
        return found

    def read(self, name: str, most: int) -> bytes:
        # By descriptors: whoever may write to the root could put another folder in the place of one that was checked.
        folder, _, file = name.partition("/")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with (
            _folder(self._path) as top,
            _folder(self._path / folder, top) as fd,
            open(os.open(file, flags, dir_fd=fd), "rb") as opened,
        ):
            _check(os.fstat(opened.fileno()), self._path / name, 0o022)
            return opened.read(most)

    def write(self, name: str, data: bytes) -> None:
        path = self._path / name
        for folder in (self._path, path.parent):
            disk.mkdir(folder, 0o700)
            disk.sync(folder.parent)
            with _folder(folder):
                pass
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        fd = disk.create(temporary)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[disk.write(fd, rest) :]
            disk.fsync(fd)
            disk.rename(temporary, path)
        except BaseException:
            disk.unlink(temporary)
            raise
        finally:
            os.close(fd)
        disk.sync(path.parent)

    def remove(self, name: str) -> None:
        disk.unlink(self._path / name)


@contextmanager
def _folder(path: Path, parent: int | None = None) -> Iterator[int]:
    """Gives a descriptor of a folder that is this user's alone. Raises PermissionError for another one."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path if parent is None else path.name, flags, dir_fd=parent)
    try:
        _check(os.fstat(fd), path, 0o077)
        yield fd
    finally:
        os.close(fd)


def _check(info: os.stat_result, path: Path, forbidden: int) -> None:
    """Raises PermissionError for what is another user's, or gives others a right that is ``forbidden``."""
    # Without an error number: what is usually advised for it, more rights, would be wrong here.
    if info.st_uid != os.getuid():
        raise PermissionError(
            f"{path}: belongs to user {info.st_uid}, not to us ({os.getuid()}), and what it holds would be run"
        )
    if info.st_mode & forbidden:
        mode = info.st_mode & 0o777
        raise PermissionError(
            f"{path}: is open to others (mode {mode:o}), and what it holds would be run: chmod 700 it"
        )


class _InBucket(PrivateFiles):
    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self.where = bucket, bucket.url

    def list(self) -> list[StoredFile]:
        return [
            StoredFile(found.name, found.size, found.changed)
            for found in self._bucket.walk()
            if found.name.count("/") == 1
        ]

    def read(self, name: str, most: int) -> bytes:
        return self._bucket.get(name)[0][:most] if most else b""

    def write(self, name: str, data: bytes) -> None:
        self._bucket.put(name, data)

    def remove(self, name: str) -> None:
        self._bucket.delete([name])
