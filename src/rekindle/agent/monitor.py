"""The agent's eye on this node's ranks: notices a fault, tells the others, and sees them to their end.

Ranks connect to a Unix socket and talk in lines of JSON. They say who they are, and what befalls them; they are told
of a fault anywhere on the node. What must outlive the agent is in files: the ranks' status pages, and ``fault.json``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rekindle.agent.address import socket_address
from rekindle.agent.process import Child, Process, ProcessState, children, describe_end, oom_kills
from rekindle.agent.report import report_name, write_report
from rekindle.agent.watchdog import SilenceLimit, is_traced, silence_limit
from rekindle.errors import FormatError
from rekindle.format.fields import check_integer, check_seconds, loads
from rekindle.format.names import MAX_RANKS
from rekindle.format.receipt import write_atomic
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import DOES, DONE, SECURING, TRAINING, Status, StatusReader

__all__ = ["RankMonitor"]

log = logging.getLogger("rekindle.agent")

_TICK = 0.01
"""Seconds between two looks at every rank; a look takes 10 microseconds."""
_SLEPT = 0.5
"""Seconds by which the agent's own look may be late. If more, the whole node has stood still, not a rank."""
_DEAF = 1.0
"""Seconds after which a rank that has not begun to secure its state is taken for stuck."""
_LINE = 1 << 20
"""Bytes of the longest line that a rank may send."""
_STRANGERS, _HELLO = 64, 10.0
"""How many connections may keep silent, and for how many seconds. Each is a file, which a drain would want, too."""
_TELLING = 60.0
"""Seconds after which a hang's report is written though some ranks are still there."""
_ANSWER = 0.1
"""Seconds that a stuck rank gets to write down its stacks, when faulthandler does that for it."""
_LINGER = 0.5
"""Seconds that a rank may take to leave once it has nothing more to do."""
_AGAIN = 1.0
"""Seconds between two looks at a job that a pause or a debugger holds up."""
_REPLY = 0.5
"""Seconds that a rank gets to say whether a debugger of Python's holds it. One that lets no thread run can't."""
_LAST_WORDS = 0.5
"""Seconds in which the lines that an ended rank has left in its connection should have been read."""


def _peer(writer: asyncio.StreamWriter) -> int | None:
    """Process id of whoever made a connection, as the kernel knows it; None where it doesn't tell."""
    line, option = writer.get_extra_info("socket"), getattr(socket, "SO_PEERCRED", None)
    return None if option is None else int.from_bytes(line.getsockopt(socket.SOL_SOCKET, option, 4), sys.byteorder)


@dataclass(eq=False)
class _Rank:
    """One rank that is being watched."""

    rank: int
    since: float
    """When it began to be guarded, by this node's monotonic clock: of earlier faults it knows nothing."""
    floor: float | None
    """Seconds without progress that are no hang; None: it has no watchdog."""
    deadline: float
    """Seconds that it may take to secure its state after a fault."""
    stacks: int
    """Signal at which it writes down where its threads stand, when it can't be told to; 0 for none."""
    process: Process
    page: StatusReader
    seen: Status
    """What its page said when it made sense for the last time."""
    writer: asyncio.StreamWriter
    ooms: int
    settled: float = 0.0
    """When it had nothing more to do, after a fault."""
    asked: float = 0.0
    """When it was asked for its stacks."""
    answered: bool = False
    """Whether it has said if a debugger holds it."""
    family: list[Child] = field(default_factory=list)
    """Processes of its own that are to end with it, at a hang."""
    over: bool = False
    ended: float = 0.0
    """When it was first seen to have ended."""
    heard_out: bool = False
    """True once its connection is closed and all that it said has been heard."""

    def status(self) -> Status:
        """What its page says. One that somebody has damaged says nothing of hangs, until the rank has mended it."""
        try:
            self.seen = self.page.read()
        except FormatError:
            return replace(self.seen, paused=1)
        return self.seen


def _first_cause(end: tuple[_Rank, ProcessState]) -> tuple[bool, bool]:
    """Orders ends that are seen in one look, the likeliest first cause first.

    An agent that gets no processor for a while sees a death and the ends that follow from it at once. A rank that had
    begun to secure its state knew of a fault; one that still trained did not. A signal is rather a cause than an exit.
    """
    rank, state = end
    return rank.status().stage > TRAINING, state.status is not None and not os.WIFSIGNALED(state.status)


@dataclass
class RankMonitor:
    """All watched ranks of one job on this node. For the agent's event loop."""

    job: JobDir
    urgent: Callable[[bool], object]
    """Called with True at a fault, which storage should get the state of soon, with False when training goes on."""
    ranks: dict[int, _Rank] = field(default_factory=dict)
    fault: Fault | None = None
    """The newest one. Ranks of its generation are dying of it."""
    _server: asyncio.Server | None = None
    _reporting: asyncio.Task[None] | None = None
    _looked: float = 0.0
    _blind_until: float = 0.0
    _strangers: dict[asyncio.StreamWriter, None] = field(default_factory=dict)
    """Connections that have not said yet who they are, the oldest first."""
    _paused: float = 0.0
    """When a rank was last seen to pause."""
    _told: float = 0.0
    """When the ranks were last told that a pause holds them up."""
    _doubted: float = 0.0
    """When the ranks were asked for a debugger; 0 when no answer is awaited."""
    _debugged: float = 0.0
    """When a debugger was last seen to hold a rank; 0 when none does."""

    async def serve(self) -> None:
        """Listen for ranks, and look after them until cancelled."""
        self.job.paths.watch_socket.unlink(missing_ok=True)
        with socket_address(self.job.paths.watch_socket) as name:
            self._server = await asyncio.start_unix_server(self._meet, name, limit=_LINE)
        self._looked = time.monotonic()
        try:
            while True:
                await asyncio.sleep(_TICK if self.ranks else 10 * _TICK)
                try:
                    self._look()
                except Exception:
                    log.exception("the ranks could not be looked at")
                    await asyncio.sleep(1.0)
        finally:
            self._server.close()

    @property
    def reporting(self) -> bool:
        """Whether a report is still to be written, from files in the job's directory."""
        return self._reporting is not None and not self._reporting.done()

    # -- talking ------------------------------------------------------------------------------------------------

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: _Rank | None = None
        self._strangers[writer] = None
        for oldest in list(self._strangers)[:-_STRANGERS]:
            oldest.close()
        try:
            hello = await asyncio.wait_for(reader.readline(), _HELLO)
            rank = self._welcome(loads(hello), writer)
            del self._strangers[writer]
            while line := await reader.readline():
                self._hear(rank, loads(line))
        except (OSError, ValueError, KeyError, TypeError, asyncio.TimeoutError) as error:
            log.warning("a rank's connection is refused or lost: %s: %s", type(error).__name__, error)
        finally:
            self._strangers.pop(writer, None)
            writer.close()
            if rank is not None:
                rank.heard_out = True

    def _welcome(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> _Rank:
        index = check_integer(hello["rank"], 0, MAX_RANKS - 1)
        since, deadline = check_seconds(hello["since"]), check_seconds(hello["deadline"])
        stacks = check_integer(hello["stacks"], 0, signal.NSIG - 1)
        page = StatusReader(self.job.paths.status_page(index))
        pid, floor = check_integer(hello["pid"], 1), hello["watchdog"]
        if _peer(writer) not in (None, pid):  # it may be killed one day: nobody says so for somebody else
            raise ValueError(f"it says that it is process {pid}, and is {_peer(writer)}")
        floor = None if floor is None else check_seconds(floor)
        seen, ooms = page.read(), oom_kills(pid)
        process = Process(pid)  # last: it keeps a file open
        rank = _Rank(index, since, floor, deadline, stacks, process, page, seen, writer, ooms)
        if index in self.ranks:
            self._part(self.ranks[index])
        self.ranks[index] = rank
        if self.fault is not None and self._dies(rank):
            self._send(rank, {"fault": self.fault.to_json()})
        else:
            self.urgent(False)
        return rank

    def _hear(self, rank: _Rank, message: dict[str, Any]) -> None:
        if "fault" in message:
            self._look()  # who raises because of another one's death is not the first
            self.strike(Fault.from_json(message["fault"]), rank)
        elif "debugger" in message:
            rank.answered = True
            if message["debugger"]:
                self._see_debugger(time.monotonic(), f"rank {rank.rank} stands in {str(message['debugger'])[:64]!r}")
        elif "bye" in message:
            self._part(rank)

    def _send(self, rank: _Rank, message: dict[str, Any]) -> None:
        with suppress(OSError, RuntimeError):
            rank.writer.write(json.dumps(message).encode() + b"\n")

    def tell(self, number: int, message: dict[str, Any]) -> bool:
        """Send a message to one rank. False when there is no such rank."""
        if number in self.ranks:
            self._send(self.ranks[number], message)
        return number in self.ranks

    # -- looking ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked > _SLEPT:  # we did not run either: nobody's silence means anything
            limit = self._limit({rank.rank: rank.status() for rank in self.ranks.values()})
            self._blind_until = now + (limit.seconds if limit is not None else 0.0)
        self._looked = now
        states = [(rank, rank.process.look()) for rank in self.ranks.values()]
        for rank, state in sorted((end for end in states if end[1].over), key=_first_cause):
            self._ended(rank, state.status, now)
        dying = [rank for rank in self.ranks.values() if self._dies(rank)]
        if dying and self.fault is not None:
            self._see_out(now, self.fault, dying)
        else:
            self._look_for_hang(now)

    def _dies(self, rank: _Rank) -> bool:
        return self.fault is not None and self.fault.noticed >= rank.since

    def _ended(self, rank: _Rank, status: int | None, now: float) -> None:
        page = rank.status()
        rank.ended = rank.ended or now
        news = not self._dies(rank) and page.phase != DONE
        # A rank that had begun to secure its state knew of a fault. Its own account may still wait in the connection if
        # the agent got no processor meanwhile, and says more than an exit code.
        if news and page.stage > TRAINING and not rank.heard_out and now - rank.ended < _LAST_WORDS:
            return
        self._part(rank)
        if not news:
            return
        cause, what = describe_end(status, oom_kills(rank.process.pid) > rank.ooms)
        self.strike(Fault(cause, rank.rank, page.generation, page.step, f"rank {rank.rank} {what}"), rank)

    def _limit(self, pages: dict[int, Status]) -> SilenceLimit | None:
        return silence_limit((rank.floor for rank in self.ranks.values()), pages.values())

    def _look_for_hang(self, now: float) -> None:
        pages = {rank.rank: rank.status() for rank in self.ranks.values()}
        if any(page.paused for page in pages.values()):
            self._hold(now)
        limit = self._limit(pages)
        if limit is None:
            self._doubted = self._debugged = 0.0  # of an earlier start
        if limit is None or now < self._blind_until:
            return
        ages = [min(page.age, now - self._paused) for page in pages.values() if page.phase != DONE]
        late = any(age > limit.seconds for age in ages)
        if not late and not self._debugged:
            self._doubted = 0.0  # there was progress before all had answered: the next silence is a new question
        else:
            debugger = self._debugger(now)
            if late and debugger is False:
                self._hangs(pages, limit)

    def _hold(self, now: float) -> None:
        """Whoever waits for a rank that pauses waits with a reason: it only counts from the pause's end, and what such
        a step takes is no measure of others."""
        self._paused = now
        if now - self._told > _AGAIN:
            self._told = now
            for rank in self.ranks.values():
                self._send(rank, {"pause": True})

    def _debugger(self, now: float) -> bool | None:
        """Whether a debugger holds one of the ranks, which may take its time; None while they are being asked."""
        if self._debugged and now - self._debugged < _AGAIN:
            self._hold(now)
            return True
        if any(is_traced(rank.process.pid) for rank in self.ranks.values()):
            self._see_debugger(now, "a debugger is attached to a rank")
            return True
        if not self._doubted:
            self._doubted = now
            for rank in self.ranks.values():
                rank.answered = rank.process.look().stopped
                self._send(rank, {"debugger": True})
        if now - self._doubted < _REPLY and not all(rank.answered for rank in self.ranks.values()):
            return None
        ended, self._doubted, self._debugged = self._debugged > 0, 0.0, 0.0
        if ended:
            self._hold(now)
        return ended

    def _see_debugger(self, now: float, what: str) -> None:
        if not self._debugged:
            log.info("%s: the watchdog waits", what)
        self._doubted, self._debugged = 0.0, now
        self._hold(now)

    def _hangs(self, pages: dict[int, Status], limit: SilenceLimit) -> None:
        stopped = {number for number, rank in self.ranks.items() if rank.process.look().stopped}
        behind = min(pages, key=lambda number: (number not in stopped, pages[number].step, pages[number].progress))
        lines = [f"rank {behind} made no progress for the {limit.seconds:.2f} s that are allowed: {limit.why}"]
        lines.append(
            'if this was no hang: run what takes longer inside of `with ckpt.pause_watchdog("evaluation"):`, or allow '
            "more with ckpt.guard(watchdog=SECONDS); watchdog=False switches it off"
        )
        for each, page in sorted(pages.items()):
            more = (f", {page.note}" if page.note else "") + (", stopped by a signal" if each in stopped else "")
            lines.append(f"rank {each}: after step {page.step}, {DOES[page.phase]}, for {page.age:.2f} s{more}")
        rank = self.ranks[behind]
        step, generation = pages[behind].step, pages[behind].generation
        like = [n for n in sorted(pages) if (n in stopped, pages[n].step) == (behind in stopped, step)]
        what = f"rank {behind} hangs after step {step}, {DOES[pages[behind].phase]}"
        if len(like) > 1:  # who waits for whom, only their stacks can tell
            what = f"ranks {', '.join(map(str, like))} hang after step {step}, {DOES[pages[behind].phase]}"
        info = None
        with suppress(FormatError):
            info = self.job.read_job()
        if info is not None:
            lines.append(f"the stacks of all ranks will be in {info.root}/{report_name(generation, step)}")
        fault = Fault("hang", behind, generation, step, what, "\n".join(lines))
        self.strike(fault, rank)
        self._reporting = asyncio.get_running_loop().create_task(self._report(fault, sorted(pages)))

    async def _report(self, fault: Fault, ranks: list[int]) -> None:
        """Once the ranks are over, for only then have they said all that they know."""
        until = time.monotonic() + _TELLING
        while any(rank in self.ranks and self._dies(self.ranks[rank]) for rank in ranks) and time.monotonic() < until:
            await asyncio.sleep(10 * _TICK)
        await asyncio.to_thread(write_report, self.job, fault, ranks)

    # -- after a fault ------------------------------------------------------------------------------------------

    def strike(self, fault: Fault, rank: _Rank) -> None:
        """Take up a fault of ``rank``, unless that is dying already: what follows from the first one is no news."""
        if self._dies(rank):
            return
        self.fault = fault
        self.urgent(True)
        log.error("%s (%s, step %d)", fault.what, fault.cause, fault.step)
        with suppress(OSError):
            write_atomic(self.job.paths.fault, json.dumps(fault.to_json()).encode())
        if fault.cause == "hang":
            self._look_for_families()
        for rank in self.ranks.values():
            self._send(rank, {"fault": fault.to_json()})

    def _look_for_families(self) -> None:
        """Loaders' workers and the like: who is killed can't see to them, and they may hang too."""
        found = children(rank.process.pid for rank in self.ranks.values())
        for rank in self.ranks.values():
            rank.family = found[rank.process.pid]

    def _see_out(self, now: float, fault: Fault, dying: list[_Rank]) -> None:
        """End whoever can't end itself, once nobody needs it any more."""
        since = now - fault.noticed
        busy, idle = False, []
        for rank in dying:
            page = rank.status()
            if page.stage > SECURING and not rank.settled:
                rank.settled = now
            stopped = rank.process.look().stopped
            deaf = page.stage < SECURING and (since > _DEAF or stopped)
            if deaf and rank.stacks and not rank.asked and not stopped:
                rank.asked = now  # it can't write down its stacks, and would not be here much longer if that ended it
                rank.process.send(rank.stacks)
            if deaf or (rank.settled and now > rank.settled + _LINGER) or since > rank.deadline + _LINGER:
                idle.append(rank)
            busy |= not deaf and not rank.settled and since < rank.deadline + _LINGER
        for rank in idle if not busy and all(now - rank.asked > _ANSWER for rank in idle) else []:
            log.warning("rank %d does not end by itself: killed", rank.rank)
            rank.process.send(signal.SIGKILL)
            rank.settled = now  # it is looked at again until it is over

    def _part(self, rank: _Rank) -> None:
        if self.ranks.get(rank.rank) is rank:
            del self.ranks[rank.rank]
        if not rank.over:
            rank.over = True
            rank.process.close()
            rank.writer.close()
            for child in rank.family:
                child.kill()
