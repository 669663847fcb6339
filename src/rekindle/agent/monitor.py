"""Monitors this node's ranks: notices a fault, tells the other ranks, and ends those that can't end themselves.

Ranks connect to a Unix socket and send lines of JSON. They register and report their own faults. The agent sends them
every fault on the node, and those that other nodes tell of. All that must outlive the agent is in files: the ranks'
status pages and ``fault.json``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rekindle.agent.address import socket_address
from rekindle.agent.beat import Beat
from rekindle.agent.first_cause import first_of, follows, is_failed_collective, is_held
from rekindle.agent.hang import HangWatch
from rekindle.agent.others import Others
from rekindle.agent.process import children, describe_end
from rekindle.agent.rank import WatchedRank, likeliest_first
from rekindle.agent.report import write_report
from rekindle.agent.ticks import next_tick
from rekindle.agent.unwatched import find_unwatched_deaths
from rekindle.format.fields import loads
from rekindle.format.receipt import write_atomic
from rekindle.memory.fault import Fault
from rekindle.memory.incidents import note_gone
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import DONE, SECURING, STABLE, TRAINING

__all__ = ["RankMonitor"]

log = logging.getLogger("rekindle.agent")

_TICK, _LARGE = 0.05, 800_000_000
"""Seconds between two checks of all ranks while one of them holds so many bytes, or the kernel reports no ends: it
takes 60 ms for each GB until it does. To wake up takes 0.2 ms of a core, a check 10 microseconds per rank."""
_TICK_SOON = 0.01
"""The same while ranks end."""
_SELDOM = 0.1
"""The same while the kernel reports each end sooner than that, and while a report waits for the end of ranks."""
_ENDS_SOON = 60.0
"""Seconds after a fault in which each check looks for the end of the last process, at the locks of all ranks. One may
live on: a notebook's, or that of a script which has caught the error."""
_SLEPT = 0.5
"""Seconds by which a check may be late. If it is later, the whole node has stood still, not a rank."""
_STUCK_AFTER = 1.0
"""Seconds until a rank that was told of a fault and has not begun to secure its state is taken for stuck."""
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
_SEARCH_EVERY = 0.5
"""Seconds between two searches for ranks that died unwatched. One also follows when a rank registers or reports."""
_LAST_WORDS = 0.5
"""Seconds in which the lines that an ended rank has left in its connection should have been read."""
_ASK = 0.15
"""Seconds that other nodes get to tell of a fault that came before. A rank that has raised waits for the answer."""


@dataclass
class RankMonitor:
    """Monitors all guarded ranks of one job on this node. Runs in the agent's event loop; not thread-safe."""

    job: JobDir
    urgent: Callable[[bool], object]
    """Called with True at a fault, when storage needs the newest state soon, and with False when training goes on."""
    ranks: dict[int, WatchedRank] = field(default_factory=dict)
    fault: Fault | None = None
    """The newest fault. All ranks that registered before it are dying of it."""
    others: Others = field(default_factory=Others)
    """The other nodes of the start."""
    _server: asyncio.Server | None = None
    _reporting: asyncio.Task[None] | None = None
    _checked_at: float = 0.0
    _search_at: float = 0.0
    """Time of the next search for ranks that died unwatched."""
    _often: bool = False
    """True while a check would notice the end of a rank long before the kernel reports it."""
    _unregistered: dict[asyncio.StreamWriter, None] = field(default_factory=dict)
    """Connections that have not registered yet, the oldest first."""
    _end_awaited: bool = False
    """True after a fault, until the last process of its start has ended."""
    _held: Fault | None = None
    """A fault on this node that is not announced before the other nodes have been asked."""
    _asking: asyncio.Task[None] | None = None
    _reached: int = -1
    """See ``Beat.reached``."""
    _afar: tuple[list[int], bool] | None = None
    """The same of each other node, and whether one is missed, as this node's ranks were last told; None before."""
    _from_elsewhere: bool = False
    """True if another node has told of the newest fault."""

    def __post_init__(self) -> None:
        self._hang = HangWatch(self.job)

    async def serve(self) -> None:
        """Listens for ranks and monitors them until cancelled."""
        self.job.paths.watch_socket.unlink(missing_ok=True)
        with socket_address(self.job.paths.watch_socket) as name:
            self._server = await asyncio.start_unix_server(self._serve_rank, name, limit=_LINE)
        self._checked_at = time.monotonic()
        try:
            while True:
                await next_tick(self._pause())
                try:
                    self._check_ranks()
                except Exception:
                    log.exception("a check of the ranks failed; the next one follows")
                    await asyncio.sleep(1.0)
        finally:
            self._server.close()

    def _pause(self) -> float:
        soon = self.fault is not None and self._end_awaited and time.monotonic() - self.fault.noticed < _ENDS_SOON
        if soon:
            return _TICK_SOON
        return _TICK if self._often else _SELDOM

    @property
    def reporting(self) -> bool:
        """True while the report of a hang is being written, from files in the job's directory."""
        return self._reporting is not None and not self._reporting.done()

    @property
    def has_seen_all(self) -> bool:
        """True while no rank is connected, and the end of a fault's start was seen."""
        return not self.ranks and not self._end_awaited and self._held is None

    # -- talking ------------------------------------------------------------------------------------------------

    async def _serve_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: WatchedRank | None = None
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

    def _register(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> WatchedRank:
        rank = WatchedRank.register(self.job, hello, writer)
        if rank.rank in self.ranks:
            self._remove(self.ranks[rank.rank])
        self.ranks[rank.rank], self._search_at = rank, 0.0
        if self._from_elsewhere and self.fault is not None and rank.joined <= self.fault.noticed:
            rank.since = rank.joined  # the start was over before this rank came to be guarded
        if self.fault is not None and self._is_dying(rank):
            rank.tell(self.fault)
            self._afar = None
        else:
            self._end_awaited = False
            self.urgent(False)
        rank.watch_end(self._look_first)
        return rank

    def _handle_message(self, rank: WatchedRank, message: dict[str, Any]) -> None:
        if "fault" in message:
            self._search_at = 0.0
            self._check_ranks()  # a death that made this rank raise must be noticed first
            self._report(Fault.from_json(message["fault"]), rank)
        elif "debugger" in message:
            rank.debugger_answered = True
            if message["debugger"]:
                self._hang.note_debugger(f"rank {rank.rank} is held by {str(message['debugger'])[:64]!r}", self.ranks)
        elif "bye" in message:
            self._remove(rank)

    def send_to(self, number: int, message: dict[str, Any]) -> bool:
        """Sends a message to one rank. Returns False when there is no such rank."""
        if number in self.ranks:
            self.ranks[number].send(message)
        return number in self.ranks

    # -- looking ------------------------------------------------------------------------------------------------

    def _check_ranks(self) -> None:
        now = time.monotonic()
        if now - self._checked_at > _SLEPT:  # the agent did not run either: a rank's silence proves nothing
            self._hang.slept(self._checked_at, now)
        self._checked_at = now
        states = [(rank, rank.process.look()) for rank in self.ranks.values()]
        self._often = any(state.resident > _LARGE or rank.process.descriptor < 0 for rank, state in states)
        for rank, state in states:
            if not state.over:
                rank.oom_kills.look(now)
        for rank, state in sorted((end for end in states if end[1].over), key=likeliest_first):
            self._handle_end(rank, state.status, now)
        if self.fault is not None and self._end_awaited and not self.job.trainers():
            self._end_awaited = False
            note_gone(self.job, time.monotonic(), self.fault.noticed)
        dying = [rank for rank in self.ranks.values() if self._is_dying(rank)]
        if dying:
            self._compare_steps(dying)
            self._end_dying_ranks(now, dying)
        elif not self._announce_unwatched_death(now) and self._held is None:
            hang = self._hang.check(now, self.ranks, self.others) if self.ranks or self.current is None else None
            if hang is not None:
                self._announce(hang)

    def _is_dying(self, rank: WatchedRank) -> bool:
        return self.fault is not None and self.fault.noticed >= rank.since

    def _handle_end(self, rank: WatchedRank, status: int | None, now: float) -> None:
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
        cause, what = describe_end(status, oom=rank.oom_kills.any_new())
        self._report(Fault(cause, rank.rank, page.generation, page.step, f"rank {rank.rank} {what}"), rank)

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
        self._report(Fault(cause, first.rank, page.generation, page.step, f"rank {first.rank} {what}"), survivor)
        return True

    async def _write_report(self, fault: Fault, ranks: list[int]) -> None:
        """Writes the report of a hang once the ranks have ended: only then is all written that they know."""
        until = time.monotonic() + _REPORTS_AFTER
        while (
            any(rank in self.ranks and self._is_dying(self.ranks[rank]) for rank in ranks) and time.monotonic() < until
        ):
            await asyncio.sleep(_SELDOM)
        await asyncio.to_thread(write_report, self.job, fault, ranks, self.others.name)

    # -- after a fault ------------------------------------------------------------------------------------------

    @property
    def current(self) -> Fault | None:
        """The fault of the start that the other nodes are in, too; None while there is none."""
        return self.fault if self.fault is not None and self.fault.noticed >= self.others.since else None

    @property
    def _is_noticed(self) -> bool:
        """True if ranks of the start that the other nodes are in, too, have been told to go."""
        return self.current is not None and self.current.cause == "notice"

    def _report(self, fault: Fault, rank: WatchedRank) -> None:
        """Takes up a fault of ``rank``. One that may follow from another node's is held until those have been asked."""
        if self._is_dying(rank):  # it follows from an earlier one
            return
        if is_failed_collective(fault):
            self.others.collective_failed()
        if not self.others.name or not is_held(fault):
            self._announce(fault)
        else:
            self._held = fault if self._held is None else first_of([self._held, fault])
            if self._asking is None or self._asking.done():
                self._asking = asyncio.get_running_loop().create_task(self._ask_others(rank))

    async def _ask_others(self, rank: WatchedRank) -> None:
        answers = await self.others.ask(_ASK)
        held, self._held = self._held, None
        if held is None:
            return
        first = first_of([held, *answers])
        if first is held and not self._is_dying(rank):
            self._announce(held)
        elif self.hear(first) and first is held:
            self.others.tell(held)

    def account(self) -> Beat:
        """Returns what other nodes are told of this node's ranks."""
        pages = {rank.rank: rank.shown() for rank in self.ranks.values()}
        newest = min((page.status.snapshot for page in pages.values()), default=-1)
        paused_at, cleared = self._hang.paused_at, self._hang.cleared
        reached = self._reached if self._is_noticed else -1
        return Beat(pages=pages, paused_at=paused_at, cleared=cleared, newest=newest, reached=reached)

    def known_fault(self) -> Fault | None:
        """Returns the fault of this node's ranks that other nodes should know of, after a look at all of them."""
        self._look_first()
        return self.current or self._held

    def _look_first(self) -> None:
        """Notices what befell this node's ranks before another node's word is taken up, which may follow from that."""
        try:
            self._check_ranks()
        except Exception:
            log.exception("a check of the ranks failed; the next one follows")

    def hear(self, fault: Fault) -> bool:
        """Takes up a fault that concerns ranks of other nodes first. Returns True if nothing was known of it.

        One that comes soon after another fault may be what that one followed from; it is recorded instead, then.
        """
        self._look_first()
        known = self.current
        if any(not self._is_dying(rank) for rank in self.ranks.values()) or (known is None and self.job.trainers()):
            # All of them are in the start that is over, and this is its fault, though this agent may be younger.
            since = max([fault.noticed, self.others.since, *(rank.since for rank in self.ranks.values())])
            self._strike(replace(fault, noticed=since))
            self._from_elsewhere = True
            return True
        if known is not None and fault.what != known.what and follows(known, fault):
            log.error("first cause: %s (%s, step %d)", fault.what, fault.cause, fault.step)
            self._record(fault)
            self.fault = replace(fault, noticed=known.noticed)  # from when on its ranks are dying
            return True
        return False

    def _announce(self, fault: Fault) -> None:
        """Takes up a fault that this agent has noticed first, and tells the other nodes of it.

        A launcher that misses a node ends all ranks before the agents give that node up: a notice names it, too.
        """
        silent = self.others.silent() if fault.cause == "notice" else ""
        if silent:
            fault = replace(fault, what=f"{fault.what} while {silent} was silent")
        self.others.tell(fault)
        self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        """Records a fault and sends it to all ranks."""
        self.fault, self._end_awaited, self._from_elsewhere = fault, True, False
        self._reached, self._afar = -1, None
        for rank in self.ranks.values():
            rank.tell(fault)
        self.urgent(True)
        log.error("%s (%s, step %d)", fault.what, fault.cause, fault.step)
        self._record(fault)
        if fault.cause == "hang":
            self._find_descendants()
            self._reporting = asyncio.get_running_loop().create_task(self._write_report(fault, sorted(self.ranks)))

    def _record(self, fault: Fault) -> None:
        with suppress(OSError):
            write_atomic(self.job.paths.fault, json.dumps(fault.to_json()).encode())

    def _compare_steps(self, dying: list[WatchedRank]) -> None:
        """Notes how far ranks are that go by a notice, and tells them how far others are; all, if a node is missed."""
        noticed, misses = self._is_noticed, self.others.misses()
        if noticed:
            pages = [rank.status() for rank in dying]
            if all(page.stage > TRAINING for page in pages):
                self._reached = max(self._reached, *(page.step + (page.phase != STABLE) for page in pages))
        afar = self.others.reached() if noticed else []
        if (afar, misses) != self._afar and (noticed or misses or self._afar is not None):
            self._afar = afar, misses
            for rank in dying:
                rank.send({"afar": {"reached": max(afar, default=-1), "told": -1 not in afar, "misses": misses}})

    def _find_descendants(self) -> None:
        """Finds data loaders' workers and the like: a killed rank can't end them, and they may hang, too."""
        found = children(rank.process.pid for rank in self.ranks.values())
        for rank in self.ranks.values():
            rank.descendants = found[rank.process.pid]

    def _end_dying_ranks(self, now: float, dying: list[WatchedRank]) -> None:
        """Kills the ranks that can't end themselves, once no other rank needs them any more."""
        busy, idle = False, []
        for rank in dying:
            page, since = rank.status(), now - rank.told_at
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

    def _remove(self, rank: WatchedRank) -> None:
        if self.ranks.get(rank.rank) is rank:
            del self.ranks[rank.rank]
        rank.close()
