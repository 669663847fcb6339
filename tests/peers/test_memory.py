"""Other nodes asked what they have: a silent one costs little time and one warning, and each is who it should be."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.agent.neighbour import Neighbour
from rekindle.agent.others import Others
from rekindle.agent.service import Agent
from rekindle.format.lineage import ShardId
from rekindle.memory.elsewhere import Elsewhere
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.memory.nodes import Node, Nodes
from rekindle.peers import memory as peer_memory
from rekindle.peers.local_state_sender import LocalStateSender
from rekindle.peers.local_states import ask_for_files
from rekindle.peers.memory import PeerMemory
from rekindle.peers.wire import Link, WireError
from tests.peers.peer import CREDENTIALS, FIRST, HOST, files_at, serving, wait_until
from tests.peers.two_nodes import WORLD, Rank, keeping, put_whole, two_nodes


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def asked_of(nodes: Nodes, step: int = 7) -> int:
    return asked(PeerMemory(nodes), step)


def asked(elsewhere: Elsewhere, step: int = 7) -> int:
    """The number of chunks that another node is found to have of rank 1."""
    return len(elsewhere.chunks(ShardId(step, 0, WORLD, FIRST), 1))


def test_snapshots_that_were_taken_since_are_found_at_the_next_look(far: JobDir) -> None:
    put_whole(far, 7)
    with keeping(far) as port:
        elsewhere = PeerMemory(two_nodes(port))
        assert asked(elsewhere) == 2
        put_whole(far, 8)
        assert asked(elsewhere, 8) == 0
        elsewhere.look_again()
        assert asked(elsewhere, 8) == 2


class Beside(Others):
    """Another node that is silent."""

    name = "near"

    def __init__(self, port: int) -> None:
        self._port = port

    def elsewhere(self) -> Elsewhere:
        return PeerMemory(two_nodes(self._port))


def test_a_silent_node_is_asked_once_for_all_that_the_dead_ranks_lack(
    near: JobDir, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Rank(near).put(7)
    near.write_job(JobInfo(str(root), [0], WORLD, 2, None, 600.0))
    agent = Agent(near, Lock(near.paths.agent_lock))
    agent._alone_since = math.inf  # ranks of the other node may secure what is lacking for as long as it takes
    with socket.create_server((HOST, 0)) as gone:
        port = gone.getsockname()[1]
    agent.monitor.others = Beside(port)
    for _ in range(3):
        agent._work()
    assert [text[:26] for text in warnings(caplog)] == ["node far doesn't tell what"]
    agent.monitor.others = Beside(port)  # those of an agent that has joined the mesh just now
    agent._work()
    assert len(warnings(caplog)) == 2


def test_no_node_is_asked_once_the_time_for_all_of_them_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_ALL", 0.1)
    monkeypatch.setattr(peer_memory, "_PATIENCE", 0.2)
    with socket.create_server((HOST, 0)) as first, socket.create_server((HOST, 0)) as second:
        nodes = two_nodes(first.getsockname()[1])
        nodes = replace(nodes, nodes=[*nodes.nodes, Node("last", HOST, second.getsockname()[1], [2])])
        assert asked_of(nodes) == 0
        second.setblocking(False)
        with pytest.raises(BlockingIOError):
            second.accept()


def test_who_has_little_time_waits_for_a_shard_no_longer() -> None:
    began, released = time.monotonic(), threading.Event()

    def answer_late(link: Link, message: dict[str, Any]) -> None:
        released.wait(60.0)

    with socket.create_server((HOST, 0)) as deaf, pytest.raises(TimeoutError):
        replace(files_at(deaf.getsockname()[1]), patience=0.2).shard(0, 1)
    with serving({"open": answer_late}) as port:
        with pytest.raises(TimeoutError):
            replace(files_at(port), patience=0.2).shard(0, 1)
        released.set()
    assert time.monotonic() - began < 8.0, "10 s to connect and 30 s to reply are the usual bounds"


def test_a_node_that_has_the_address_of_another_one_is_told_nothing(
    near: JobDir, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[dict[str, Any]] = []

    def hear(link: Link, message: dict[str, Any]) -> dict[str, Any]:
        heard.append(message)
        return {}

    with serving(dict.fromkeys(("asked", "keep", "kept", "list", "open"), hear)) as port:
        nodes = two_nodes(port)
        nodes = replace(nodes, nodes=[nodes.here, replace(nodes.nodes[1], name="gone")])
        for ask in (lambda: ask_for_files(nodes, nodes.nodes[1], 1), lambda: files_at(port, node="gone").shard(0, 1)):
            with pytest.raises((WireError, OSError), match="node far answers in place of gone"):
                ask()
        neighbour = Neighbour(nodes.nodes[1], CREDENTIALS, lambda: None, lambda: None)
        assert neighbour.ask(lambda: {"verb": "asked"}).result(60.0) is None
        neighbour.close()
        assert asked_of(nodes) == 0
        Rank(near).put(1)
        sender = LocalStateSender(near, nodes)
        sender.start()
        wait_until(lambda: len(warnings(caplog)) == 2)
        sender.close()
    assert not heard and all("node far answers in place of gone" in text for text in warnings(caplog))
