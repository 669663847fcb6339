"""Keeps the directory of a user's files in the memory store: its clients, its lock, its size.

::

    /dev/shm/rekindle-<uid>/files/
      job.json  agent.lock  agent.sock  agent.log  agent.json   as in a job's directory
      client-<pid>-<random>.lock        held by each process that saves files, while it lives
      writing-<key>.lock                held by the process that writes that file to its path
      slots/client-<pid>-<random>-<n>.slot   free files of that process, and those that it writes
      kept/                             files that are in memory, see rekindle.memory.kept
      kept/id                           a random name: another one means that they were removed meanwhile
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rekindle.errors import BusyError
from rekindle.memory.job_dir import JobDir, make_private, remove_directory, wait_for_lock
from rekindle.memory.kept import Kept, KeptFile
from rekindle.memory.lock import Lock
from rekindle.memory.paths import matching

__all__ = ["FILES", "FilesDir"]

FILES = "files"
"""Name of the directory. No job has it: theirs end in a hash."""
_CLIENT_LOCKS, _WRITING_LOCKS = "client-*.lock", "writing-*.lock"
_SLOT = re.compile(r"(client-\d+-[0-9a-f]+)-\d+\.slot\Z", re.ASCII)
_JOIN_SECONDS = 10.0
"""Bound on the wait for a directory that somebody removes at the same moment."""


class FilesDir(JobDir):
    """The files of a user on this node. Safe to use from any thread or process.

    A job's directory with processes that save instead of ranks, and with ``kept`` files instead of snapshots.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.kept_path = path / "kept"
        self.kept = Kept(self.kept_path)
        self._arranging: dict[int, int] = {}
        """Open files on which threads hold the lock of ``arranging``, or are about to."""

    @staticmethod
    def below(base: Path) -> FilesDir:
        """Returns the directory of files in the memory store ``base``."""
        return FilesDir(base / FILES)

    def create(self) -> None:
        super().create()
        make_private(self.kept_path)
        if not self._id.exists():
            new = self.kept_path / f".id.{secrets.token_hex(4)}"
            try:
                new.write_text(secrets.token_hex(8), "ascii")
                os.link(new, self._id)  # whole, and never over that of another process
            except FileExistsError:
                pass
            finally:
                new.unlink(missing_ok=True)

    @property
    def _id(self) -> Path:
        return self.kept_path / "id"

    def id(self) -> str:
        """Returns the random name of the files in this directory; empty where there is none."""
        try:
            return self._id.read_text("ascii")
        except (OSError, ValueError):
            return ""

    # -- who is there -------------------------------------------------------------------------------------------

    def trainers(self) -> dict[int, int]:
        """Returns the process id of each live process that saves files."""
        pids = {pid for path in matching(self.path, _CLIENT_LOCKS) if (pid := Lock.holder(path)) is not None}
        return {pid: pid for pid in sorted(pids)}

    def join(self) -> Lock:
        """Takes a lock that shows this process as one that saves files. Raises BusyError, MemoryStoreError, OSError."""
        lock = Lock(self.path / f"client-{os.getpid()}-{secrets.token_hex(4)}.lock")
        deadline = time.monotonic() + _JOIN_SECONDS
        while time.monotonic() < deadline:
            with self.made():
                if lock.acquire():
                    return lock
        raise BusyError(f"memory store {self.path}: somebody keeps removing it")

    def remove(self, *, discard: bool = False) -> bool:
        """Removes the whole directory, unless a process saves or, without ``discard``, storage lacks a file.

        True when it is gone. A process that joins meanwhile waits, and then makes a new directory.
        """
        if not self.path.exists():
            return True
        with self.locked():
            if self.trainers() or (not discard and self.kept.newest(stored=False)):
                return False
            for file in self.kept.files():  # receipts first, should this process be killed meanwhile
                self.kept.remove(file)
            return remove_directory(self.path)

    def let_go(self, target: str = "") -> None:
        """Lets held files go to their paths, or only that of ``target``. Those whose path lies in here stay."""
        for file in self.kept.held():
            with suppress(OSError, ValueError):
                belongs = file.read_receipt().target
                if target in ("", belongs) and not belongs.startswith(f"{self.path}/"):
                    file.held.unlink(missing_ok=True)

    def give_up(self, files: Iterable[KeptFile]) -> None:
        """Gives up files, whatever storage has of them, and none that were saved since. Raises OSError, BusyError."""
        if self.kept_path.is_dir():
            with self.arranging():
                self.kept.remove_superseded()
                for file in files:
                    self.kept.remove(file)

    def retarget(self, file: KeptFile, target: str) -> None:
        """Lets a file belong at another path: see ``Kept.retarget``. One that was given up since stays so.

        Raises OSError, BusyError, FormatError.
        """
        with self.arranging():
            if file.receipt.exists():
                self.kept.retarget(file, target)

    def set_aside(self, file: KeptFile) -> None:
        """Keeps a file from being superseded: see ``Kept.set_aside``. Raises OSError, BusyError."""
        with self.arranging():
            self.kept.set_aside(file)

    def new_slot(self, client: Lock, number: int) -> Path:
        """Names a slot of a client."""
        return self.paths.slots / f"{client.path.stem}-{number}.slot"

    # -- order and size -----------------------------------------------------------------------------------------

    @contextmanager
    def arranging(self) -> Iterator[None]:
        """Holds the lock under which files are committed and given up. Raises BusyError, FileNotFoundError.

        A signal handler would wait for the thread that it interrupts: it shares that one's lock.
        """
        thread = threading.get_ident()
        if (shared := self._arranging.get(thread)) is not None:
            wait_for_lock(shared, self.kept_path)  # the thread may have been about to take it
            yield
            return
        self._arranging[thread] = fd = os.open(self.kept_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            wait_for_lock(fd, self.kept_path)
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # first: a handler that comes now finds it free, or takes it again
            self._arranging.pop(thread, None)
            os.close(fd)

    def writing(self, key: str) -> Lock:
        """Returns the lock of whoever writes the file of a key to its path: the agent, or a process without memory."""
        return Lock(self.path / f"writing-{key}.lock")

    def spoken_for(self) -> tuple[int, int]:
        """Returns the bytes of all files and slots, and how many of them are yet to be taken from the file system."""
        total = missing = 0
        for directory in (self.kept_path, self.paths.slots):
            with suppress(OSError):
                for entry in os.scandir(directory):
                    with suppress(OSError):
                        info = entry.stat(follow_symlinks=False)
                        total += _taken(info)
                        missing += max(0, info.st_size - info.st_blocks * 512)
        return total, missing

    def bytes_of(self, file: KeptFile) -> int:
        """Returns the bytes that a file takes of those that are spoken for, with its notes."""
        total = 0
        for path in (file.data, file.receipt, file.stored):
            with suppress(OSError):
                total += _taken(path.stat())
        return total

    def sweep(self) -> None:
        """Removes what killed processes left, and files that newer ones have superseded."""
        with self.locked():  # nobody joins meanwhile
            for path in matching(self.path, _CLIENT_LOCKS) + matching(self.path, _WRITING_LOCKS):
                lock = Lock(path)
                if lock.acquire():  # whoever waits for it finds the file gone, and makes a new one
                    path.unlink(missing_ok=True)
                    lock.release()
        with self.arranging():
            for path in matching(self.paths.slots, "*.slot"):
                match = _SLOT.match(path.name)
                if match is None or not (self.path / f"{match[1]}.lock").exists():
                    path.unlink(missing_ok=True)
            self.kept.sweep()


def _taken(info: os.stat_result) -> int:
    return max(info.st_size, info.st_blocks * 512)
