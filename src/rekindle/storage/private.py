"""Keeps files of a root that only this user may have written, because their contents are going to be run.

They lie in one folder of the root, two levels deep. In a directory, owners and modes are checked at each look and each
read. An object store has no owners: who may write to the bucket is up to its policy.
"""

from __future__ import annotations

import os
import secrets
import stat
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.format.names import Root
from rekindle.format.receipt import open_file
from rekindle.storage import disk
from rekindle.storage.posix import synced_file, write_all

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

    All methods raise OSError when storage fails, FormatError for a link. PermissionError means that somebody else may
    have written there.
    """

    where: str
    """Path or URL of the folder."""

    @abstractmethod
    def list(self) -> list[StoredFile]:
        """Lists all files by name; none where the folder is missing."""

    @abstractmethod
    def read(self, name: str, most: int) -> bytes:
        """Returns the first ``most`` bytes of a file. Raises FileNotFoundError."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Writes a file, durable on return, over an older one if there is one. Makes folders, but not the root."""

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
        with suppress(FileNotFoundError):
            _check(self._path, os.lstat(self._path))
            for folder in sorted(self._path.iterdir()):
                if stat.S_ISDIR((info := os.lstat(folder)).st_mode):
                    _check(folder, info)
                    found += _list_folder(folder)
        return found

    def read(self, name: str, most: int) -> bytes:
        with open(open_file(self._path / name), "rb") as file:
            # Of the file itself: whoever may write to the root could put another folder in the place of a checked one.
            _check(self._path / name, os.fstat(file.fileno()))
            return file.read(most)

    def write(self, name: str, data: bytes) -> None:
        path = self._path / name
        for folder in (self._path, path.parent):
            disk.mkdir(folder, 0o700)
            disk.sync(folder.parent)
            _check(folder, os.lstat(folder))
        with synced_file(path, path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")) as fd:
            write_all(fd, data)
        disk.sync(path.parent)

    def remove(self, name: str) -> None:
        disk.unlink(self._path / name)


def _list_folder(folder: Path) -> list[StoredFile]:
    found = []
    for name in sorted(os.listdir(folder)):
        with suppress(FileNotFoundError):  # somebody has just removed it
            info = os.lstat(folder / name)
            if stat.S_ISREG(info.st_mode):
                found.append(StoredFile(f"{folder.name}/{name}", info.st_size, info.st_mtime))
    return found


def _check(path: Path, info: os.stat_result) -> None:
    """Raises PermissionError for another user's, for a folder that others may enter, and a file that they may write."""
    # Without an error number: what is usually advised for it, more rights, would be wrong here.
    if info.st_uid != os.getuid():
        raise PermissionError(
            f"{path}: belongs to user {info.st_uid}, not to us ({os.getuid()}), and what it holds would be run"
        )
    if info.st_mode & (0o022 if stat.S_ISREG(info.st_mode) else 0o077):
        how = "is a link" if stat.S_ISLNK(info.st_mode) else f"is open to others (mode {info.st_mode & 0o777:o})"
        raise PermissionError(f"{path}: {how}, and what it holds would be run: remove it, or chmod go= it")


class _InBucket(PrivateFiles):
    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self.where = bucket, bucket.url

    def list(self) -> list[StoredFile]:
        found = [StoredFile(each.name, each.size, each.changed) for each in self._bucket.walk()]
        return [each for each in found if each.name.count("/") == 1]

    def read(self, name: str, most: int) -> bytes:
        size = min(most, self._bucket.head(name).size)  # services refuse a range that begins at an object's end
        return b"".join(self._bucket.stream(name, 0, size)) if size else b""

    def write(self, name: str, data: bytes) -> None:
        self._bucket.upload(name, iter([memoryview(data)]), len(data), memoryview(data))

    def remove(self, name: str) -> None:
        self._bucket.delete([name])
