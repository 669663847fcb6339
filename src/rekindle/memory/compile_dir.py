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
import re
import secrets
import shutil
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rekindle.common.os_errors import describe_error
from rekindle.errors import MemoryStoreError
from rekindle.format.compile_index import CACHES, MAX_BYTES, MAX_ENTRY, is_entry_path
from rekindle.format.names import Root, job_name
from rekindle.memory.job_dir import JobDir, make_private

__all__ = ["CompileDir", "FileStamp"]

_SUFFIX = ".compile"
"""Ending of the directory's name, after the job's."""

_MOST_FILES = 50_000
"""Most files that a look at a directory finds. A large model has some thousands."""
_UNFIT = re.compile(r"\.(lock|tmp|gch|pch)\Z")
"""Matches names of what is of no use elsewhere: locks, unfinished files, headers compiled for one path and time."""
_BUILT = (".so", ".o")
"""Endings of what a C++ compiler writes, which leaves it in pieces when it is killed."""
_ELF = b"\x7fELF\x02"
_ELF_HEADER = struct.Struct("<40xQ10xHH2x")
"""Of a 64-bit ELF file: offset of the section headers, the size of one and their number. Linkers write them last."""


@dataclass(frozen=True)
class FileStamp:
    """One state of a file: a file that was written to has another one."""

    size: int
    inode: int
    changed: int
    """Time of the last change in nanoseconds."""


class CompileDir:
    """The compile caches of one job on this node. Safe to use from any thread or process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def of(root: Root, base: Path) -> CompileDir:
        """Returns the directory, in the memory store ``base``, of the job that saves to ``root``."""
        return CompileDir(base / f"{job_name(root)}{_SUFFIX}")

    @staticmethod
    def beside(job: JobDir) -> CompileDir:
        """Returns the directory of a job that is known by its own."""
        return CompileDir(job.path.with_name(f"{job.path.name}{_SUFFIX}"))

    @staticmethod
    def abandoned(base: Path) -> list[CompileDir]:
        """Lists the directories, in the memory store ``base``, of jobs that have no other memory there."""
        found = sorted(base.glob(f"*{_SUFFIX}"))
        return [CompileDir(path) for path in found if not path.with_suffix("").exists()]

    # -- its users ----------------------------------------------------------------------------------------------

    def use(self, toolchain: str) -> int:
        """Makes the directory and keeps it from removal. Returns a descriptor: closing it lets go.

        The first user tidies it: it removes what a killed compiler left in pieces, or
        all files if there are too many. Raises MemoryStoreError when it can't be made or isn't this user's alone.
        """
        try:
            os.makedirs(self.path.parent.parent, exist_ok=True)
            while True:
                for path in (self.path.parent, self.path, self.path / toolchain):
                    make_private(path)
                fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                with suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._tidy(toolchain)
                fcntl.flock(fd, fcntl.LOCK_SH)
                with suppress(FileNotFoundError):
                    if (self.path / toolchain).is_dir() and os.stat(self.path).st_ino == os.fstat(fd).st_ino:
                        return fd
                os.close(fd)  # it was removed meanwhile
        except MemoryStoreError:
            raise
        except OSError as error:
            raise MemoryStoreError(f"memory store {self.path}: {describe_error(error)}") from error

    def _tidy(self, toolchain: str) -> None:
        self.remove_torn()
        if self._size(toolchain) > MAX_BYTES:
            for cache in CACHES:
                shutil.rmtree(self.path / toolchain / cache, ignore_errors=True)

    def remove_unless_used(self) -> bool:
        """Removes the directory if nobody uses it. True when it is gone."""
        with suppress(OSError):
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self.path, ignore_errors=True)
            finally:
                os.close(fd)
        return not self.path.exists()

    # -- its files ----------------------------------------------------------------------------------------------

    def toolchains(self) -> list[str]:
        """Lists the toolchains that have files here; none unless the directory is this user's alone."""
        with suppress(OSError, MemoryStoreError):
            if self.path.exists():
                make_private(self.path.parent)
                make_private(self.path)
                return sorted(name for name in os.listdir(self.path) if not name.startswith("."))
        return []

    def files(self, toolchain: str) -> dict[str, FileStamp]:
        """Returns the files that may be of use elsewhere, by their paths below the toolchain's directory."""
        found = {}
        for path, info in self._walk(toolchain):
            name = path.rpartition("/")[2]
            if info.st_size <= MAX_ENTRY and is_entry_path(path) and "/locks/" not in path and not _UNFIT.search(name):
                found[path] = FileStamp(info.st_size, info.st_ino, info.st_mtime_ns)
        return found

    def _size(self, toolchain: str) -> int:
        return sum(info.st_size for _, info in self._walk(toolchain))

    def _walk(self, toolchain: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yields path and state of each regular file of this user's."""
        top, count = self.path / toolchain, 0
        for cache in CACHES:
            for parent, _, names in os.walk(top / cache):
                for name in names:
                    path = os.path.join(parent, name)
                    with suppress(OSError):
                        info = os.lstat(path)
                        if stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid():
                            yield os.path.relpath(path, top), info
                            count += 1
                    if count == _MOST_FILES:
                        return

    def is_compiling(self, toolchain: str) -> bool:
        """True while a C++ compiler that Inductor has started may be writing: its lock is held."""
        locks = self.path / toolchain / "inductor" / "locks"
        with suppress(FileNotFoundError):
            return any(_is_locked(locks / name) for name in os.listdir(locks))
        return False

    def remove_torn(self) -> int:
        """Removes what a killed C++ compiler left in pieces, which would be loaded as it is. Returns the number.

        To be called while no rank of the job compiles.
        """
        count = 0
        for toolchain in self.toolchains():
            for path in self.files(toolchain):
                if not is_whole(path, self.path / toolchain / path):
                    with suppress(OSError):
                        os.unlink(self.path / toolchain / path)
                        count += 1
        return count

    def read(self, toolchain: str, path: str, stamp: FileStamp) -> bytes | None:
        """Returns a file's bytes; None if it is no longer as ``stamp`` tells, or is in pieces."""
        file = self.path / toolchain / path
        with suppress(OSError):
            with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
                data = opened.read(stamp.size + 1)
                info = os.fstat(opened.fileno())
            now = FileStamp(info.st_size, info.st_ino, info.st_mtime_ns)
            if now == stamp and len(data) == stamp.size and is_whole(path, file):
                return data
        return None

    def put(self, toolchain: str, path: str, data: bytes) -> None:
        """Writes a file that isn't there yet: it appears as a whole. Raises OSError."""
        file = self.path / toolchain / path
        os.makedirs(file.parent, mode=0o700, exist_ok=True)
        with _new_file(file) as temporary:
            temporary.write_bytes(data)

    def room(self) -> int:
        """Returns the bytes that files from storage may take: a quarter of what the file system has left."""
        info = os.statvfs(self.path)
        return info.f_bavail * info.f_frsize // 4


def is_whole(path: str, file: Path) -> bool:
    """True unless ``file``, whose name ends like that of a library or an object, is no ELF file or ends too early."""
    if not path.endswith(_BUILT):
        return True
    with suppress(OSError, struct.error), open(file, "rb") as opened:
        head = opened.read(64)
        offset, size, count = _ELF_HEADER.unpack(head)
        return head.startswith(_ELF) and 0 < offset + size * count <= os.fstat(opened.fileno()).st_size
    return False


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Gives a temporary path, whose file gets its name when all went well."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _is_locked(path: Path) -> bool:
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False
