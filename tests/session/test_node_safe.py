"""Waits for a step that survives the loss of any one node: they end, they name what is missing, they lead somewhere."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rekindle
import rekindle.session.nodes as meeting_of_nodes
from rekindle.errors import NotDurableError, UsageError
from rekindle.format.lineage import Incarnation
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.memory.nodes import Node, Nodes
from rekindle.memory.notes import Common
from rekindle.memory.slots import Slots
from rekindle.session.node_safe import describe_delay, refuse_wait, wait_node_safe
from rekindle.session.session import Meeting, Session
from rekindle.testing import make_shard
from tests.conftest import commit
from tests.faults.harness import end_agent, wait_for
from tests.integrations.dcp.ranks import ranks

START = Incarnation(1, "a" * 16)


def _session(tmp_path: Path, nodes: int = 2, ports: tuple[int, ...] = (1, 1), no_memory: str | None = None) -> Session:
    """Rank 0 of two, each on a node of its own; nobody listens at their ports."""
    session = Session(tmp_path / "root", tmp_path)
    assert session.take_place(0) is None
    session.join(Meeting(START, 2, [0], nodes, no_memory, found=False, deleted=False))
    met = [Node(f"n{number}", "127.0.0.1", port, [number]) for number, port in enumerate(ports)]
    session.nodes = Nodes(START.id, 1, b"s" * 32, 0, met)
    if no_memory is None:
        session.slots = Slots(session.job_dir, 0, 2, [0])
        commit(session.slots, *make_shard(session.shard_id(5), {"x": b"own"}))
    return session


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    made = _session(tmp_path)
    yield made
    made.leave()


def test_it_asks_for_the_step_and_ends_when_the_step_is_safe(session: Session) -> None:
    notes = session.job_dir.notes
    told: list[int | None] = []

    def agent() -> None:
        told.append(wait_for(notes.wanted))
        notes.write_common(Common(START.id, 5, 4, -1))
        notes.write_common(Common(START.id, 8, 6, -1))

    other = threading.Thread(target=agent)
    other.start()
    wait_node_safe(session, session.shard_id(5), 60.0)
    other.join(60)
    assert told == [5] and notes.safe_step(START.id) == 6


def test_it_can_be_interrupted(session: Session) -> None:
    def person() -> None:
        wait_for(session.job_dir.notes.wanted)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever an earlier test has left
    other = threading.Thread(target=person)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait_node_safe(session, session.shard_id(5), 60.0)
    finally:
        signal.signal(signal.SIGINT, before)
    other.join(60)


def test_what_another_start_has_kept_does_not_count(session: Session) -> None:
    session.job_dir.notes.write_common(Common("b" * 16, 9, 9, -1))
    with pytest.raises(NotDurableError, match="step 5 does not survive the loss of a node after 0 s: "):
        wait_node_safe(session, session.shard_id(5), 0.0)


@pytest.mark.parametrize("drains", [True, False])
def test_a_wait_without_an_agent_on_this_node_says_so(session: Session, *, drains: bool) -> None:
    """A trainer that drains in its place copies nothing."""
    lock = Lock(session.job_dir.paths.agent_lock)
    assert not drains or lock.acquire(5.0)
    try:
        with pytest.raises(NotDurableError, match=r"after 0 s: no agent runs on this node, see .*agent\.log"):
            wait_node_safe(session, session.shard_id(5), 0.1)
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("made", "step", "why"),
    [
        ({"no_memory": "memory store /none: too small"}, 5, "/none: too small"),
        ({"ports": (1, 0)}, 5, r"other nodes can't reach the agent of node n1 \(rank 1\)"),
        ({}, 6, "memory did not take it"),
    ],
)
def test_it_does_not_wait_for_what_can_not_come(made: dict[str, Any], step: int, why: str, tmp_path: Path) -> None:
    session = _session(tmp_path, **made)
    try:
        with pytest.raises(NotDurableError, match=f"step {step} will not survive .*: .*{why}"):
            wait_node_safe(session, session.shard_id(step), 5.0)
        assert session.job_dir.notes.wanted() is None
    finally:
        session.leave()


def test_a_job_that_keeps_nothing_on_other_nodes_is_told_so(session: Session, root: Path, memory: Path) -> None:
    refuse_wait(session, "auto")
    with pytest.raises(UsageError, match="peer_every is None"):
        refuse_wait(session, None)
    with rekindle.Checkpointer(root, {"values": rekindle.Values(x=1)}) as ckpt:
        with pytest.raises(UsageError, match="the job trains on one node"):
            ckpt.save(1, wait="node", timeout=1.0)
        assert ckpt.metrics.saves == 0 and ckpt.metrics.node_safe_step == -1


def _node(name: str, state: str, newest: int | None) -> dict[str, Any]:
    return {"name": name, "ranks": [0], "state": state, "newest": newest}


@pytest.mark.parametrize(
    ("nodes", "copying", "said"),
    [
        ([_node("A", "here", 5), _node("B", "silent", 5)], None, "node B (rank 0): silent"),
        (
            [_node("A", "here", 4), _node("B", "there", 3)],
            None,
            "A (rank 0) has not saved it; node B (rank 0) has not",
        ),
        ([_node("A", "here", None), _node("B", "unknown", None)], None, "copies are slow"),
        ([_node("A", "here", 6)], {"step": 5, "done": 1000, "total": 4000}, "copied 1,000 of 4,000 bytes of step 5"),
        ([], None, "copies are slow"),
    ],
)
def test_the_reason_names_who_is_missing(nodes: list[dict[str, Any]], copying: Any, said: str) -> None:
    assert said in describe_delay({"nodes": nodes, "copying": copying}, 5)


# -- two nodes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def memories(small_tmpfs: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The memory of two nodes on this host."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    places = [small_tmpfs(64 << 20), small_tmpfs(64 << 20)]
    yield places
    for job in map(_job, places):
        if job is not None:
            end_agent(job)


def _job(memory: Path) -> JobDir | None:
    return next((JobDir(directory) for directory in memory.glob("rekindle-*/*/")), None)


def _save_for_the_other_node(rank: int, root: Path, memories: list[Path], timeout: float) -> dict[str, Any]:
    """Trains some steps and waits for two of them, the second one inside of guard(). Says what came of it."""
    meeting_of_nodes._ANSWERS_WITHIN = 60.0  # agents start slowly on a busy machine
    ckpt = rekindle.Checkpointer(root, {"own": rekindle.Values(x=rank)}, memory=memories[rank])
    ckpt.restore()
    for n in range(1, 4):
        ckpt.step(n)
    said = ""
    try:
        ckpt.save(4, wait="node", timeout=timeout)
        with ckpt.guard():
            ckpt.step(5)
            ckpt.save(6, wait="node", timeout=timeout)
    except NotDurableError as error:
        said = str(error)
    job = _job(memories[rank])
    info = job.read_job() if job is not None else None
    assert info is not None
    found = {"said": said, "safe": ckpt.metrics.node_safe_step, "seconds": info.persist_seconds}
    ckpt.close()
    return {**found, "stored by": ckpt._saver.schedule.persist_every}


def test_a_step_is_safe_once_the_other_node_has_it(root: Path, memories: list[Path]) -> None:
    for found in ranks(2, _save_for_the_other_node, root, memories, 60.0):
        assert found == {"said": "", "safe": 6, "seconds": 30.0, "stored by": None}


def test_nodes_that_do_not_reach_each_other_say_so_at_once(
    root: Path, memories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_ADDRESS", "no.such.host.invalid")
    for found in ranks(2, _save_for_the_other_node, root, memories, 60.0):
        assert "step 4 will not survive the loss of a node until it is on storage: other nodes can't" in found["said"]
        assert (found["safe"], found["seconds"], found["stored by"]) == (-1, None, 100)
