"""Launchers of several nodes in one thread, with a clock and a network that are made up."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable

from rekindle.launch.rendezvous.links import Identity
from rekindle.launch.rendezvous.node import Node
from rekindle.launch.rendezvous.wire import Address, Round, decode, encode

__all__ = ["PORT", "Launcher", "Network"]

PORT = 29400
_UNANSWERED = 3.0
"""Seconds after which a connection that nobody takes or refuses is given up."""


class Launcher:
    """A node's launcher with torchrun's behaviour: it runs ranks, looks for a reason to end them, and meets again."""

    def __init__(
        self, network: Network, host: str, *, least: int, most: int, endpoints: tuple[Address, ...], job: str
    ) -> None:
        self.network, self.host = network, host
        own = tuple(each for each in endpoints if each.host == host)
        self.address = own[0] if own else Address(host, next(network.ports))
        self.id = f"{network.chance.getrandbits(64):016x}"
        me = Identity(job, self.id, self.address, least, most, 1.0, endpoints, own)
        self.node = Node(me, network.now)
        self.alive = True
        self.has_power = True
        self.ended = False
        """True once torchrun would have left the job."""
        self.rounds: list[Round] = []
        self.well: list[int] = []
        """The numbers of those whose ranks have ended well."""
        self.runs = False
        self.stops_at: float | None = None
        self.is_stuck = False
        """True while its ranks can't be ended, not by SIGKILL either."""
        self.ports = itertools.count(1000)

    def begin(self) -> None:
        self._want()
        self.network.at(0.0, self._tick)

    def fail(self, pause: int = 0) -> None:
        """Its ranks end by themselves. They are to be started again after a pause."""
        if self.runs and not self.is_stuck:
            self.runs = False
            self._want(pause)

    def end_well(self) -> None:
        """Its ranks have ended well. It waits for those of the others."""
        if self.runs and self.rounds[-1].number not in self.well:
            self.well.append(self.rounds[-1].number)
            self.act(lambda now: self.node.done())

    def finish(self) -> None:
        """It leaves a job that is done."""
        self.ended = True
        self.act(lambda now: self.node.bye(True, now))

    def act(self, event: Callable[[float], object]) -> None:
        """Lets the state machine take an event, and does what it asks for."""
        if not self.alive:
            return
        event(self.network.now)
        self.node.settle(self.network.now)
        while self.node.output:
            done, self.node.output = self.node.output, []
            for output in done:
                self.network.carry(self, output.act, output.link, output.address, output.message)
        newest = self.node.round
        if newest is not None and (not self.rounds or newest.number > self.rounds[-1].number):
            assert not self.runs
            self.rounds.append(newest)
            self.runs, self.stops_at = True, None

    def _want(self, pause: int = 0) -> None:
        store = Address(self.host, next(self.ports))
        self.act(lambda now: self.node.want(store, now, pause))

    def _tick(self) -> None:
        self.act(self.node.tick)
        if not self.alive:
            return
        if (
            self.runs
            and not self.ended
            and self.node.news is not None
            and self.node.news.waiting
            and self.stops_at is None
        ):
            self.stops_at = self.network.now + self.network.chance.uniform(0.0, 0.5)
        if self.stops_at is not None and self.network.now >= self.stops_at and not self.is_stuck:
            self.stops_at = None
            self.fail()
        self.network.at(0.1, self._tick)


class Network:
    """The launchers, their connections, and the time. A cut link keeps what is sent, as TCP does."""

    def __init__(self, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.ports = itertools.count(30000)
        self.launchers: list[Launcher] = []
        self.slowest = 0.01
        """Seconds that a message takes at most."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ends: dict[tuple[Launcher, int], tuple[Launcher, int]] = {}
        """The other end of each connection."""
        self._sent: dict[tuple[Launcher, int], deque[Callable[[], None]]] = defaultdict(deque)
        """What is on its way from each end of a connection, in order."""
        self._apart: set[str] = set()
        """Hosts that are cut off from all others, but not from each other."""

    def add(self, host: str, *, least: int = 2, most: int = 2, at: str = "a", job: str = "job") -> Launcher:
        """Starts a launcher. ``at`` are the hosts of its endpoints."""
        endpoints = tuple(Address(name, PORT) for name in at.split(","))
        made = Launcher(self, host, least=least, most=most, endpoints=endpoints, job=job)
        self.launchers.append(made)
        made.begin()
        return made

    def at(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), act))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until

    def run_until(self, holds: Callable[[], bool], limit: float = 60.0) -> float:
        """Returns the seconds until ``holds`` does."""
        began = self.now
        while not holds():
            assert self.now - began < limit, "it did not come to be"
            self.run(0.05)
        return self.now - began

    def kill(self, launcher: Launcher) -> None:
        """Ends a launcher. The others hear that its connections are closed."""
        launcher.alive = False
        for near, (other, link) in list(self._ends.items()):
            if near[0] is launcher:
                self._close(near, other, link)

    def sever(self, launcher: Launcher) -> None:
        """Breaks all connections of a launcher, which lives on."""
        for near, (other, link) in list(self._ends.items()):
            if near[0] is launcher:
                self._close(near, other, link)
                launcher.act(lambda now, own=near[1]: launcher.node.lost(own, now))  # type: ignore[misc]

    def lose_power(self, launcher: Launcher) -> None:
        """Ends a launcher. Nobody hears anything from it any more."""
        launcher.alive = launcher.has_power = False

    def cut(self, *hosts: str) -> None:
        self._apart = set(hosts)

    def carry(self, source: Launcher, act: str, link: int, address: Address | None, message: object) -> None:
        if act == "connect" and address is not None:
            self.at(self._delay(), lambda: self._connect(source, link, address))
        elif (source, link) in self._ends:
            other, far = self._ends[source, link]
            if act == "drop":
                self._close((source, link), other, far)
            else:
                line = encode(message)  # type: ignore[arg-type]
                self._deliver((source, link), other, lambda now: other.node.received(far, decode(line), now))

    def _delay(self) -> float:
        return self.chance.uniform(0.0, self.slowest)

    def _parted(self, one: Launcher, other: Launcher) -> bool:
        return (one.host in self._apart) != (other.host in self._apart)

    def _connect(self, source: Launcher, link: int, address: Address) -> None:
        there = [launcher for launcher in self.launchers if launcher.host == address.host]
        found = [launcher for launcher in there if launcher.alive and launcher.address == address]
        dark = not found and any(not launcher.has_power for launcher in there)
        if dark or any(self._parted(source, launcher) for launcher in there):
            self.at(_UNANSWERED, lambda: source.act(lambda now: source.node.lost(link, now)))
        elif not found:
            self.at(self._delay(), lambda: source.act(lambda now: source.node.lost(link, now)))
        else:
            other = found[0]
            far = other.node.accept(self.now)
            self._ends[source, link], self._ends[other, far] = (other, far), (source, link)
            source.act(lambda now: source.node.connected(link, now))

    def _deliver(self, near: tuple[Launcher, int], other: Launcher, event: Callable[[float], object]) -> None:
        """Lets an event happen at the other end, after all that was sent before over this connection."""
        self._sent[near].append(lambda: other.act(event))

        def arrive() -> None:
            if self._parted(near[0], other):
                self.at(0.05, arrive)
            else:
                self._sent[near].popleft()()

        self.at(self._delay(), arrive)

    def _close(self, near: tuple[Launcher, int], other: Launcher, far: int) -> None:
        self._ends.pop(near, None)
        self._ends.pop((other, far), None)
        self._deliver(near, other, lambda now: other.node.lost(far, now))
