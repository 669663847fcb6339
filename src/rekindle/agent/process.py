"""Watches processes that the agent did not start: running, stopped or ended, and the cause of the end."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import signal
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Child", "ProcessState", "Process", "OomKills", "children"]

_EXITING = 0x4
"""PF_EXITING: the process is on its way out. That takes 60 ms for each GB to unmap (measured), during which a pidfd
reports nothing yet."""
_GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO of Linux 6.15, with a ``struct pidfd_info`` of 64 bytes."""
_INFO_EXIT = 1 << 3
"""PIDFD_INFO_EXIT: asks for the status of a process that its parent has collected. Returned if that is known."""
_MASK, _STATUS = struct.Struct("=Q52x4x"), struct.Struct("=60xi")


_HOST = Path("/proc/vmstat")
_RECENT = 2.0
"""Seconds between two looks at the counts. What is killed may take a moment to end: the last look but one counts."""


@dataclass(frozen=True)
class ProcessState:
    """A process at one moment."""

    over: bool
    stopped: bool
    status: int | None
    """Status as of ``os.waitpid``, once it is over; None when its parent has collected it, before Linux 6.15."""
    resident: int = 0
    """Bytes of memory that it holds, which the kernel takes back before it reports the end. 0 once it is over."""


class Process:
    """A process that another one started. An open file refers to it, even after its number is given to another one.

    A look takes 4 microseconds.
    """

    def __init__(self, pid: int) -> None:
        """Opens the process. Raises ProcessLookupError or FileNotFoundError when it is gone."""
        self.pid = pid
        self._fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._pidfd = -1
        with suppress(OSError, AttributeError):  # not in every Python, nor in kernels before Linux 5.3
            self._pidfd = os.pidfd_open(pid)

    @property
    def descriptor(self) -> int:
        """A file that can be read from once the process has ended; -1 where there is none."""
        return self._pidfd

    def look(self) -> ProcessState:
        """Returns its state now."""
        try:
            fields = os.pread(self._fd, 1024, 0).rpartition(b")")[2].split()
        except ProcessLookupError:
            fields = []
        if not fields:
            return ProcessState(True, False, self._collected_status())
        over = fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _EXITING)
        status, resident = (int(fields[49]), 0) if over else (None, int(fields[21]) * mmap.PAGESIZE)
        return ProcessState(over, fields[0] in (b"T", b"t"), status, resident)

    def _collected_status(self) -> int | None:
        """Returns the status that the parent has collected; None if the kernel doesn't tell."""
        told = bytearray(_MASK.pack(_INFO_EXIT))
        try:
            fcntl.ioctl(self._pidfd, _GET_INFO, told)
        except (OSError, ValueError):
            return None
        return int(_STATUS.unpack(told)[0]) if _MASK.unpack(told)[0] & _INFO_EXIT else None

    def send(self, number: int) -> None:
        """Sends a signal, if the process is still there."""
        with suppress(ProcessLookupError):
            if not self.look().over:
                os.kill(self.pid, number)

    def close(self) -> None:
        os.close(self._fd)
        if self._pidfd >= 0:
            os.close(self._pidfd)


@dataclass(frozen=True)
class Child:
    """A descendant of a watched process. Its number and its start time tell it from all others."""

    pid: int
    born: int

    def kill(self) -> None:
        """Kills it, if it is still there. Keeps no file open for that: a loader's workers may be hundreds."""
        found = _stat(self.pid)
        if found is not None and found.born == self.born:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class _Stat:
    parent: int
    session: int
    born: int


def _stat(pid: int) -> _Stat | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Stat(int(fields[1]), int(fields[3]), int(fields[19])) if len(fields) > 19 else None


def children(pids: Iterable[int]) -> dict[int, list[Child]]:
    """Maps each of these processes to its descendants. A process with a session of its own is left out with its
    descendants: it was made to outlive its parent, as an agent is.

    Takes 20 microseconds for each process of the node.
    """
    everyone = {int(name): stat for name in os.listdir("/proc") if name.isdigit() and (stat := _stat(int(name)))}
    below: dict[int, list[int]] = {}
    for pid, stat in everyone.items():
        below.setdefault(stat.parent, []).append(pid)
    found: dict[int, list[Child]] = {}
    for top in pids:
        family, ahead = found.setdefault(top, []), list(below.get(top, ()))
        while ahead:
            pid = ahead.pop()
            if top in everyone and everyone[pid].session == everyone[top].session:
                family.append(Child(pid, everyone[pid].born))
                ahead += below.get(pid, ())
    return found


def describe_end(status: int | None, *, oom: bool) -> tuple[str, str]:
    """Returns the cause of an end, as of ``Fault.cause``, and one line about it.

    ``oom`` is True if the kernel has just been killing processes of its group because memory ran out.
    """
    if status is None:
        return "exit", "has ended with an exit code that is not known"
    if not os.WIFSIGNALED(status):
        return "exit", f"ended with exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and oom:
        return "oom", "was killed by the kernel, as memory ran out"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return "signal", f"was killed by {name}"


class OomKills:
    """Counts the processes that the kernel killed because memory ran out, in the control group of one process.

    Where a group has no such count, all of the host are counted.
    """

    def __init__(self, pid: int, now: float) -> None:
        self._pid, self._files, self._next = pid, [_HOST], now
        self._before: dict[Path, int] = {}
        self._newer: dict[Path, int] = {}
        self.look(now)
        self._before = self._newer

    def look(self, now: float) -> None:
        """Looks at the counts now and then, while the process lives: one that ends has left its group."""
        if now >= self._next:
            self._next = now + _RECENT
            self._files = _counters(self._pid) or self._files
            self._before, self._newer = self._newer, self._counts()

    def any_new(self) -> bool:
        """Returns True if the kernel has killed one since the look before the last, or the first."""
        return any(count > self._before.get(path, 0) for path, count in self._counts().items())

    def _counts(self) -> dict[Path, int]:
        return {path: count for path in self._files if (count := _count(path)) is not None}


def _counters(pid: int) -> list[Path]:
    """Returns the files that count for the group of a process; none if it can't be told."""
    found = []
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, controllers, group = line.split(":", 2)
            if number == "0":
                found.append(Path(f"/sys/fs/cgroup{group}/memory.events"))
            elif "memory" in controllers.split(",") and group != "/":  # where the kernel shows those that end
                found.append(Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control"))
    return [path for path in found if _count(path) is not None]


def _count(path: Path) -> int | None:
    with suppress(OSError):
        match = re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE)
        return int(match[1]) if match else None
    return None
