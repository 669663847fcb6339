"""Connects this node's agent with those of the other nodes of a start: beats, faults, losses.

Beats are sent and answered by threads; all else happens in the agent's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rekindle.agent.beat import Beat, Page, fault_from_json, fault_to_json
from rekindle.agent.monitor import RankMonitor
from rekindle.agent.neighbour import Neighbour
from rekindle.agent.node_safety import NodeSafety
from rekindle.agent.others import Others, Roll
from rekindle.agent.roll_call import RollCall
from rekindle.errors import FormatError
from rekindle.memory.elsewhere import Elsewhere
from rekindle.memory.fault import LOST, Fault
from rekindle.memory.incidents import read_start
from rekindle.memory.job import JobInfo
from rekindle.memory.nodes import Node, Nodes, describe_node
from rekindle.memory.status import DONE, describe_status
from rekindle.peers.membership import Event, Membership
from rekindle.peers.memory import PeerMemory
from rekindle.peers.wire import Credentials, Link, WireError

__all__ = ["VERBS", "Mesh"]

log = logging.getLogger("rekindle.agent")

T = TypeVar("T")

VERBS = ("beat", "fault", "asked", "account")
"""Verbs of the messages that the agents of a start send each other."""
_NEWER = 0.2
"""Seconds by which a pause must be later than the one that is known. What this node has told comes back to it, a little
late."""
_ANSWER = 1.0
"""Seconds that the event loop gets to answer another node. Whoever asks waits for less."""
_GONE = 30.0
"""Seconds without a sign of a node after which its partner may write to storage what it keeps of it. The node may be
there, and write that itself."""


class Mesh(Others):
    """The other nodes of one start. Used in the event loop, except for ``handle``, which the server's threads call."""

    def __init__(self, nodes: Nodes, monitor: RankMonitor, durable: Callable[[], int], info: JobInfo) -> None:
        """``durable`` returns the newest step that this node has seen on storage; -1 if it is unknown.

        ``info`` tells what the start was told. Raises RuntimeError if no thread can be had.
        """
        self.nodes, self.name, now = nodes, nodes.here.name, time.monotonic()
        # A fault may be found before this: a rank that dies at once, an agent that follows a dead one.
        start = read_start(monitor.job)
        self.since = start.formed if start is not None and start.start == nodes.start else now
        self.patience = info.patience
        self._monitor, self._durable = monitor, durable
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        """Guards the membership and the beats."""
        absent = [number for number, node in enumerate(nodes.nodes) if not node.port]
        self._membership = Membership(nodes.own, len(nodes.nodes), now, info.patience, absent=absent)
        self._safety = NodeSafety(monitor.job, nodes, info)
        self._unsafe = False
        """True once that has failed."""
        self._beats: dict[int, Beat] = {}
        self._guarded: set[int] = set()
        """Numbers of the nodes that have had guarded ranks."""
        self._paused_at = -math.inf
        """Newest time at which a rank of another node is known to have paused, as a neighbour has told."""
        self._unsettled_at = -math.inf
        """Newest time at which another node is known not to have heard all of its own, as a neighbour has told."""
        self._numbers = {node.name: number for number, node in enumerate(nodes.nodes)}
        self._changed = dict.fromkeys(self._membership.neighbours, now)
        """Time at which the state of each neighbour last changed."""
        self._step = -1
        unheard = [
            node
            for number, node in enumerate(nodes.nodes)
            if node.port and number != nodes.own and number not in self._membership.neighbours
        ]
        self._roll_call = RollCall(nodes, unheard, self._message("account"), self._hear_pauses)
        credentials = Credentials(nodes.secret, nodes.start, self.name)
        self._neighbours: dict[int, Neighbour] = {}
        try:
            for number in self._membership.neighbours:
                note, node = partial(self._note, number), nodes.nodes[number]
                refused, closed = partial(note, Membership.refused), partial(note, Membership.closed)
                self._neighbours[number] = Neighbour(node, credentials, refused, closed)
            self._safety.start()
        except RuntimeError:
            self.close()  # the threads that could be had
            raise

    def close(self) -> None:
        """Ends all links that this node has made, and its copies of another one's steps."""
        self._safety.close()
        for neighbour in self._neighbours.values():
            neighbour.close()

    # -- being told, in threads of the server -------------------------------------------------------------------

    def handle(self, link: Link, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a message of another node. Raises WireError for one that makes no sense."""
        number = self._numbers.get(link.peer)
        if message.get("start") != self.nodes.start or number is None:
            raise WireError("this node trains in another start of the job")
        try:
            if message["verb"] == "beat":
                self._hear_beat(number, Beat.from_json(message))
            elif message["verb"] == "fault":
                self._loop.call_soon_threadsafe(self._hear_fault, fault_from_json(message))
            elif message["verb"] == "account":
                return self._in_loop(self._account).to_json()
            else:
                fault = self._in_loop(self._monitor.known_fault)
                return {"known": None if fault is None else fault_to_json(fault)}
        except (FormatError, ValueError, KeyError, TypeError) as error:
            raise WireError(f"the message makes no sense: {error!r}") from error
        return {}

    def _hear_beat(self, number: int, beat: Beat) -> None:
        self._safety.hear(number, beat.common)
        with self._lock:
            self._beats[number] = beat
            if beat.pages:
                self._guarded.add(number)
            self._membership.heard(number, time.monotonic(), beat.hears)
        self._hear_pauses(beat)

    def _hear_pauses(self, beat: Beat) -> None:
        with self._lock:
            self._paused_at = _newer(self._paused_at, beat.paused_at)
            self._unsettled_at = _newer(self._unsettled_at, beat.unsettled_at)

    def _in_loop(self, look: Callable[[], T]) -> T:
        """Has the event loop look at the ranks, and returns what it sees."""
        seen: Future[T] = Future()

        def run() -> None:
            try:
                seen.set_result(look())
            except Exception as error:
                seen.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        try:
            return seen.result(_ANSWER)
        except FutureTimeoutError:
            raise WireError("this node's agent has no time to look at its ranks") from None

    def _hear_fault(self, fault: Fault) -> None:
        former = fault.generation < self.nodes.generation
        if former or self._monitor.others is not self or not self._trains():  # the next start has begun meanwhile
            return
        if self._monitor.hear(fault) and len(self._neighbours) + 1 < len(self.nodes.nodes):
            self.tell(fault)  # who told this node does not know all others

    def _trains(self) -> bool:
        """True unless a trainer has written down another start. An agent that was stopped may not have read of it."""
        info = None
        with suppress(OSError, FormatError):
            info = self._monitor.job.read_job()
        return info is None or info.start == self.nodes.start

    def _note(self, number: int, note: Callable[[Membership, int, float], None]) -> None:
        with self._lock:
            note(self._membership, number, time.monotonic())

    # -- telling ------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Sends a beat to each neighbour, and acts on what has changed. To be called each ``BEAT_EVERY`` seconds."""
        account = self._account()
        step = max((page.status.step for page in account.pages.values()), default=-1)
        with self._lock:
            if step > self._step:
                self._step = step
                self._membership.progressed(now)
            events = self._membership.tick(now)
            hears = self._membership.hears(now)
        self._keep_safe(now, account.newest)
        common = self._safety.told
        account = replace(account, hears=hears, durable=self._durable(), common=common)
        beat = self._message("beat", account.to_json())
        for neighbour in self._neighbours.values():
            neighbour.beat(beat)
        for event in events:
            self._changed[event.node] = now
            self._act_on(event)

    def _account(self) -> Beat:
        """Returns what this node knows of its ranks, and of pauses.

        A pause holds up all ranks, and not all nodes of a large job hear each other: it is told on. So is a doubt.
        """
        account = self._monitor.account()
        paused_at = max(self.paused_at(), account.paused_at or -math.inf)
        return replace(account, paused_at=_if_ever(paused_at), unsettled_at=_if_ever(self.unsettled_at()))

    def _keep_safe(self, now: float, newest: int) -> None:
        """Does this node's part in keeping steps safe. The lowest-numbered node leads, of those that may be there."""
        states = {number: self._membership.state(number) for number in self._neighbours}
        leads = all(number > self.nodes.own for number, state in states.items() if state in ("there", "unknown"))
        calm, urgent = set(states.values()) <= {"there"}, self._monitor.current is not None
        try:
            self._safety.tick(now, newest, leads=leads, calm=calm, urgent=urgent)
        except Exception:  # without beats this node would seem to be lost
            if not self._unsafe:
                log.exception("newer steps are not safe from the loss of a node")
            self._unsafe = True

    def _message(self, verb: str, fields: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"verb": verb, "start": self.nodes.start, **(fields or {})}

    def tell(self, fault: Fault) -> None:
        if fault.generation < self.nodes.generation:  # what an agent that was stopped reads first is of a former start
            return
        for neighbour in self._neighbours.values():
            neighbour.tell(lambda: self._message("fault", fault_to_json(fault)))

    async def ask(self, seconds: float) -> list[Fault]:
        asked = [
            asyncio.wrap_future(neighbour.ask(lambda: self._message("asked")))
            for number, neighbour in self._neighbours.items()
            if self._membership.state(number) == "there"
        ]
        if asked:
            await asyncio.wait(asked, timeout=seconds)
        found = []
        for reply in asked:
            if reply.done() and not reply.cancelled():
                with suppress(FormatError, ValueError, KeyError, TypeError):  # no reply, or nothing known
                    found.append(fault_from_json((reply.result() or {})["known"]))
            else:
                reply.cancel()
        return found

    def collective_failed(self) -> None:
        with self._lock:
            self._membership.collective_failed(time.monotonic())

    def _act_on(self, event: Event) -> None:
        node = self.nodes.nodes[event.node]
        words = describe_node(node.name, node.ranks)
        if event.kind == "silent":
            log.warning("%s is silent: %s", words, event.why)
        elif event.kind == "back":
            log.warning("%s is back: %s", words, event.why)
        elif event.kind == "agent gone":
            log.warning("%s has no agent: %s", words, event.why)
        elif not self._lose(event.node, f"{words} is lost: {event.why}"):
            log.warning("%s is lost: %s", words, event.why)

    def _lose(self, number: int, what: str) -> bool:
        """Announces that a node is lost. Returns False if its ranks had ended, or nothing follows from it.

        Its agent tells of ranks that end in a fault, so those that only left had ended well.
        """
        beat = self._beats.get(number, Beat())
        statuses = [page.status for page in beat.pages.values()]
        if number in self._guarded and all(status.phase == DONE for status in statuses):
            return False
        step = min((status.step for status in statuses), default=-1)
        generation = max((status.generation for status in statuses), default=self.nodes.generation)
        fault = Fault(LOST, self.nodes.nodes[number].ranks[0], generation, step, what)
        if not self._monitor.hear(fault):
            return False
        self.tell(fault)
        return True

    # -- what the others are like -------------------------------------------------------------------------------

    def pages(self) -> dict[int, Page]:
        return {rank: page for number in self._speaking() for rank, page in self._beats[number].pages.items()}

    def _speaking(self) -> list[int]:
        """Returns the nodes that are heard. Pages of a silent one are old: its ranks would seem to stand still."""
        return [number for number in self._beats if self._membership.state(number) == "there"]

    def silent(self) -> str:
        away = (node for node in self._neighbours if self._membership.state(node) in ("silent", "lost"))
        return next((describe_node(node.name, node.ranks) for node in map(self.nodes.nodes.__getitem__, away)), "")

    def misses(self) -> bool:
        return self._membership.misses()

    def reached(self) -> list[int]:
        return [self._beats[number].reached for number in self._speaking() if number in self._guarded]

    def paused_at(self) -> float:
        return self._paused_at

    def unsettled_at(self) -> float:
        """Returns now while a neighbour is not heard that may be back, or just came back: who holds up whom?"""
        now, members = time.monotonic(), self._membership
        if members.settles():
            return now
        for number, changed in self._changed.items():
            away = members.state(number) in ("silent", "agent gone", "unknown")
            if away and now - changed < members.patience:
                return now
        return self._unsettled_at

    def call_roll(self) -> Roll | None:
        return self._roll_call.answer()

    def judges(self) -> bool:
        return all(number > self.nodes.own for number in self._neighbours if self._membership.state(number) == "there")

    def cleared(self) -> bool:
        return all(self._beats[number].cleared for number in self._speaking() if self._beats[number].pages)

    def elsewhere(self) -> Elsewhere:
        return PeerMemory(self.nodes)

    def lost_ranks(self) -> Collection[int]:
        source = self.nodes.source
        gone = source in self._neighbours and self._membership.state(source) != "there"
        return self.nodes.nodes[source].ranks if gone and time.monotonic() > self._changed[source] + _GONE else ()

    def safety(self) -> dict[str, Any]:
        return self._safety.status()

    def status(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        own = replace(self._monitor.account(), durable=self._durable(), common=self._safety.told)
        return [
            self._describe_node(number, node, own if number == self.nodes.own else self._beats.get(number, Beat()), now)
            for number, node in enumerate(self.nodes.nodes)
        ]

    def _describe_node(self, number: int, node: Node, beat: Beat, now: float) -> dict[str, Any]:
        here = number == self.nodes.own
        return {
            "name": node.name,
            "ranks": node.ranks,
            "state": "here" if here else self._membership.state(number),
            "steps": {rank: page.status.step for rank, page in sorted(beat.pages.items())},
            "pages": {rank: describe_status(page.status) for rank, page in sorted(beat.pages.items())},
            "newest": None if beat.newest < 0 else beat.newest,
            "durable": None if beat.durable < 0 else beat.durable,
            "safe": None if beat.common.safe < 0 else beat.common.safe,
            "seconds": None if here else self._membership.silence(number, now),
        }


def _newer(known: float, told: float | None) -> float:
    """Returns the time that a node tells of if it is not just the known one that comes back, else that."""
    return told if told is not None and told > known + _NEWER else known


def _if_ever(at: float) -> float | None:
    return None if at == -math.inf else at
