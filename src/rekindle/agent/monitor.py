"""Monitors this node's ranks: notices a fault, tells the other ranks, and ends those that can't end themselves.

Ranks connect to a Unix socket and send lines of JSON. They register and report their own faults. The agent sends them
every fault on the node. All that must outlive the agent is in files: the ranks' status pages and ``fault.json``.
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
from rekindle.agent.unwatched import find_unwatched_deaths
from rekindle.agent.watchdog import SilenceLimit, is_traced, silence_limit
from rekindle.errors import FormatError
from rekindle.format.fields import check_integer, check_seconds, loads
from rekindle.format.names import MAX_RANKS
from rekindle.format.receipt import write_atomic
from rekindle.memory.fault import Fault
from rekindle.memory.incidents import note_gone
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import DONE, PHASE_TEXTS, SECURING, TRAINING, Status, StatusReader

__all__ = ["RankMonitor"]

log = logging.getLogger("rekindle.agent")

_TICK = 0.01
"""Seconds between two checks of all ranks. A check takes 10 microseconds per rank."""
_ENDS_SOON = 60.0
"""Seconds after a fault in which each check looks for the end of the last process, at the locks of all ranks. One may
live on: a notebook's, or that of a script which has caught the error."""
_SLEPT = 0.5
"""Seconds by which a check may be late. If it is later, the whole node has stood still, not a rank."""
_STUCK_AFTER = 1.0
"""Seconds after a fault until a rank that has not begun to secure its state is taken for stuck."""
_LINE = 1 << 20
"""Bytes of the longest line that a rank may send."""
_MOST_UNREGISTERED, _REGISTERS_WITHIN = 64, 10.0
"""Most connections that have not registered, and the seconds that each gets. Each keeps a file open."""
_REPORTS_AFTER = 60.0
"""Seconds after which a hang's report is written even if some ranks are still alive."""
_ANSWER = 0.1
"""Seconds that a stuck rank gets to write down its stacks, when faulthandler does that for it."""
_LINGER = 0.5
"""Seconds that a rank may take to exit once it has nothing more to do."""
_AGAIN = 1.0
"""Seconds between two checks of a job that a pause or a debugger holds up."""
_REPLY = 0.5
"""Seconds that a rank gets to say if a Python debugger holds it. A debugger that lets no thread run can't answer."""
_SEARCH_EVERY = 0.5
"""Seconds between two searches for ranks that died unwatched. One also follows when a rank registers or reports."""
_LAST_WORDS = 0.5
"""Seconds in which the lines that an ended rank has left in its connection should have been read."""


def _peer(writer: asyncio.StreamWriter) -> int | None:
    """Returns the process id at the other end of a connection, as the kernel knows it; None where it doesn't tell."""
    line, option = writer.get_extra_info("socket"), getattr(socket, "SO_PEERCRED", None)
    return None if option is None else int.from_bytes(line.getsockopt(socket.SOL_SOCKET, option, 4), sys.byteorder)


@dataclass(eq=False)
class _Rank:
    """One registered rank. Times are by this node's monotonic clock; 0 stands for never."""

    rank: int
    since: float
    """Time at which ``guard()`` began. Earlier faults don't concern this rank."""
    joined: float
    """Time at which the ranks of its start had met."""
    floor: float | None
    """Seconds without progress that are never a hang; None without a watchdog."""
    deadline: float
    """Seconds that it may take to secure its state after a fault."""
    stacks: int
    """Signal at which faulthandler writes the stacks of its threads, when the rank itself is stuck; 0 for none."""
    process: Process
    page: StatusReader
    seen: Status
    """The last sound content of its status page."""
    writer: asyncio.StreamWriter
    oom_kills_before: int
    """Processes that the kernel had killed because memory ran out, when the rank registered."""
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

    def status(self) -> Status:
        """Reads its status page. A damaged one counts as a pause, until the rank has written it again."""
        try:
            self.seen = self.page.read()
        except FormatError:
            return replace(self.seen, paused=1)
        return self.seen


def _first_cause(end: tuple[_Rank, ProcessState]) -> tuple[bool, bool]:
    """Orders ends that are seen in one check, the likeliest first cause first.

    An agent that gets no processor for a while sees a death and the ends that follow from it at once. A rank that had
    begun to secure its state knew of a fault; one that still trained did not. A signal is more likely than an exit.
    """
    rank, state = end
    return rank.status().stage > TRAINING, state.status is not None and not os.WIFSIGNALED(state.status)


@dataclass
class RankMonitor:
    """Monitors all guarded ranks of one job on this node. Runs in the agent's event loop; not thread-safe."""

    job: JobDir
    urgent: Callable[[bool], object]
    """Called with True at a fault, when storage needs the newest state soon, and with False when training goes on."""
    ranks: dict[int, _Rank] = field(default_factory=dict)
    fault: Fault | None = None
    """The newest fault. All ranks that registered before it are dying of it."""
    _server: asyncio.Server | None = None
    _reporting: asyncio.Task[None] | None = None
    _checked_at: float = 0.0
    _search_at: float = 0.0
    """Time of the next search for ranks that died unwatched."""
    _blind_until: float = 0.0
    _unregistered: dict[asyncio.StreamWriter, None] = field(default_factory=dict)
    """Connections that have not registered yet, the oldest first."""
    _pause_seen_at: float = 0.0
    """Time at which a rank was last seen to pause."""
    _pause_told_at: float = 0.0
    """Time at which the ranks were last told that a pause holds them up."""
    _debugger_asked_at: float = 0.0
    """Time at which the ranks were asked for a debugger; 0 when no answer is awaited."""
    _debugger_seen_at: float = 0.0
    """Time at which a debugger was last seen to hold a rank; 0 when none does."""
    _end_awaited: bool = False
    """True after a fault, until the last process of its start has ended."""

    async def serve(self) -> None:
        """Listens for ranks and monitors them until cancelled."""
        self.job.paths.watch_socket.unlink(missing_ok=True)
        with socket_address(self.job.paths.watch_socket) as name:
            self._server = await asyncio.start_unix_server(self._serve_rank, name, limit=_LINE)
        self._checked_at = time.monotonic()
        try:
            while True:
                await asyncio.sleep(self._pause())
                try:
                    self._check_ranks()
                except Exception:
                    log.exception("a check of the ranks failed; the next one follows")
                    await asyncio.sleep(1.0)
        finally:
            self._server.close()

    def _pause(self) -> float:
        soon = self.fault is not None and self._end_awaited and time.monotonic() - self.fault.noticed < _ENDS_SOON
        return _TICK if self.ranks or soon else 10 * _TICK

    @property
    def reporting(self) -> bool:
        """True while the report of a hang is being written, from files in the job's directory."""
        return self._reporting is not None and not self._reporting.done()

    @property
    def has_seen_all(self) -> bool:
        """True while no rank is connected, and the end of a fault's start was seen."""
        return not self.ranks and not self._end_awaited

    # -- talking ------------------------------------------------------------------------------------------------

    async def _serve_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: _Rank | None = None
        self._unregistered[writer] = None
        for oldest in list(self._unregistered)[:-_MOST_UNREGISTERED]:
            oldest.close()
        try:
            hello = await asyncio.wait_for(reader.readline(), _REGISTERS_WITHIN)
            rank = self._register(loads(hello), writer)
            del self._unregistered[writer]
            while line := await reader.readline():
                self._handle_message(rank, loads(line))
        except (OSError, ValueError, KeyError, TypeError, asyncio.TimeoutError) as error:
            log.warning("a rank's connection is refused or lost: %s: %s", type(error).__name__, error)
        finally:
            self._unregistered.pop(writer, None)
            writer.close()
            if rank is not None:
                rank.heard_out = True

    def _register(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> _Rank:
        index = check_integer(hello["rank"], 0, MAX_RANKS - 1)
        since, joined = check_seconds(hello["since"]), check_seconds(hello["joined"])
        deadline = check_seconds(hello["deadline"])
        stacks = check_integer(hello["stacks"], 0, signal.NSIG - 1)
        page = StatusReader(self.job.paths.status_page(index))
        pid, floor = check_integer(hello["pid"], 1), hello["watchdog"]
        if _peer(writer) not in (None, pid):  # the agent may have to kill this process: no other may name it
            raise ValueError(f"it registers as process {pid}, but is process {_peer(writer)}")
        floor = None if floor is None else check_seconds(floor)
        seen, ooms = page.read(), oom_kills(pid)
        process = Process(pid)  # last, as it opens a file that an error above would leak
        rank = _Rank(index, since, joined, floor, deadline, stacks, process, page, seen, writer, ooms)
        if index in self.ranks:
            self._remove(self.ranks[index])
        self.ranks[index], self._search_at = rank, 0.0
        if self.fault is not None and self._is_dying(rank):
            self._send(rank, {"fault": self.fault.to_json()})
        else:
            self._end_awaited = False
            self.urgent(False)
        return rank

    def _handle_message(self, rank: _Rank, message: dict[str, Any]) -> None:
        if "fault" in message:
            self._search_at = 0.0
            self._check_ranks()  # a death that made this rank raise must be noticed first
            self.announce(Fault.from_json(message["fault"]), rank)
        elif "debugger" in message:
            rank.debugger_answered = True
            if message["debugger"]:
                self._note_debugger(time.monotonic(), f"rank {rank.rank} is held by {str(message['debugger'])[:64]!r}")
        elif "bye" in message:
            self._remove(rank)

    def _send(self, rank: _Rank, message: dict[str, Any]) -> None:
        with suppress(OSError, RuntimeError):
            rank.writer.write(json.dumps(message).encode() + b"\n")

    def send_to(self, number: int, message: dict[str, Any]) -> bool:
        """Sends a message to one rank. Returns False when there is no such rank."""
        if number in self.ranks:
            self._send(self.ranks[number], message)
        return number in self.ranks

    # -- looking ------------------------------------------------------------------------------------------------

    def _check_ranks(self) -> None:
        now = time.monotonic()
        if now - self._checked_at > _SLEPT:  # the agent did not run either: a rank's silence proves nothing
            limit = self._limit({rank.rank: rank.status() for rank in self.ranks.values()})
            self._blind_until = now + (limit.seconds if limit is not None else 0.0)
        self._checked_at = now
        states = [(rank, rank.process.look()) for rank in self.ranks.values()]
        for rank, state in sorted((end for end in states if end[1].over), key=_first_cause):
            self._handle_end(rank, state.status, now)
        if self._end_awaited and not self.job.trainers():
            self._end_awaited = False
            note_gone(self.job, time.monotonic())
        dying = [rank for rank in self.ranks.values() if self._is_dying(rank)]
        if dying and self.fault is not None:
            self._end_dying_ranks(now, self.fault, dying)
        elif not self._announce_unwatched_death(now):
            self._check_for_hang(now)

    def _is_dying(self, rank: _Rank) -> bool:
        return self.fault is not None and self.fault.noticed >= rank.since

    def _handle_end(self, rank: _Rank, status: int | None, now: float) -> None:
        page = rank.status()
        rank.ended_at = rank.ended_at or now
        news = not self._is_dying(rank) and page.phase != DONE
        # A rank that had begun to secure its state knew of a fault. Its own account may still wait in the connection if
        # the agent got no processor meanwhile, and says more than an exit code.
        if news and page.stage > TRAINING and not rank.heard_out and now - rank.ended_at < _LAST_WORDS:
            return
        self._remove(rank)
        if not news:
            return
        cause, what = describe_end(status, oom=oom_kills(rank.process.pid) > rank.oom_kills_before)
        self.announce(Fault(cause, rank.rank, page.generation, page.step, f"rank {rank.rank} {what}"), rank)

    def _announce_unwatched_death(self, now: float) -> bool:
        """Announces the death of a rank that was not connected to an agent. Returns True if there is one."""
        if not self.ranks or now < self._search_at:
            return False
        self._search_at = now + _SEARCH_EVERY
        survivor = max(self.ranks.values(), key=lambda rank: rank.joined)
        deaths = find_unwatched_deaths(self.job, self.ranks, survivor.status().generation, survivor.joined)
        if not deaths:
            return False
        first = min(deaths, key=lambda death: (death.page.stage > TRAINING, death.page.progress))
        cause, what = describe_end(first.status, oom=False)
        page = first.page
        self.announce(Fault(cause, first.rank, page.generation, page.step, f"rank {first.rank} {what}"), survivor)
        return True

    def _limit(self, pages: dict[int, Status]) -> SilenceLimit | None:
        return silence_limit((rank.floor for rank in self.ranks.values()), pages.values())

    def _check_for_hang(self, now: float) -> None:
        pages = {rank.rank: rank.status() for rank in self.ranks.values()}
        if any(page.paused for page in pages.values()):
            self._note_pause(now)
        limit = self._limit(pages)
        if limit is None:
            self._debugger_asked_at = self._debugger_seen_at = 0.0  # of an earlier start
        if limit is None or now < self._blind_until:
            return
        ages = [min(page.age, now - self._pause_seen_at) for page in pages.values() if page.phase != DONE]
        late = any(age > limit.seconds for age in ages)
        if not late and not self._debugger_seen_at:
            self._debugger_asked_at = 0.0  # progress before all had answered: ask again at the next silence
        else:
            debugger = self._debugger_holds(now)
            if late and debugger is False:
                self._announce_hang(pages, limit)

    def _note_pause(self, now: float) -> None:
        """Excuses the silence of all ranks, as they wait for one that pauses.

        Silence then counts from the pause's end only, and the ranks don't take such a step's time as a measure.
        """
        self._pause_seen_at = now
        if now - self._pause_told_at > _AGAIN:
            self._pause_told_at = now
            for rank in self.ranks.values():
                self._send(rank, {"pause": True})

    def _debugger_holds(self, now: float) -> bool | None:
        """Returns True if a debugger holds one of the ranks, which is no hang; None while they are being asked."""
        if self._debugger_seen_at and now - self._debugger_seen_at < _AGAIN:
            self._note_pause(now)
            return True
        if any(is_traced(rank.process.pid) for rank in self.ranks.values()):
            self._note_debugger(now, "a debugger is attached to a rank")
            return True
        if not self._debugger_asked_at:
            self._debugger_asked_at = now
            for rank in self.ranks.values():
                rank.debugger_answered = rank.process.look().stopped
                self._send(rank, {"debugger": True})
        if now - self._debugger_asked_at < _REPLY and not all(rank.debugger_answered for rank in self.ranks.values()):
            return None
        ended, self._debugger_asked_at, self._debugger_seen_at = self._debugger_seen_at > 0, 0.0, 0.0
        if ended:
            self._note_pause(now)
        return ended

    def _note_debugger(self, now: float, what: str) -> None:
        if not self._debugger_seen_at:
            log.info("%s: the watchdog waits until it is gone", what)
        self._debugger_asked_at, self._debugger_seen_at = 0.0, now
        self._note_pause(now)

    def _announce_hang(self, pages: dict[int, Status], limit: SilenceLimit) -> None:
        stopped = {number for number, rank in self.ranks.items() if rank.process.look().stopped}
        behind = min(pages, key=lambda number: (number not in stopped, pages[number].step, pages[number].progress))
        lines = [f"rank {behind} made no progress for {limit.seconds:.2f} s, the limit: {limit.why}"]
        lines.append(
            'if this was no hang: run what takes longer inside of `with ckpt.pause_watchdog("evaluation"):`, or allow '
            "more with ckpt.guard(watchdog=SECONDS); watchdog=False switches it off"
        )
        for each, page in sorted(pages.items()):
            more = (f", {page.note}" if page.note else "") + (", stopped by a signal" if each in stopped else "")
            lines.append(f"rank {each}: after step {page.step}, {PHASE_TEXTS[page.phase]}, for {page.age:.2f} s{more}")
        rank = self.ranks[behind]
        step, generation = pages[behind].step, pages[behind].generation
        like = [n for n in sorted(pages) if (n in stopped, pages[n].step) == (behind in stopped, step)]
        what = f"rank {behind} hangs after step {step}, {PHASE_TEXTS[pages[behind].phase]}"
        if len(like) > 1:  # only their stacks can tell which one the others wait for
            what = f"ranks {', '.join(map(str, like))} hang after step {step}, {PHASE_TEXTS[pages[behind].phase]}"
        info = None
        with suppress(FormatError):
            info = self.job.read_job()
        if info is not None:
            lines.append(f"the stacks of all ranks will be in {info.root}/{report_name(generation, step)}")
        began = pages[behind].progress / 1e9
        fault = Fault("hang", behind, generation, step, what, "\n".join(lines), began=began)
        self.announce(fault, rank)
        self._reporting = asyncio.get_running_loop().create_task(self._write_report(fault, sorted(pages)))

    async def _write_report(self, fault: Fault, ranks: list[int]) -> None:
        """Writes the report of a hang once the ranks have ended: only then is all written that they know."""
        until = time.monotonic() + _REPORTS_AFTER
        while (
            any(rank in self.ranks and self._is_dying(self.ranks[rank]) for rank in ranks) and time.monotonic() < until
        ):
            await asyncio.sleep(10 * _TICK)
        await asyncio.to_thread(write_report, self.job, fault, ranks)

    # -- after a fault ------------------------------------------------------------------------------------------

    def announce(self, fault: Fault, rank: _Rank) -> None:
        """Records a fault of ``rank`` and sends it to all ranks. Ignores one that follows from an earlier fault."""
        if self._is_dying(rank):
            return
        self.fault, self._end_awaited = fault, True
        self.urgent(True)
        log.error("%s (%s, step %d)", fault.what, fault.cause, fault.step)
        with suppress(OSError):
            write_atomic(self.job.paths.fault, json.dumps(fault.to_json()).encode())
        if fault.cause == "hang":
            self._find_descendants()
        for rank in self.ranks.values():
            self._send(rank, {"fault": fault.to_json()})

    def _find_descendants(self) -> None:
        """Finds data loaders' workers and the like: a killed rank can't end them, and they may hang, too."""
        found = children(rank.process.pid for rank in self.ranks.values())
        for rank in self.ranks.values():
            rank.descendants = found[rank.process.pid]

    def _end_dying_ranks(self, now: float, fault: Fault, dying: list[_Rank]) -> None:
        """Kills the ranks that can't end themselves, once no other rank needs them any more."""
        since = now - fault.noticed
        busy, idle = False, []
        for rank in dying:
            page = rank.status()
            if page.stage > SECURING and not rank.idle_since:
                rank.idle_since = now
            stopped = rank.process.look().stopped
            deaf = page.stage < SECURING and (since > _STUCK_AFTER or stopped)
            if deaf and rank.stacks and not rank.stacks_asked_at and not stopped:
                rank.stacks_asked_at = now  # harmless if the signal ends it: it would be killed next
                rank.process.send(rank.stacks)
            if deaf or (rank.idle_since and now > rank.idle_since + _LINGER) or since > rank.deadline + _LINGER:
                idle.append(rank)
            busy |= not deaf and not rank.idle_since and since < rank.deadline + _LINGER
        for rank in idle if not busy and all(now - rank.stacks_asked_at > _ANSWER for rank in idle) else []:
            log.warning("rank %d does not end by itself after the fault: it is killed", rank.rank)
            rank.process.send(signal.SIGKILL)
            rank.idle_since = now  # checked again until it has ended

    def _remove(self, rank: _Rank) -> None:
        if self.ranks.get(rank.rank) is rank:
            del self.ranks[rank.rank]
        if not rank.over:
            rank.over = True
            rank.process.close()
            rank.writer.close()
            for child in rank.descendants:
                child.kill()
