"""Two nodes that keep steps together: real memory, real copies, and beats that the test carries."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.agent import copier
from rekindle.agent.node_safety import NodeSafety
from rekindle.errors import MemoryStoreError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.nodes import Node, Nodes
from rekindle.memory.slots import NotReadyError, Slots
from rekindle.peers import files, wire
from rekindle.peers.server import PeerServer
from rekindle.peers.snapshots import snapshot_handlers
from rekindle.peers.wire import Credentials, Link
from tests.conftest import make_shard
from tests.memory.saved import FILE, assert_sound, content, save, steps

START = Incarnation(1, "a" * 16)
HOST, SECRET = "127.0.0.1", bytes(range(32))


class Host:
    """A node with one rank, and its part in keeping steps safe."""

    def __init__(self, memory: Path, number: int, stack: ExitStack) -> None:
        (memory / f"node-{number}").mkdir(0o700)
        self.job, self.number = JobDir.of("/somewhere/run", memory_base(memory / f"node-{number}")), number
        self.job.create()
        self.slots = Slots(self.job, number, 2, [number])
        stack.callback(self.slots.close)
        self.serve(0)
        stack.callback(lambda: self.server.close())

    def serve(self, port: int) -> None:
        """Gives other nodes what is in memory."""
        listener = socket.create_server((HOST, port))
        self.port = listener.getsockname()[1]
        credentials = Credentials(SECRET, START.id, f"n{self.number}")
        self.server = PeerServer(listener, lambda: credentials, snapshot_handlers(self.job))
        self.server.start()


class Hosts:
    """Both nodes. The first one leads."""

    def __init__(self, memory: Path, stack: ExitStack) -> None:
        self.hosts = [Host(memory, number, stack) for number in (0, 1)]
        self.info = JobInfo("/somewhere/run", [0], 2, 2, None, 600.0, persist_seconds=30.0, start=START.id, host=HOST)
        self.nodes = [Node(f"n{host.number}", HOST, host.port, [host.number]) for host in self.hosts]
        self._stack = stack
        self.safeties: list[NodeSafety] = []

    def begin(self, **settings: object) -> None:
        """Begins both agents, in place of those before."""
        for safety in self.safeties:
            safety.close()
        info = replace(self.info, **settings)
        self.safeties = [self.begin_one(host, info) for host in self.hosts]

    def begin_one(self, host: Host, info: JobInfo) -> NodeSafety:
        safety = NodeSafety(host.job, Nodes(START.id, 1, SECRET, host.number, self.nodes), info)
        safety.start()
        self._stack.callback(safety.close)
        return safety

    def save(self, *numbers: int) -> None:
        for step in numbers:
            for host in self.hosts:
                save(host.slots, step, START)

    def run(self, until: Callable[[], object]) -> None:
        """Has beats go to and fro until something has come true."""
        over = time.monotonic() + 60
        while not until():
            assert time.monotonic() < over, [safety.told for safety in self.safeties]
            self.tick(time.monotonic())
            time.sleep(0.02)

    def tick(self, now: float) -> None:
        """Has both agents tick once, and send their beats."""
        for number, safety in enumerate(self.safeties):
            safety.tick(now, -1, leads=number == 0, calm=True, urgent=False)
            self.safeties[1 - number].hear(number, safety.told)

    def safe(self) -> list[int]:
        """The newest safe steps, as trainers read them."""
        notes = [host.job.notes.common() for host in self.hosts]
        return [-1 if note is None else note.safe for note in notes]


@pytest.fixture
def hosts(memory: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(memory, stack)


def test_each_node_has_a_copy_of_the_others_part_of_a_step_that_later_saves_leave_alone(hosts: Hosts) -> None:
    hosts.begin()
    hosts.save(1)
    hosts.run(lambda: hosts.safe() == [1, 1])
    assert [safety.status() for safety in hosts.safeties] == [{"node_safe": 1, "copying": None}] * 2
    hosts.save(2, 3, 4, 5, 6)
    for host in hosts.hosts:
        assert {1, 6} <= set(steps(host.job, host.number))
        assert_sound(host.job, 1, host.number, 2)
        assert_sound(host.job.copies, 1, 1 - host.number, 2)
    hosts.run(lambda: hosts.safe() == [6, 6])
    for host in hosts.hosts:
        assert_sound(host.job.copies, 6, 1 - host.number, 2)


def test_agents_that_begin_anew_go_on_where_the_others_have_ended(hosts: Hosts) -> None:
    hosts.begin()
    hosts.save(1)
    hosts.run(lambda: hosts.safe() == [1, 1])
    hosts.begin()
    assert [safety.told.safe for safety in hosts.safeties] == [1, 1] == hosts.safe()
    hosts.save(2)
    hosts.run(lambda: hosts.safe() == [2, 2])


def test_a_copy_waits_for_the_agent_that_follows_one_that_was_killed(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both nodes still have the step: it is not given up, which would take seconds until another one is named."""
    refused = []

    def connect(*args: object) -> Link:
        try:
            return wire.connect(*args)
        except ConnectionRefusedError:
            refused.append(args)
            raise

    monkeypatch.setattr(files, "connect", connect)
    monkeypatch.setattr(copier, "AGENT_AWAY", 60.0)
    hosts.begin()
    hosts.save(1)
    hosts.run(lambda: hosts.safe() == [1, 1])
    killed = hosts.hosts[1]
    killed.server.close()
    hosts.save(2)
    hosts.run(lambda: refused and hosts.safeties[1].told.step == 2)
    named = hosts.safeties[0].told
    assert (named.step, named.failed) == (2, False)
    hosts.safeties[1].close()
    killed.serve(killed.port)
    hosts.safeties[1] = hosts.begin_one(killed, hosts.info)
    hosts.run(lambda: hosts.safe() == [2, 2])
    assert [safety.told.round for safety in hosts.safeties] == [named.round] * 2


def test_the_first_step_is_marked_for_storage_and_the_next_when_its_time_has_come(hosts: Hosts) -> None:
    def drained() -> list[int]:
        return [note.drain for host in hosts.hosts if (note := host.job.notes.common()) is not None]

    hosts.begin()
    hosts.save(1)
    hosts.run(lambda: drained() == [1, 1])
    hosts.save(2)
    hosts.run(lambda: hosts.safe() == [2, 2])
    assert drained() == [1, 1]
    hosts.begin(persist_seconds=0.5)
    hosts.run(lambda: drained() == [2, 2])


@pytest.mark.parametrize("how", ["setting", "absent"])
def test_where_nothing_is_copied_steps_are_marked_for_storage_all_the_same(hosts: Hosts, how: str) -> None:
    if how == "absent":
        hosts.nodes[1] = replace(hosts.nodes[1], host="", port=0)
    hosts.begin(peer_every=None if how == "setting" else "auto")
    hosts.save(1)
    hosts.run(lambda: hosts.safeties[0].told.drain == 1)
    assert hosts.safe()[0] == -1 and list(hosts.hosts[0].job.copies.snapshots.shard_ids()) == []


def test_a_save_that_waits_hurries_the_copy_of_its_step(hosts: Hosts) -> None:
    hosts.begin(peer_limit=1)
    hosts.save(1)
    hosts.run(lambda: hosts.safe() == [1, 1])
    hosts.save(2)  # without the note it would have to wait for hours
    hosts.hosts[1].job.notes.write_wanted(2)
    hosts.run(lambda: hosts.safe() == [2, 2])


def save_as_step_does(host: Host, step: int) -> None:
    """Saves without a wait for room: a step may be left out, or be for storage."""
    receipt, data = make_shard(ShardId(step, host.number, 2, START), {"x": content(step, host.number)})
    with suppress(NotReadyError, MemoryStoreError):
        slot = host.slots.acquire(step, START, receipt.file_bytes, wait=False)
        assert slot.map is not None
        slot.map[: len(data)] = data
        host.slots.commit(slot, receipt.stamp, receipt.raw)


@pytest.mark.parametrize("room", [2, 3, 4])
def test_however_little_room_there_is_what_is_called_safe_is_there(hosts: Hosts, room: int) -> None:
    """Saves go on meanwhile, on a virtual clock: a step each 0.2 s. The first node has all the room that it wants."""
    hosts.hosts[1].slots.limit = room * FILE + 100
    hosts.begin()
    for step in range(1, 101):
        for host in hosts.hosts:
            save_as_step_does(host, step)
        for tick in (0.0, 0.1):
            hosts.tick(0.2 * step + tick)
            time.sleep(0.002)  # the copiers' threads don't know of that clock
            newest = max(hosts.safe())
            for host in hosts.hosts if newest >= 0 else ():
                assert newest in steps(host.job, host.number), f"of step {step} on node {host.number}"
                assert newest in steps(host.job.copies, 1 - host.number), f"of step {step} on node {host.number}"
    assert max(steps(hosts.hosts[1].job, 1)) > 90, "saves go on"
    assert room == 2 or min(hosts.safe()) > 20, "steps come to be safe where there is room for a third one"
