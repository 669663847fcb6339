"""Keeps the directory of a job's compile caches in the memory store: beside the job's own, which is removed at its end.

::

    /dev/shm/rekindle-<uid>/<job>.compile/      mode 0700, owned by the user; locked by those who use it
      <toolchain>/                              what its files are valid for
        inductor/ triton/ cuda/ jax/ mindspore/

The compilers write into it as they please. They run what they find there, so it must be nobody else's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rekindle.common.os_errors import describe_error
from rekindle.errors import FormatError, MemoryStoreError
from rekindle.format.compile_index import CACHES, MAX_BYTES, MAX_ENTRY, is_entry_path
from rekindle.format.names import Root
from rekindle.format.receipt import open_file, write_atomic
from rekindle.memory.job_dir import JobDir, make_private

__all__ = ["CompileDir", "FileStamp"]

_SUFFIX = ".compile"
"""Ending of the directory's name, after the job's."""
_MOST_FILES = 50_000
"""Most files that a look at a directory finds, in some 0.3 s. A large model has some thousands."""
_UNFIT = (".lock", ".tmp", ".gch", ".pch")
"""Endings of files of no use elsewhere: locks, unfinished files, headers compiled for one path and time."""
_BUILT = (".so", ".o")
"""Endings of files that Inductor's C++ compiler writes, which leaves them in pieces when it is killed."""
_ELF = b"\x7fELF\x02"
_ELF_HEADER = struct.Struct("=40xQ10xHH2x")
"""Of a 64-bit ELF file: offset of the section headers, the size of one and their number. Linkers write them last."""
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class FileStamp:
    """One state of a file: a file that was written to has another one."""

    size: int
    inode: int
    changed: int
    """Time of the last change, in nanoseconds since 1970 by this node's clock."""

    @classmethod
    def of(cls, info: os.stat_result) -> FileStamp:
        return cls(info.st_size, info.st_ino, info.st_mtime_ns)


class CompileDir:
    """The compile caches of one job on this node. Safe to use from any thread or process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def of(root: Root, base: Path) -> CompileDir:
        """Returns the directory, in the memory store ``base``, of the job that saves to ``root``."""
        return CompileDir.beside(JobDir.of(root, base))

    @staticmethod
    def beside(job: JobDir) -> CompileDir:
        """Returns the directory of a job that is known by its own."""
        return CompileDir(job.path.with_name(f"{job.path.name}{_SUFFIX}"))

    # -- its users ----------------------------------------------------------------------------------------------

    def use(self, toolchain: str) -> int:
        """Makes the directory and keeps it from removal. Returns a descriptor: closing it lets go.

        The first user removes other toolchains' files, what a killed compiler left in pieces, and all of them if they
        are too many. Raises MemoryStoreError when the directory can't be made or isn't this user's alone.
        """
        try:
            os.makedirs(self.path.parent.parent, exist_ok=True)
            while (fd := self._enter(toolchain)) is None:
                pass
            return fd
        except MemoryStoreError:
            raise
        except OSError as error:
            raise MemoryStoreError(f"memory store {self.path}: {describe_error(error)}") from error

    def _enter(self, toolchain: str) -> int | None:
        """Returns a descriptor that keeps the directory; None if it was removed meanwhile."""
        for path in (self.path.parent, self.path):
            make_private(path)
        with ExitStack() as undo, suppress(FileNotFoundError):
            fd = os.open(self.path, _OPEN)
            undo.callback(os.close, fd)
            with suppress(BlockingIOError):  # it has other users, or is being removed
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_at(fd):
                    make_private(self.path / toolchain)
                    self._tidy(toolchain)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if self._is_at(fd):
                make_private(self.path / toolchain)
                undo.pop_all()
                return fd
        return None

    def _is_at(self, fd: int) -> bool:
        """True if this descriptor is of the directory, not of a removed one. Raises FileNotFoundError without one."""
        return os.stat(self.path).st_ino == os.fstat(fd).st_ino

    def _tidy(self, toolchain: str) -> None:
        for other in set(os.listdir(self.path)) - {toolchain}:
            shutil.rmtree(self.path / other, ignore_errors=True)
        self.remove_torn(toolchain)
        if sum(info.st_size for _, info in self._walk(toolchain)) > MAX_BYTES:
            for cache in CACHES:
                shutil.rmtree(self.path / toolchain / cache, ignore_errors=True)

    @staticmethod
    def remove_abandoned(base: Path) -> None:
        """Removes what nobody uses, in the memory store ``base``, of jobs that have no other memory there.

        Raises MemoryStoreError when the memory store isn't this user's alone.
        """
        for path in base.glob(f"*{_SUFFIX}"):
            make_private(base)
            if path.with_suffix("").exists():  # not locked then: whoever removes that may be about to look here
                continue
            with suppress(OSError), ExitStack() as undo:
                fd = os.open(path, _OPEN)
                undo.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)

    # -- its files ----------------------------------------------------------------------------------------------

    def toolchain(self) -> str | None:
        """Returns the toolchain that has files here; None without one, and if the directory isn't this user's alone."""
        with suppress(OSError):
            names = sorted(name for name in os.listdir(self.path) if not name.startswith("."))
            for path in (self.path.parent, self.path):
                make_private(path)
            return names[0] if names else None
        return None

    def files(self, toolchain: str) -> dict[str, FileStamp]:
        """Returns the files that may be of use elsewhere, by their paths below the toolchain's directory."""
        return {
            path: FileStamp.of(info)
            for path, info in self._walk(toolchain)
            if info.st_size <= MAX_ENTRY and is_entry_path(path) and not path.endswith(_UNFIT)
        }

    def _walk(self, toolchain: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yields path and state of each regular file."""
        top = self.path / toolchain
        folders = (found for cache in CACHES for found in os.walk(top / cache))
        files = (os.path.join(parent, name) for parent, _, names in folders for name in names)
        for file in islice(files, _MOST_FILES):
            with suppress(FileNotFoundError):
                info = os.lstat(file)
                if stat.S_ISREG(info.st_mode):
                    yield os.path.relpath(file, top), info

    def remove_torn(self, toolchain: str) -> None:
        """Removes what a killed C++ compiler left in pieces, which would be loaded as it is.

        To be called while no rank of the job compiles.
        """
        for path in self.files(toolchain):
            if not _is_whole(self.path / toolchain / path):
                (self.path / toolchain / path).unlink(missing_ok=True)

    def read(self, toolchain: str, path: str, stamp: FileStamp) -> bytes | None:
        """Returns a file's bytes; None if it is no longer as ``stamp`` tells, or is in pieces."""
        file = self.path / toolchain / path
        with suppress(OSError, FormatError), open(open_file(file), "rb") as opened:
            data = opened.read(stamp.size)
            if FileStamp.of(os.fstat(opened.fileno())) == stamp and len(data) == stamp.size and _is_whole(file):
                return data
        return None

    def put(self, toolchain: str, path: str, data: bytes) -> None:
        """Writes a file, which appears as a whole. Raises OSError."""
        file = self.path / toolchain / path
        os.makedirs(file.parent, mode=0o700, exist_ok=True)
        write_atomic(file, data)

    def room(self) -> int:
        """Returns the bytes that files from storage may take: a quarter of what the file system has left."""
        info = os.statvfs(self.path)
        return info.f_bavail * info.f_frsize // 4


def _is_whole(file: Path) -> bool:
    """True unless ``file``, whose name ends like that of a library or an object, is no ELF file or ends too early."""
    if file.suffix not in _BUILT or sys.platform != "linux":
        return True
    with suppress(OSError, struct.error), open(file, "rb") as opened:
        head = opened.read(_ELF_HEADER.size)
        offset, size, count = _ELF_HEADER.unpack(head)
        return head.startswith(_ELF) and 0 < offset + size * count <= os.fstat(opened.fileno()).st_size
    return False
