"""Keeps a job's directory in the memory store: its ownership, its locks, its trainers and its agent.

``rekindle.memory.paths`` lists the files in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rekindle.common.os_errors import describe_error
from rekindle.errors import BusyError, FormatError, MemoryStoreError
from rekindle.format.fields import loads
from rekindle.format.names import Root, job_name
from rekindle.format.receipt import read_file, write_atomic
from rekindle.memory.job import JobInfo
from rekindle.memory.lock import Lock
from rekindle.memory.notes import Notes
from rekindle.memory.paths import RANK_LOCKS, JobPaths, matching, rank_of
from rekindle.memory.snapshots import Snapshots

__all__ = ["JobDir", "directory_lock", "make_private", "memory_base", "remove_directory", "wait_for_lock"]

_LOCK_SECONDS = 10.0
"""Bound on the wait for the lock of a directory. It is held for milliseconds, and freed by the kernel at a death."""
_REMOVALS = 5
"""Tries to remove a directory that files come into meanwhile. A try takes microseconds once the snapshots are gone, and
an agent writes some ten notes a second."""


def memory_base(override: str | os.PathLike[str] | None = None) -> Path:
    """Returns the directory of all of this user's jobs, below ``override``, $REKINDLE_MEMORY, /dev/shm or $TMPDIR.

    The first of these that is set or exists counts.
    """
    chosen = override or os.environ.get("REKINDLE_MEMORY")
    if not chosen:
        chosen = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return Path(os.path.expanduser(chosen)).absolute() / f"rekindle-{os.getuid()}"


def make_private(path: Path) -> None:
    """Makes the directory ``path``, or checks that it is this user's and that nobody else can enter it.

    Anybody may create names in /dev/shm; a directory that somebody else made there first could be read or changed by
    them, so it is refused rather than repaired. Raises MemoryStoreError.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise MemoryStoreError(f"memory store {path}: {describe_error(error)}") from error
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode):
        raise MemoryStoreError(f"memory store {path}: is not a directory")
    if info.st_uid != os.getuid():
        raise MemoryStoreError(f"memory store {path}: belongs to user {info.st_uid}, not to us ({os.getuid()})")
    if info.st_mode & 0o077:
        raise MemoryStoreError(f"memory store {path}: is open to others (mode {info.st_mode & 0o777:o}, want 700)")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise MemoryStoreError(f"memory store {path}: can't be written to")


def remove_directory(path: Path) -> bool:
    """Removes a directory of memory with all that is in it. True when it is gone.

    Tries again when a file has come into it meanwhile: an agent's event loop goes on writing notes while its drain
    thread removes them.
    """
    for _ in range(_REMOVALS):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return True
    return False


@contextmanager
def directory_lock(path: Path) -> Iterator[None]:
    """Holds a lock on a directory. Raises BusyError when another process, or another thread, holds it for 10 s."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        wait_for_lock(fd, path)
        yield
    finally:
        os.close(fd)


def wait_for_lock(fd: int, path: Path) -> None:
    """Takes the lock on the directory that is open as ``fd``, or has it already. Raises BusyError after 10 s."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise BusyError(f"{path}: another process has kept its lock for 10 s") from None
            time.sleep(0.005)


class JobDir:
    """One job's directory on this node. Safe to use from any thread or process.

    ``paths`` names its files, ``notes`` keeps its small notes, ``snapshots`` finds and removes its snapshots.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.paths = JobPaths(path)
        self.notes = Notes(self.paths)
        self.snapshots = Snapshots(self.paths)
        self._written: JobInfo | None = None
        self._beside: dict[Path, Callable[[JobDir], object]] = {}
        """By file that says more of the job than ``job.json``: what writes it again, should somebody remove it."""

    @staticmethod
    def of(root: Root, base: Path) -> JobDir:
        """Returns the directory, in the memory store ``base``, of the job that saves to ``root``."""
        return JobDir(base / job_name(root))

    @property
    def others(self) -> JobPaths:
        """Names of the local states that this node keeps for ranks of other nodes."""
        return JobPaths(self.path / "others")

    @property
    def copies(self) -> JobDir:
        """Directory of the copies of other nodes' snapshots. It has slots and snapshots as a job's directory has."""
        return JobDir(self.path / "others")

    def create(self) -> None:
        """Makes the directory. Raises MemoryStoreError when it can't be made or isn't this user's alone.

        Another process may be removing it meanwhile: see ``made``.
        """
        self._create_base()
        for path in (self.path, self.paths.slots):
            make_private(path)

    def _create_base(self) -> None:
        """Makes the memory store that the directory lies in."""
        try:
            os.makedirs(self.path.parent.parent, exist_ok=True)
        except OSError as error:
            raise MemoryStoreError(f"memory store {self.path.parent.parent}: {describe_error(error)}") from error
        make_private(self.path.parent)

    def check(self) -> None:
        """Raises MemoryStoreError unless the existing directory is this user's alone. Called before it is trusted."""
        if self.path.parent.exists():
            make_private(self.path.parent)

    # -- who is there -------------------------------------------------------------------------------------------

    def trainers(self) -> dict[int, int]:
        """Returns the process id of each rank's live trainer."""
        found = {}
        for path in matching(self.path, RANK_LOCKS):
            pid = Lock.holder(path)
            if pid is not None:
                found[rank_of(path)] = pid
        return dict(sorted(found.items()))

    def agent(self) -> int | None:
        """Returns the process id of the job's live agent."""
        return Lock.holder(self.paths.agent_lock)

    def lock_rank(self, rank: int, timeout: float) -> Lock:
        """Takes the lock that makes this process that rank's trainer.

        Raises BusyError when another process still holds it after ``timeout`` seconds.
        """
        lock = Lock(self.paths.rank_lock(rank))
        deadline = time.monotonic() + timeout
        while True:
            with self.made():
                if lock.acquire():
                    return lock
            if time.monotonic() >= deadline:
                pid = Lock.holder(lock.path)
                raise BusyError(f"rank {rank} of this root is already being trained by process {pid} on this node")
            time.sleep(0.02)

    def retake(self, lock: Lock) -> bool:
        """Takes a rank's ``lock`` again after somebody removed the directory. True if that was necessary.

        Raises MemoryStoreError when it can't be done, or another process has become that rank.
        """
        if lock.held() and self.paths.slots.is_dir():
            return False
        with self.made():
            if not lock.held():
                lock.release()
                if not lock.acquire():
                    pid = Lock.holder(lock.path)
                    raise MemoryStoreError(f"{lock.path}: process {pid} has taken this rank's place: end one of them")
        return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps the removal of a directory and the arrival of a trainer apart, in all jobs of this user.

        Raises BusyError when another process holds the lock for 10 s.
        """
        with directory_lock(self.path.parent):
            yield

    @contextmanager
    def made(self) -> Iterator[None]:
        """Makes the directory, and keeps others from removing it. Raises what ``create`` and ``locked`` do."""
        self._create_base()
        with self.locked():
            self.create()
            yield

    # -- the job ------------------------------------------------------------------------------------------------

    def write_job(self, job: JobInfo) -> None:
        """Describes the job to the agent, in ``job.json``."""
        self._written = job
        write_atomic(self.paths.job, json.dumps(job.to_json()).encode())

    def keep_beside(self, path: Path, write: Callable[[JobDir], object] | None) -> None:
        """Has ``write`` called whenever ``path`` is missing, before ``job.json`` is written again. None ends that.

        An agent that finds ``job.json`` then finds whose claim of the root counts, and the other nodes.
        """
        if write is None:
            self._beside.pop(path, None)
        else:
            self._beside[path] = write

    def _write_beside(self) -> None:
        for path, write in tuple(self._beside.items()):
            if not path.exists():
                write(self)

    def write_job_again(self) -> None:
        """Writes ``job.json`` once more, if this process wrote it and somebody removed it."""
        if self._written is not None and not self.paths.job.exists():
            self._write_beside()
            self.write_job(self._written)

    def mend_job(self) -> None:
        """Writes ``job.json`` once more, if this process wrote it and somebody removed or damaged it.

        Costs a read, some 50 microseconds. Raises OSError where something else is in its place.
        """
        if self._written is None:
            return
        self._write_beside()
        try:
            if self.read_job() is not None:
                return
        except FormatError:
            pass
        self.write_job(self._written)

    def read_job(self) -> JobInfo | None:
        """Returns what a trainer wrote of the job; None if none did yet. Raises FormatError when it is damaged."""
        try:
            return JobInfo.from_json(loads(read_file(self.paths.job)))
        except FileNotFoundError:
            return None
        except FormatError:  # it names the file
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(f"{self.paths.job}: {error}") from error

    # -- its memory ---------------------------------------------------------------------------------------------

    def held_bytes(self) -> int:
        """Returns the bytes of memory that the job's files take."""
        total = 0
        for parent, _, names in os.walk(self.path):
            for name in names:
                try:
                    total += os.lstat(os.path.join(parent, name)).st_blocks * 512
                except OSError:
                    continue
        return total

    def total_bytes(self) -> int:
        """Returns the size of the file system in bytes."""
        info = os.statvfs(self.path)
        return info.f_blocks * info.f_frsize

    def free_bytes(self) -> int:
        """Returns the bytes that the file system has left."""
        info = os.statvfs(self.path)
        return info.f_bavail * info.f_frsize

    def remove(self) -> bool:
        """Removes the whole directory unless a trainer is there. True when it is gone.

        A trainer that arrives meanwhile waits for the lock, and then makes a new directory.
        """
        if not self.path.exists():
            return True
        with self.locked():
            if self.trainers():
                return False
            # First, and receipts before shards: this process may be killed between any two.
            self.copies.snapshots.remove()
            self.snapshots.remove()
            return remove_directory(self.path)
