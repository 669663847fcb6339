"""A job's directory in the memory store: who may use it, who is there, how much room it has.

::

    /dev/shm/rekindle-<uid>/             0700, ours
      <job>/                             derived from the root, so a restarted job finds it
        job.json                         what the agent needs to know
        durable  root.json               the newest step on storage; the file system that it was seen on
        anew                             the start that began anew, since all on storage was deleted
        agent.lock  agent.sock  agent.log  agent.json
        rank-00000.lock                  held by that rank's trainer while it lives
        rank-00000.status                what it is doing
        rank-00000.plan .small-0 -1 -u   what only it has of the newest steps
        rank-00000.stacks .flight        where its threads stood, and what torch recorded, at a hang
        watch.sock  fault.json           where ranks and agent tell each other of faults; the newest fault
        slots/                           files without a snapshot in them
        durable  drained                 the newest step on storage; when the newest drain began, and its seconds
        step-0000000012/                 same files as on storage, without a manifest
"""

from __future__ import annotations

import fcntl
import fnmatch
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rekindle.common.os_errors import describe_error
from rekindle.errors import BusyError, FormatError, MemoryStoreError
from rekindle.format.fields import loads
from rekindle.format.lineage import CheckpointKey, Incarnation, ShardId
from rekindle.format.names import STEP_DIR, Root, job_name, shard_pattern
from rekindle.format.receipt import read, read_stamp, write_atomic
from rekindle.memory.job import Job
from rekindle.memory.lock import Lock

__all__ = ["Entry", "Job", "JobDir", "Known", "Trace", "matching", "memory_base"]


_NO_GENERATION = 1 << 62
"""Above all that starts can count up to."""


def memory_base(override: str | os.PathLike[str] | None = None) -> Path:
    """Where this user's jobs keep their memory: ``override``, else $REKINDLE_MEMORY, else tmpfs, else a folder."""
    chosen = override or os.environ.get("REKINDLE_MEMORY")
    if not chosen:
        chosen = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return Path(chosen).absolute() / f"rekindle-{os.getuid()}"


def matching(directory: Path, pattern: str) -> list[Path]:
    """Files in a directory that may vanish at any moment, which pathlib's glob() takes for an error."""
    try:
        return [directory / name for name in os.listdir(directory) if fnmatch.fnmatchcase(name, pattern)]
    except OSError:
        return []


def _private(path: Path) -> None:
    """Make ``path``, or make sure that it is a directory of ours that nobody else can enter.

    Anybody may create names in /dev/shm; a directory that somebody else made there first could be read or changed by
    them, so it is refused rather than mended.
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


_RANK = "rank-" + 5 * "[0-9]"

Entry = list[int]
Trace = list[Entry | None]
"""Directories on the way to a root, see ``rekindle.storage.identity``."""

Known = tuple[tuple[int, int], ShardId]
"""Inode and time of a receipt, and its stamp. Receipts are replaced, never written over."""


def _stamp(entry: os.DirEntry[str], known: dict[str, Known] | None) -> ShardId:
    if known is None:
        return read_stamp(Path(entry.path))
    info = entry.stat()
    mark = info.st_ino, info.st_mtime_ns
    found = known.get(entry.path)
    if found is None or found[0] != mark:
        found = known[entry.path] = mark, read_stamp(Path(entry.path))
    return found[1]


def _four(value: Any) -> Entry:
    if type(value) is not list or len(value) != 4 or {type(part) for part in value} != {int}:
        raise ValueError("an entry should be four numbers")
    return value


def _superfluous(stamp: ShardId, step: int, incarnation: Incarnation) -> bool:
    """Whether that durable checkpoint is as good as the snapshot.

    What an older start has saved is no newer than what the later one continued from, or was retired by it.
    """
    older = stamp.incarnation.generation < incarnation.generation
    return older or (stamp.incarnation == incarnation and stamp.step <= step)


class JobDir:
    """One job's directory on this node. Safe to use from any thread or process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.slots = path / "slots"
        self._said: Job | None = None

    @staticmethod
    def of(root: Root, base: Path) -> JobDir:
        return JobDir(base / job_name(root))

    def create(self) -> None:
        """Make the directory. Raises MemoryStoreError when it can't be had or isn't ours alone."""
        try:
            os.makedirs(self.path.parent.parent, exist_ok=True)
        except OSError as error:
            raise MemoryStoreError(f"memory store {self.path.parent.parent}: {describe_error(error)}") from error
        for path in (self.path.parent, self.path, self.slots):
            _private(path)

    def check(self) -> None:
        """Raise MemoryStoreError unless the existing directory is ours alone: before anything in it is trusted."""
        if self.path.parent.exists():
            _private(self.path.parent)

    # -- who is there -------------------------------------------------------------------------------------------

    def rank_lock(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.lock"

    def status_page(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.status"

    def small(self, rank: int, which: str) -> Path:
        return self.path / f"rank-{rank:05d}.small-{which}"

    def small_plan(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.plan"

    def stacks(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.stacks"

    def flight(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.flight"

    @property
    def fault(self) -> Path:
        return self.path / "fault.json"

    @property
    def watch_socket(self) -> Path:
        return self.path / "watch.sock"

    @property
    def agent_lock(self) -> Path:
        return self.path / "agent.lock"

    @property
    def agent_status(self) -> Path:
        return self.path / "agent.json"

    @property
    def socket(self) -> Path:
        return self.path / "agent.sock"

    @property
    def log(self) -> Path:
        return self.path / "agent.log"

    def trainers(self) -> dict[int, int]:
        """Process id of each rank's live trainer."""
        found = {}
        for path in matching(self.path, f"{_RANK}.lock"):
            pid = Lock.holder(path)
            if pid is not None:
                found[int(path.name[5:10])] = pid
        return dict(sorted(found.items()))

    def agent(self) -> int | None:
        """Process id of the job's live agent."""
        return Lock.holder(self.agent_lock)

    def lock_rank(self, rank: int, timeout: float) -> Lock:
        """Become that rank's trainer. Raises BusyError when another process is it and stays so."""
        lock = Lock(self.rank_lock(rank))
        deadline = time.monotonic() + timeout
        while True:
            self.create()
            with self._guard():
                if self.slots.is_dir() and lock.acquire():
                    return lock
            if time.monotonic() >= deadline:
                pid = Lock.holder(lock.path)
                raise BusyError(f"rank {rank} of this root is already being trained by process {pid} on this node")
            time.sleep(0.02)

    def retake(self, lock: Lock) -> bool:
        """Come back as the rank that ``lock`` is of, should somebody have removed the directory. True if so.

        Raises MemoryStoreError when that can't be, or another process has become that rank.
        """
        if lock.held() and self.slots.is_dir():
            return False
        self.create()
        with self._guard():
            if not lock.held():
                lock.release()
                if not lock.acquire():
                    pid = Lock.holder(lock.path)
                    raise MemoryStoreError(f"{lock.path}: process {pid} has taken this rank's place: end one of them")
        return True

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Keep a job's removal and a trainer's arrival apart: one of them at a time, in all jobs of this user."""
        fd = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
        deadline = time.monotonic() + 10.0  # it is held for milliseconds, and freed by the kernel if its holder dies
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise BusyError(f"{self.path.parent}: another process has kept its lock for 10 s") from None
                    time.sleep(0.005)
            yield
        finally:
            os.close(fd)

    # -- the job ------------------------------------------------------------------------------------------------

    def write_job(self, job: Job) -> None:
        self._said = job
        write_atomic(self.path / "job.json", json.dumps(job.to_json()).encode())

    def write_job_again(self) -> None:
        """Should somebody have removed what this process has written of the job."""
        if self._said is not None and not (self.path / "job.json").exists():
            self.write_job(self._said)

    def read_job(self) -> Job | None:
        """What the trainers left for the agent; None before they did."""
        try:
            return Job.from_json(loads(read(self.path / "job.json")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(f"{self.path / 'job.json'}: {error}") from error

    def write_durable(self, step: int, trace: Trace | None = None) -> None:
        """Note the newest step that is on storage: for writers that wonder which snapshot they may give up, and for the
        next start, should storage be away then. ``trace`` is of the root that showed it."""
        self._write_trace(trace)
        self._note("durable", b"%020d" % step)

    def _note(self, name: str, note: bytes) -> None:
        """``note`` has the same length each time."""
        try:
            write_atomic(self.path / name, note)
        except OSError:  # full memory has no page for another file, and needs none to write over this one
            with open(self.path / name, "r+b", buffering=0) as file:
                file.write(note)

    def write_drained(self, began: float, seconds: float) -> None:
        """Note when the newest drain began, by the monotonic clock of this machine, and the seconds that it took."""
        self._note("drained", b"%020.3f %020.3f" % (began, seconds))

    def drained(self) -> tuple[float, float] | None:
        """That note; None where there is none, or it makes no sense."""
        try:
            began, seconds = map(float, read(self.path / "drained").split())
        except (OSError, ValueError):
            return None
        return began, seconds

    def _write_trace(self, trace: Trace | None) -> None:
        """An outdated one must not stay: it could make a missing mount look like a root that was deleted."""
        path = self.path / "root.json"
        if trace is not None and trace == self.trace():
            return
        try:
            if trace is not None:
                write_atomic(path, json.dumps(trace).encode())
                return
        except OSError:  # full memory: a root that was deleted then looks like a missing mount
            pass
        path.unlink(missing_ok=True)

    def trace(self) -> Trace | None:
        """That of the root in which the newest durable step was seen; None where nobody could note it."""
        try:
            found = loads(read(self.path / "root.json"))
            return [None if entry is None else _four(entry) for entry in found]
        except (OSError, ValueError, TypeError):
            return None

    def forget_durable(self) -> None:
        """A new start may have gone back to before that step."""
        (self.path / "durable").unlink(missing_ok=True)
        (self.path / "root.json").unlink(missing_ok=True)

    def write_anew(self, since: int, until: int = _NO_GENERATION) -> None:
        """Note that the job began anew with generation ``since``, only because all on storage was deleted.

        From generation ``until`` on, it goes on from what somebody has chosen, should the deleted run be back."""
        self._note("anew", b"%020d %020d" % (since, until))

    def anew(self) -> tuple[int, int] | None:
        """That note; None where there is none."""
        try:
            since, until = map(int, read(self.path / "anew").split())
        except (OSError, ValueError):
            return None
        return since, until

    def forget_anew(self) -> None:
        """What was chosen is on storage."""
        (self.path / "anew").unlink(missing_ok=True)

    def drain_error(self) -> str:
        """What the drain suffers from, in its own words; empty when it says nothing."""
        try:
            status = loads(read(self.agent_status))
            return str(status["error"] or status.get("waits") or "")
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def durable(self) -> int | None:
        try:
            return int(read(self.path / "durable"))
        except (OSError, ValueError):
            return None

    # -- snapshots ----------------------------------------------------------------------------------------------

    def stamps(self, known: dict[str, Known] | None = None) -> Iterator[tuple[ShardId, Path]]:
        """Every committed snapshot, as (stamp, receipt's path). What vanishes or is damaged meanwhile is left out.

        ``known`` is the caller's to keep: with it, receipts that have not changed since are not read again, which takes
        2 microseconds each instead of 30.
        """
        for directory in self.step_dirs():
            try:
                entries = list(os.scandir(directory))
            except OSError:
                continue
            for entry in entries:
                match = shard_pattern(entry.name)
                if match and match[2] == "json":
                    try:
                        stamp = _stamp(entry, known)
                    except (OSError, FormatError):
                        continue
                    if match[:2] == (stamp.rank, stamp.world):
                        yield stamp, directory / entry.name

    def step_dirs(self) -> list[Path]:
        try:
            names = [name for name in os.listdir(self.path) if STEP_DIR.match(name)]
            return [path for path in (self.path / name for name in names) if not path.is_symlink()]
        except OSError:
            return []

    def rank_files(self, rank: int) -> list[Path]:
        """All of a rank's shards and free files."""
        found = matching(self.slots, f"rank-{rank:05d}-*.slot")
        for directory in self.step_dirs():
            found += matching(directory, f"shard-{rank:05d}-of-*.safetensors")
        return found

    def held_bytes(self) -> int:
        """Bytes of memory that the job's files hold."""
        total = 0
        for parent, _, names in os.walk(self.path):
            for name in names:
                try:
                    total += os.lstat(os.path.join(parent, name)).st_blocks * 512
                except OSError:
                    continue
        return total

    def all_bytes(self) -> int:
        """Bytes that the file system has, taken or not."""
        info = os.statvfs(self.path)
        return info.f_blocks * info.f_frsize

    def free_bytes(self) -> int:
        """Bytes of memory that the file system has left."""
        info = os.statvfs(self.path)
        return info.f_bavail * info.f_frsize

    def remove_snapshots(self, rank: int | None = None, spared: Collection[Path] = ()) -> None:
        """Give back the memory of one rank's, or all, snapshots. Receipts go first, so nothing half-gone shows.

        Those whose receipts are ``spared`` stay, and with them what a rank has beside its snapshots.
        """
        pattern = "shard-*" if rank is None else f"shard-{rank:05d}-of-*"
        for name in (f"{pattern}.json", f".{pattern}.json.tmp", f"{pattern}.safetensors"):
            for directory in self.step_dirs():
                for path in matching(directory, name):
                    if path.with_suffix(".json") not in spared:
                        path.unlink(missing_ok=True)
        for path in matching(self.slots, "*.slot" if rank is None else f"rank-{rank:05d}-*.slot"):
            path.unlink(missing_ok=True)
        for kind in () if spared else ("plan", "small-?"):
            for path in matching(self.path, f"rank-*.{kind}" if rank is None else f"rank-{rank:05d}.{kind}"):
                path.unlink(missing_ok=True)
        for directory in self.step_dirs():
            try:
                directory.rmdir()
            except OSError:
                continue

    def give_back(self, rank: int, durable: CheckpointKey) -> bool:
        """Remove a rank's snapshots, and those of ranks that have gone, if what is ``durable`` makes them superfluous.

        False if it doesn't: a rank that has gone back to an older step may leave a newer one that only memory has.
        """
        if not all(_superfluous(stamp, *durable) for stamp, _ in self.stamps() if stamp.rank == rank):
            return False
        with suppress(BusyError, FormatError, FileNotFoundError):  # somebody may have removed all of it
            self.remove_strangers(durable)
        self.remove_snapshots(rank)
        return True

    def remove_strangers(self, durable: CheckpointKey) -> None:
        """Give back the memory of ranks that this node no longer has: the job came back with fewer.

        Their snapshots go when what is ``durable`` makes them superfluous. A newer one may be the newest there is, and
        nobody may have drained it yet: it stays until the ranks that are here have a durable checkpoint of their own.
        """
        with self._guard():  # no rank arrives meanwhile
            info, trainers = self.read_job(), self.trainers()
            if info is None or not trainers:
                return
            stamps = list(self.stamps())
            found = {int(path.name[5:10]) for path in matching(self.slots, f"{_RANK}-*.slot")}
            found |= {stamp.rank for stamp, _ in stamps}
            needed = {path for stamp, path in stamps if not _superfluous(stamp, *durable)}
            for rank in found.difference(info.ranks, trainers):
                self.remove_snapshots(rank, {path for stamp, path in stamps if stamp.rank == rank} & needed)

    def remove(self) -> bool:
        """Remove the whole directory unless a trainer is there. True when it is gone.

        A trainer that comes meanwhile waits for the guard, and then makes a new directory.
        """
        if not self.path.exists():
            return True
        with self._guard():
            if self.trainers():
                return False
            self.remove_snapshots()  # in an order that shows no half-gone snapshot, should this process be killed
            shutil.rmtree(self.path, ignore_errors=True)
            return not self.path.exists()
