"""The agent's way into the mesh of a start, when threads or files are short for a moment."""

from __future__ import annotations

import asyncio
import errno
import importlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rekindle.agent import mesh_keeper, mesh_loader
from rekindle.agent.mesh import Mesh
from rekindle.agent.mesh_keeper import MeshKeeper
from rekindle.agent.monitor import RankMonitor
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Node, Nodes
from rekindle.peers.local_state_sender import LocalStateSender
from rekindle.peers.server import PeerServer

START = "a" * 16
WITHIN = 60.0


@pytest.fixture
def job(memory: Path) -> JobDir:
    made = JobDir(memory / "rekindle" / "job")
    made.create()
    return made


@pytest.fixture
def monitor(job: JobDir) -> RankMonitor:
    """That of a node which two ranks train on, of which the other node is in no mesh."""
    job.write_job(JobInfo("/nowhere", [0], 2, 2, None, 600.0, start=START, host="127.0.0.1"))
    return RankMonitor(job, lambda urgent: None)


def fails_once(real: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    errors = [error]

    def call(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*args, **kwargs)

    return call


async def until(true: Callable[[], object]) -> None:
    async def look() -> None:
        while not true():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), WITHIN)


async def serve(job: JobDir, monitor: RankMonitor, true: Callable[[MeshKeeper], object]) -> MeshKeeper:
    keeper = MeshKeeper(job, monitor, lambda: -1, lambda only_look: {})
    serving = asyncio.create_task(keeper.serve())
    try:
        await until(lambda: keeper._server is not None)
        port = keeper._address["port"]
        nodes = [Node("here", "127.0.0.1", port, [0]), Node("there", "", 0, [1])]
        Nodes(START, 1, bytes(32), 0, nodes).write(job)
        await until(lambda: true(keeper))
    finally:
        serving.cancel()
        await asyncio.wait([serving])
    return keeper


@pytest.mark.parametrize("what", ["a thread", "a file"])
def test_a_try_that_fails_is_followed_by_another(
    job: JobDir, monitor: RankMonitor, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "a thread":
        monkeypatch.setattr(mesh_keeper, "Mesh", fails_once(Mesh, RuntimeError("can't start new thread")))
    else:
        monkeypatch.setattr(Nodes, "read", fails_once(Nodes.read, OSError(errno.EMFILE, "Too many open files")))
    asyncio.run(serve(job, monitor, lambda keeper: isinstance(monitor.others, Mesh)))


def test_local_states_are_sent_though_their_thread_comes_late_and_the_mesh_stays(
    job: JobDir, monitor: RankMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[LocalStateSender] = []
    meshes: list[Mesh] = []
    monkeypatch.setattr(mesh_keeper, "Mesh", lambda *args: meshes.append(Mesh(*args)) or meshes[-1])
    start = fails_once(lambda sender: started.append(sender), RuntimeError("can't start new thread"))
    monkeypatch.setattr(LocalStateSender, "start", lambda sender: start(sender))
    asyncio.run(serve(job, monitor, lambda keeper: started))
    assert len(meshes) == 1


def test_what_connects_agents_is_loaded_again_where_that_failed(
    job: JobDir, monitor: RankMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = fails_once(job.read_job, OSError(errno.EMFILE, "Too many open files"))
    monkeypatch.setattr(job, "read_job", read)
    load = fails_once(importlib.import_module, ImportError("no memory"))
    monkeypatch.setattr(mesh_loader.importlib, "import_module", load)

    async def run() -> None:
        serving = asyncio.create_task(mesh_loader.serve_mesh(job, monitor, lambda: -1, lambda only_look: {}))
        try:
            await until(job.paths.address.exists)
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    asyncio.run(run())


def test_an_agent_whose_port_another_program_has_listens_at_another_one(
    job: JobDir, monitor: RankMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_keeper, "_FORMER_GOES", 1.5)
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        nodes = [Node("here", "127.0.0.1", port, [0]), Node("there", "", 0, [1])]
        Nodes(START, 1, bytes(32), 0, nodes).write(job)
        keeper = MeshKeeper(job, monitor, lambda: -1, lambda only_look: {})

        async def listening() -> None:
            serving = asyncio.create_task(keeper.serve())
            await until(lambda: keeper._mesh is not None)
            serving.cancel()
            await asyncio.wait([serving])

        asyncio.run(listening())
        assert keeper._address["port"] not in (0, port)


def test_a_server_whose_thread_can_not_be_had_is_made_again(
    job: JobDir, monitor: RankMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerServer, "start", fails_once(PeerServer.start, RuntimeError("can't start new thread")))
    keeper = asyncio.run(serve(job, monitor, lambda keeper: keeper._mesh))
    assert keeper._address["port"]
