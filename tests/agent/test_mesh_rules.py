"""Conclusions that one agent draws from what the others tell, or don't: no node comes up here but the own one."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from rekindle.agent.beat import Beat, Page
from rekindle.agent.hang import HangWatch
from rekindle.agent.mesh import VERBS, Mesh
from rekindle.agent.monitor import RankMonitor
from rekindle.agent.others import Others
from rekindle.format.lineage import Incarnation
from rekindle.memory.fault import Fault
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.memory.nodes import Node, Nodes
from rekindle.memory.status import DONE, STABLE, TRAINING, Status
from rekindle.peers.membership import BEAT_EVERY
from rekindle.peers.server import Handler, PeerServer, listen
from rekindle.peers.wire import Credentials, Link

NEWS = Fault("signal", 1, 1, 7, "rank 1 was killed by SIGKILL")


def page(step: int, age: float = 0.0, phase: int = STABLE) -> Page:
    progress = time.monotonic_ns() - int(age * 1e9)
    return Page(Status(1, 1, phase, TRAINING, 0, step, step, -1, 0.02, progress, "", 0.0), 0.0, False)


class Node0:
    """The agent of the first node, whose rank trains unguarded; the time of its mesh is what the test says it is."""

    def __init__(self, place: Path, stack: ExitStack, count: int) -> None:
        self.job = JobDir(place / "job")
        self.job.create()
        trainer = Lock(self.job.paths.rank_lock(0))
        assert trainer.acquire(10.0)
        stack.callback(trainer.release)
        self.mute = stack.enter_context(listen("127.0.0.1", 0))
        """Takes connections of agents, and never answers."""
        self.start, self.count, self.now = Incarnation.begin(1).id, count, time.monotonic()
        self.write_job(self.start)
        self.monitor = RankMonitor(self.job, lambda on: None)

    def write_job(self, start: str) -> None:
        self.job.write_job(JobInfo(str(self.job.path), [0], self.count, 2, None, 600.0, start=start, host="127.0.0.1"))

    def join(self, ports: dict[int, int] | None = None, own: int = 0) -> Mesh:
        port = self.mute.getsockname()[1]
        nodes = [Node(f"n{n}", "127.0.0.1", (ports or {}).get(n, port), [n]) for n in range(self.count)]
        self.nodes = Nodes(self.start, 1, os.urandom(32), own, nodes)
        self.monitor.others = mesh = self.mesh(self.nodes, self.monitor)
        return mesh

    def mesh(self, nodes: Nodes, monitor: RankMonitor) -> Mesh:
        info = self.job.read_job()
        assert info is not None
        return Mesh(nodes, monitor, lambda: -1, info)

    def serve(self, listener: socket.socket, number: int, handle: Handler) -> PeerServer:
        """Serves as the agent of another node."""
        credentials = Credentials(self.nodes.secret, self.nodes.start, f"n{number}")
        server = PeerServer(listener, lambda: credentials, dict.fromkeys(VERBS, handle))
        server.start()
        return server

    @contextmanager
    def telling(self, number: int) -> Iterator[tuple[Mesh, Queue[dict[str, Any]]]]:
        """Gives the mesh, and what it tells another node."""
        told: Queue[dict[str, Any]] = Queue()

        def keep(link: Link, message: dict[str, Any]) -> dict[str, Any]:
            told.put(message)
            return {}

        listener = listen("127.0.0.1", 0)
        mesh = self.join({number: listener.getsockname()[1]})
        server = self.serve(listener, number, keep)
        try:
            yield mesh, told
        finally:
            mesh.close()
            server.close()

    def let_pass(self, mesh: Mesh, seconds: float) -> None:
        """Has the mesh see so many seconds pass, in which no beat comes."""
        for _ in range(round(seconds / BEAT_EVERY)):
            self.now += BEAT_EVERY
            mesh.tick(self.now)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., None]]:
    def run(check: Callable[[Node0], Awaitable[None] | None], count: int = 2) -> None:
        async def main() -> None:
            with ExitStack() as stack:
                more = check(Node0(tmp_path, stack, count))
                if more is not None:
                    await more

        asyncio.run(main())

    yield run


def hear(mesh: Mesh, number: int, beat: Beat) -> None:
    """Has the mesh take up a beat, as a thread of its server does."""
    mesh._hear_beat(number, beat)


def test_old_pages_of_a_silent_node_are_not_judged(run: Callable[..., None]) -> None:
    def check(node: Node0) -> None:
        mesh = node.join()
        hear(mesh, 1, Beat(pages={1: page(7)}))
        node.let_pass(mesh, 0.5)
        assert list(mesh.pages()) == [1]
        node.let_pass(mesh, 1.0)
        assert mesh.status()[1]["state"] == "silent" and not mesh.pages()
        mesh.close()

    run(check)


@pytest.mark.parametrize("left", [True, False])
def test_a_node_that_goes_after_its_ranks_have_left_is_no_loss(run: Callable[..., None], *, left: bool) -> None:
    def check(node: Node0) -> None:
        mesh = node.join()
        hear(mesh, 1, Beat(pages={1: page(7)}))
        if left:
            hear(mesh, 1, Beat())
        node.let_pass(mesh, 12.0)
        assert mesh.status()[1]["state"] == "lost"
        assert (node.monitor.fault is None) is left
        mesh.close()

    run(check)


def test_a_fault_from_before_this_agent_came_up_is_taken_up_once(run: Callable[..., None]) -> None:
    def check(node: Node0) -> None:
        mesh = node.join()
        assert node.monitor.hear(NEWS) and not node.monitor.hear(NEWS)
        assert node.monitor.known_fault() is not None
        mesh.close()

    assert NEWS.noticed < time.monotonic()
    run(check)


@pytest.mark.parametrize("over", [True, False])
def test_late_news_do_not_strike_the_next_start(run: Callable[..., None], *, over: bool) -> None:
    def check(node: Node0) -> None:
        mesh = node.join()
        if over:
            node.write_job(Incarnation.begin(2).id)  # the agent has not looked yet
        mesh._hear_fault(NEWS)
        assert (node.monitor.fault is None) is over
        mesh.close()

    run(check)


def test_a_fault_of_a_former_start_is_neither_taken_up_nor_told(run: Callable[..., None]) -> None:
    """An agent that was stopped learns of it first when the next start trains."""
    former = replace(NEWS, generation=0)

    def check(node: Node0) -> None:
        with node.telling(1) as (mesh, told):
            mesh._hear_fault(former)
            assert node.monitor.fault is None
            mesh.tell(former)
            mesh.tell(NEWS)
            assert told.get(timeout=30.0)["fault"]["generation"] == NEWS.generation

    run(check)


def test_a_pause_is_told_to_nodes_that_do_not_hear_the_one_that_pauses(run: Callable[..., None]) -> None:
    def check(node: Node0) -> None:
        with node.telling(1) as (mesh, told):
            at = time.monotonic()
            hear(mesh, 19, Beat(paused_at=at))  # node 1 is no neighbour of node 19 in a job of 20
            hear(mesh, 1, Beat(paused_at=at + 0.1))  # an echo
            assert mesh._paused_at == at
            mesh.tick(node.now)
            assert 0.0 <= told.get(timeout=30.0)["paused"] < 30.0

    run(check, 20)


def test_a_doubt_is_told_on_as_one(run: Callable[..., None]) -> None:
    def check(node: Node0) -> None:
        with node.telling(1) as (mesh, told):
            at = time.monotonic()
            hear(mesh, 19, Beat(unsettled_at=at))
            hear(mesh, 1, Beat(unsettled_at=at + 0.1))  # an echo
            mesh._changed = dict.fromkeys(mesh._changed, -math.inf)  # as long after the start
            assert mesh.unsettled_at() == at
            mesh.tick(node.now)
            message = told.get(timeout=30.0)
            assert message["paused"] is None and 0.0 < message["unsettled"] < 30.0

    run(check, 20)


def test_a_fault_is_told_to_nodes_that_do_not_hear_the_one_that_has_it(run: Callable[..., None]) -> None:
    """Nobody there would ask: a notice makes no rank fail."""

    def check(node: Node0) -> None:
        with node.telling(1) as (mesh, told):
            mesh._hear_fault(replace(NEWS, cause="notice"))
            assert told.get(timeout=30.0)["fault"]["cause"] == "notice"

    run(check, 20)


def test_a_node_that_is_asked_names_the_fault_that_its_ranks_are_dying_of(run: Callable[..., None]) -> None:
    async def check(node: Node0) -> None:
        listener = listen("127.0.0.1", 0)
        mesh = node.join({1: listener.getsockname()[1]})
        there = RankMonitor(node.job, lambda on: None)
        there.others = asked = node.mesh(replace(node.nodes, own=1), there)
        server = node.serve(listener, 1, asked.handle)
        try:
            assert there.hear(NEWS)
            hear(mesh, 1, Beat())
            node.let_pass(mesh, BEAT_EVERY)
            for _ in range(10):  # on a busy machine the answer may come too late
                found = await mesh.ask(60.0)
                if found:
                    break
            assert [fault.what for fault in found] == [NEWS.what]
        finally:
            mesh.close()
            asked.close()
            await asyncio.to_thread(server.close)

    run(check)


def test_the_first_of_the_nodes_that_are_heard_is_the_one_to_judge(run: Callable[..., None]) -> None:
    def check(node: Node0) -> None:
        mesh = node.join(own=1)
        for other, judges in ((2, True), (0, False)):
            hear(mesh, other, Beat())
            node.let_pass(mesh, BEAT_EVERY)
            assert mesh.judges() is judges
        node.let_pass(mesh, 1.5)
        assert mesh.status()[0]["state"] == "silent" and mesh.judges()
        mesh.close()

    run(check, 3)


def test_ranks_are_excused_while_a_node_is_silent_and_as_long_again(run: Callable[..., None]) -> None:
    def check(node: Node0) -> None:
        mesh = node.join()
        hear(mesh, 1, Beat())
        node.let_pass(mesh, 0.5)
        assert mesh.unsettled_at() == -math.inf
        node.let_pass(mesh, 4.0)
        assert mesh.status()[1]["state"] == "silent" and mesh.unsettled_at() > 0
        hear(mesh, 1, Beat())
        node.let_pass(mesh, 0.2)
        assert mesh.status()[1]["state"] == "there" and mesh.unsettled_at() > 0
        for _ in range(45):
            hear(mesh, 1, Beat())
            node.let_pass(mesh, BEAT_EVERY)
        assert mesh.paused_at() == mesh.unsettled_at() == -math.inf, "a doubt is told as none but that"
        mesh.close()

    run(check)


class Told(Others):
    """Nodes of which these pages are known, and which leave the judgement to this one, or don't."""

    def __init__(self, pages: dict[int, Page], *, judges: bool = True) -> None:
        self._pages, self._judges = pages, judges

    def judges(self) -> bool:
        return self._judges

    def pages(self) -> dict[int, Page]:
        return self._pages


def test_a_rank_that_has_ended_its_training_is_not_the_one_that_hangs(tmp_path: Path) -> None:
    pages = {0: page(7, 5.0, DONE), 1: page(7, 4.0)}
    assert HangWatch(JobDir(tmp_path)).check(time.monotonic(), {}, Told(pages, judges=False)) is None
    fault = HangWatch(JobDir(tmp_path)).check(time.monotonic(), {}, Told(pages))
    assert fault is not None and fault.what.startswith("rank 1 hangs")
    assert "rank 0: after step 7" in fault.detail


@pytest.mark.parametrize(
    ("there", "cleared", "named"),
    [(page(6, 5.0), True, True), (page(6, 5.0), False, False), (page(7, 0.0)._replace(floor=None), True, False)],
    ids=["hangs", "may be held by a debugger", "no watchdog"],
)
def test_the_ranks_of_nodes_that_are_not_heard_are_asked_for_before_a_hang_is_named(
    run: Callable[..., None], there: Page, cleared: bool, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 nodes node 0 hears 7. On another one is the rank that all wait for, or one that has no watchdog."""
    monkeypatch.setattr("rekindle.agent.hang._ALL_REPLY", math.inf)
    monkeypatch.setattr("rekindle.agent.roll_call._REPLY", 60.0)
    monkeypatch.setattr("rekindle.agent.mesh._ANSWER", 60.0)

    async def check(node: Node0) -> None:
        listeners = {number: listen("127.0.0.1", 0) for number in range(1, 20)}
        mesh = node.join({number: listener.getsockname()[1] for number, listener in listeners.items()})
        afar = RankMonitor(node.job, lambda on: None)
        afar.others = asked = node.mesh(replace(node.nodes, own=5), afar)
        answered: list[int] = []

        def account() -> Beat:
            answered.append(5)
            return Beat(pages={5: there}, cleared=cleared)

        afar.account = account  # type: ignore[method-assign]
        servers = [
            node.serve(listener, number, asked.handle if number == 5 else lambda link, message: Beat().to_json())
            for number, listener in listeners.items()
        ]
        watch, found = HangWatch(node.job), None
        try:
            for number in mesh._neighbours:
                hear(mesh, number, Beat(pages={number: page(7, 4.0)}, cleared=True))
            node.let_pass(mesh, BEAT_EVERY)
            mesh._changed = dict.fromkeys(mesh._changed, -math.inf)  # as long after the start
            assert 5 not in mesh.pages() and len(mesh.pages()) == len(mesh._neighbours)
            until = time.monotonic() + 100.0
            while found is None and time.monotonic() < until and len(answered) < 2:
                found = watch.check(time.monotonic(), {}, mesh)
                await asyncio.sleep(0.01)
        finally:
            mesh.close()
            asked.close()
            for server in servers:
                await asyncio.to_thread(server.close)
        if not named:
            assert found is None and len(answered) == 2, "it is asked again"
        else:
            assert found is not None and found.what.startswith("rank 5 hangs after step 6")
            assert "rank 1: after step 7" in found.detail

    run(check, 20)
