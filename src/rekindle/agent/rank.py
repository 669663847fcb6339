"""Holds a guarded rank as its node's agent knows it: its process, its status page, its connection."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rekindle.agent.beat import Page
from rekindle.agent.process import Child, OomKills, Process, ProcessState
from rekindle.errors import FormatError
from rekindle.format.fields import check_integer, check_seconds
from rekindle.format.names import MAX_RANKS
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import TRAINING, Status, StatusReader

__all__ = ["WatchedRank", "likeliest_first"]


@dataclass(eq=False)
class WatchedRank:
    """One registered rank. Times are by this node's monotonic clock; 0 stands for never."""

    rank: int
    since: float
    """Time at which ``guard()`` began. Earlier faults don't concern this rank."""
    joined: float
    """Time at which the ranks of its start had met."""
    floor: float | None
    """Seconds without progress that are never a hang; None without a watchdog."""
    deadline: float
    """Seconds that it may take to secure its state once it is told of a fault."""
    stacks: int
    """Signal at which faulthandler writes the stacks of its threads, when the rank itself is stuck; 0 for none."""
    process: Process
    page: StatusReader
    seen: Status
    """The last sound content of its status page."""
    writer: asyncio.StreamWriter
    oom_kills: OomKills
    told_at: float = 0.0
    """Time at which it was first told of a fault: what it may take to secure its state counts from then."""
    idle_since: float = 0.0
    """Time at which it had nothing more to do after a fault."""
    stacks_asked_at: float = 0.0
    """Time at which it was asked for its stacks."""
    debugger_answered: bool = False
    """True once it has said if a debugger holds it."""
    descendants: list[Child] = field(default_factory=list)
    """Processes that it started, which are ended with it at a hang."""
    over: bool = False
    ended_at: float = 0.0
    """Time at which it was first seen to have ended."""
    heard_out: bool = False
    """True once its connection is closed and all that it sent has been read."""
    _unwatch: Callable[[], object] = lambda: None

    @staticmethod
    def register(job: JobDir, hello: dict[str, Any], writer: asyncio.StreamWriter) -> WatchedRank:
        """Takes up the rank that says ``hello``. Raises OSError, ValueError, KeyError or TypeError for nonsense."""
        index = check_integer(hello["rank"], 0, MAX_RANKS - 1)
        since, joined = check_seconds(hello["since"]), check_seconds(hello["joined"])
        deadline = check_seconds(hello["deadline"])
        stacks = check_integer(hello["stacks"], 0, signal.NSIG - 1)
        page = StatusReader(job.paths.status_page(index))
        pid, floor = check_integer(hello["pid"], 1), hello["watchdog"]
        if _peer(writer) not in (None, pid):  # the agent may have to kill this process: no other may name it
            raise ValueError(f"it registers as process {pid}, but is process {_peer(writer)}")
        floor = None if floor is None else check_seconds(floor)
        seen, ooms = page.read(), OomKills(pid, time.monotonic())
        process = Process(pid)  # last, as it opens a file that an error above would leak
        return WatchedRank(index, since, joined, floor, deadline, stacks, process, page, seen, writer, ooms)

    def watch_end(self, seen: Callable[[], object]) -> None:
        """Has ``seen`` called in the event loop, once, when the kernel reports the end: 60 ms late for each GB."""
        loop, descriptor = asyncio.get_running_loop(), self.process.descriptor
        if descriptor < 0:
            return
        self._unwatch = partial(loop.remove_reader, descriptor)

        def ended() -> None:
            self._unwatch()
            seen()

        loop.add_reader(descriptor, ended)

    def status(self) -> Status:
        """Reads its status page. A damaged one counts as a pause, until the rank has written it again."""
        try:
            self.seen = self.page.read()
        except FormatError:
            return replace(self.seen, paused=1)
        return self.seen

    def shown(self) -> Page:
        """Returns what other nodes are told of it, too."""
        return Page(self.status(), self.floor, self.process.look().stopped)

    def send(self, message: dict[str, Any]) -> None:
        """Sends it a message, if it is still connected."""
        with suppress(OSError, RuntimeError):
            self.writer.write(json.dumps(message).encode() + b"\n")

    def tell(self, fault: Fault) -> None:
        """Tells it of a fault that ends it."""
        self.told_at = self.told_at or time.monotonic()
        self.send({"fault": fault.to_json()})

    def close(self) -> None:
        """Gives up what is open of it, and ends what it has started and was found at a hang."""
        if not self.over:
            self.over = True
            self._unwatch()
            self.process.close()
            self.writer.close()
            for child in self.descendants:
                child.kill()


def _peer(writer: asyncio.StreamWriter) -> int | None:
    """Returns the process id at the other end of a connection, as the kernel knows it; None where it doesn't tell."""
    line, option = writer.get_extra_info("socket"), getattr(socket, "SO_PEERCRED", None)
    return None if option is None else int.from_bytes(line.getsockopt(socket.SOL_SOCKET, option, 4), sys.byteorder)


def likeliest_first(end: tuple[WatchedRank, ProcessState]) -> tuple[bool, bool]:
    """Orders ends that are seen in one check, the likeliest first cause first.

    An agent that gets no processor for a while sees a death and the ends that follow from it at once. A rank that had
    begun to secure its state knew of a fault; one that still trained did not. A signal is more likely than an exit.
    """
    rank, state = end
    return rank.status().stage > TRAINING, state.status is not None and not os.WIFSIGNALED(state.status)
