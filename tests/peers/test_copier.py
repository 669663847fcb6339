"""The thread that copies another node's steps: what it asks for, when it fails, and how fast it goes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.agent.copier import _PIECE, Aim, Copier, _pace
from rekindle.format.layout import BLOCK
from rekindle.format.lineage import ShardId
from rekindle.format.reader import reader_threads
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.nodes import Node, Nodes
from rekindle.memory.notes import Common
from rekindle.peers.server import Handler
from rekindle.peers.snapshots import snapshot_handlers
from rekindle.peers.wire import Link
from rekindle.storage.throttle import Budget
from tests.peers.peer import FIRST, HOST, SECRET, blocks_of, put, wait_until
from tests.peers.source import copy, served, serving, tensors_at


@pytest.fixture
def copier_of(near: JobDir) -> Iterator[Callable[..., Copier]]:
    with ExitStack() as stack:

        def make(nodes: Nodes, limit: int | None = None) -> Copier:
            copier = Copier(near, nodes, limit, 0)
            stack.callback(copier._thread.join, 60)
            stack.callback(copier.close)
            copier.start()
            return copier

        yield make


def aim_at(step: int, round_: int = 1, world: int = 2) -> Aim:
    return Aim(round_, ShardId(step, 1, world, FIRST), 0.0)


def test_a_step_is_copied_once_the_source_has_it_and_outlives_the_agent(
    far: JobDir, near: JobDir, copier_of: Callable[..., Copier]
) -> None:
    with serving(far) as nodes:
        copier = copier_of(nodes)
        copier.aim(aim_at(7))
        put(far, 6, {"a": b"6"}, 0, 2)
        put(far, 7, {"a": b"7"}, 0, 2)
        wait_until(lambda: copier.copied == {7})
        assert tensors_at(near.copies, 7) == {"a": b"7"} and copier.failed == (-1, -1)
        copier.close()
        after = copier_of(nodes)
        wait_until(lambda: after.copied == {7})


def test_copies_of_a_former_agent_are_known_at_once_and_doubted_as_soon_as_one_is_written_over(
    far: JobDir, near: JobDir, copier_of: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node has told others of must not be forgotten, and what it lets go of must not be told."""
    near.notes.write_common(Common(FIRST.id, 8, 7, -1))
    with serving(far) as nodes:
        for step in (7, 8):
            put(far, step, {"a": b"%d" % step}, 0, 2)
            copy(near, nodes, step)
        assert Copier(near, nodes, None, 0).copied == {7, 8}
        put(far, 9, blocks_of(2), 0, 2)
        copier = copier_of(nodes, limit=1)
        assert copier.copied == {7, 8}
        copier.aim(aim_at(9))
        wait_until(lambda: copier.progress is not None and copier.progress.done)
        assert copier.copied == {7}, "step 7 is safe"
        copier.hurry(on=True)
        wait_until(lambda: copier.copied == {7, 9})


def test_what_this_nodes_shard_shows_is_left_out_and_looked_at_anew_at_each_step(
    far: JobDir, near: JobDir, copier_of: Callable[..., Copier]
) -> None:
    put(far, 6, {"other": b"o"}, 0, 2)
    put(near, 6, {"another": b"o"}, 1, 2)
    put(far, 7, {"a": b"a" * 100, "b": b"b" * 100}, 0, 2)
    put(near, 7, {"a": b"a" * 100, "b": b"c" * 100}, 1, 2)
    put(far, 8, {"a": b"x" * 100, "b": b"y" * 100}, 0, 2)
    put(near, 8, {"a": b"a" * 100, "b": b"y" * 100}, 1, 2)
    with serving(far) as nodes:
        copier = copier_of(nodes)
        for step in (6, 7, 8):
            copier.aim(aim_at(step, step))
            wait_until(lambda step=step: step in copier.copied)
    assert tensors_at(near.copies, 7) == {"b": b"b" * 100}
    assert tensors_at(near.copies, 8) == {"a": b"x" * 100}


def test_what_fails_together_with_the_source_shows_nothing(
    far: JobDir, near: JobDir, copier_of: Callable[..., Copier]
) -> None:
    for job, rank in ((far, 0), (near, 1)):
        put(job, 7, {"a": b"a" * 100}, rank, 2)
    with serving(far) as nodes:
        rack = replace(nodes, nodes=[replace(node, domain="rack") for node in nodes.nodes])
        copier = copier_of(rack)
        copier.aim(aim_at(7))
        wait_until(lambda: copier.copied == {7})
    assert tensors_at(near.copies, 7) == {"a": b"a" * 100}


def test_a_replica_on_a_third_node_is_asked_for(
    far: JobDir, near: JobDir, memory: Path, copier_of: Callable[..., Copier]
) -> None:
    (memory / "third").mkdir(mode=0o700)
    third = JobDir.of("/somewhere/run", memory_base(memory / "third"))
    third.create()
    for step in (7, 8):
        put(far, step, {"a": b"a" * 100, "b": b"b" * 100}, 0, 3)
        put(near, step, {"c": b"c" * 100}, 1, 3)
    put(third, 7, {"a": b"a" * 100}, 2, 3)
    with ExitStack() as stack:
        one = stack.enter_context(served(far, Node("far", HOST, 0, [0])))
        last = stack.enter_context(served(third, Node("third", HOST, 0, [2])))
        copier = copier_of(Nodes(FIRST.id, 1, SECRET, 1, [one, Node("near", HOST, 1, [1]), last]))
        copier.aim(aim_at(7, world=3))
        wait_until(lambda: copier.copied == {7})
        copier.aim(aim_at(8, 2, world=3))
        put(third, 8, {"a": b"a" * 100}, 2, 3)  # the last one to come there
        wait_until(lambda: 8 in copier.copied)
    for step in (7, 8):
        assert tensors_at(near.copies, step, 3) == {"b": b"b" * 100}


def test_what_a_third_node_does_not_tell_is_copied(far: JobDir, near: JobDir, copier_of: Callable[..., Copier]) -> None:
    put(far, 7, {"a": b"a" * 100}, 0, 3)
    put(near, 7, {"c": b"c" * 100}, 1, 3)
    with ExitStack() as stack:
        one = stack.enter_context(served(far, Node("far", HOST, 0, [0])))
        refuses = served(far, Node("third", HOST, 0, [2]), open=lambda link, message: {"error": "no"})
        last = stack.enter_context(refuses)
        copier = copier_of(Nodes(FIRST.id, 1, SECRET, 1, [one, Node("near", HOST, 1, [1]), last]))
        copier.aim(aim_at(7, world=3))
        wait_until(lambda: copier.copied == {7})
    assert tensors_at(near.copies, 7, 3) == {"a": b"a" * 100}


def test_a_step_that_the_source_has_skipped_fails_and_the_next_one_is_copied(
    far: JobDir, copier_of: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.agent.copier._LIST_EVERY", 0.0)
    put(far, 8, {"a": b"8"}, 0, 2)
    with serving(far) as nodes:
        copier = copier_of(nodes)
        copier.aim(aim_at(7))
        wait_until(lambda: copier.failed == (1, 7))
        copier.aim(aim_at(8, 2))
        wait_until(lambda: copier.copied == {8})


def test_failures_warn_once_and_are_tried_in_a_later_round(
    far: JobDir, copier_of: Callable[..., Copier], caplog: pytest.LogCaptureFixture
) -> None:
    put(far, 7, {"a": b"7"}, 0, 2)
    with serving(far, open=lambda link, message: {"error": "no"}) as nodes:
        copier = copier_of(nodes)
        for round_ in (1, 2, 3):
            copier.aim(aim_at(7, round_))
            wait_until(lambda round_=round_: copier.failed == (round_, 7))
    assert caplog.text.count("not safe from the loss of node far (rank 0)") == 1


def test_a_limit_is_lifted_for_those_who_wait_and_holds_up_no_end(
    far: JobDir, near: JobDir, copier_of: Callable[..., Copier]
) -> None:
    put(far, 7, blocks_of(2), 0, 2)
    with serving(far) as nodes:
        copier = copier_of(nodes, limit=1)
        copier.aim(aim_at(7))
        wait_until(lambda: copier.progress is not None and copier.progress[1:] == (_PIECE, 2 * BLOCK))
        copier.close()
        copier._thread.join(30)
        assert not copier._thread.is_alive() and not copier.copied
        copier = copier_of(nodes, limit=1)
        copier.aim(aim_at(7))
        wait_until(lambda: copier.progress is not None and copier.progress.done == _PIECE)
        copier.hurry(on=True)
        wait_until(lambda: copier.copied == {7})
    assert tensors_at(near.copies, 7) == blocks_of(2)


# -- the pace ----------------------------------------------------------------------------------------------------------


def test_a_copy_takes_most_of_the_time_that_it_has_and_never_most_of_the_network() -> None:
    gigabit, size = 119 << 20, 100 << 20
    assert _pace(size, 10.0, gigabit) == pytest.approx(size / 8)
    assert _pace(size, 1e4, gigabit) == pytest.approx(gigabit / 16)
    assert _pace(size, 1.0, gigabit) == pytest.approx(gigabit / 2)
    assert _pace(1 << 20, 10.0, gigabit) is None, "a small one is over before anybody notices"
    assert _pace(size, 0.0, gigabit) is None and _pace(size, 10.0, None) is None


def shared(read: Handler, speed: float) -> Handler:
    """Reads over a network of so many bytes per second, one at a time."""
    network = threading.Lock()

    def answer(link: Link, message: dict[str, Any]) -> dict[str, Any] | None:
        with network:
            time.sleep((message["stop"] - message["start"]) / speed)
            return read(link, message)

    return answer


@pytest.mark.parametrize("limit", [None, 40 << 20], ids=["at full speed", "paced"])
def test_the_speed_of_a_network_is_found_whatever_the_pace(limit: int | None, far: JobDir, near: JobDir) -> None:
    """Several threads read: while one of them waits for its turn to ask, the others' bytes are on their way."""
    put(far, 7, blocks_of(4), 0, 2)
    budget, speed = Budget(limit), 320 << 20
    handlers = snapshot_handlers(far)
    began = time.monotonic()
    with serving(far, **handlers | {"read": shared(handlers["read"], speed)}) as nodes:
        seconds = copy(near, nodes, 7, take=budget.take)[1]
    took = time.monotonic() - began
    assert 4 * BLOCK / speed <= seconds <= took
    if limit is not None:
        assert took - seconds > 0.5 * 3 * BLOCK / limit, "waits are not counted"


def test_a_limit_below_a_block_in_half_a_minute_is_no_stall(far: JobDir, copier_of: Callable[..., Copier]) -> None:
    put(far, 7, blocks_of(1), 0, 2)
    with serving(far) as nodes:
        copier = copier_of(nodes, limit=8 * _PIECE)
        copier.aim(aim_at(7))
        seen = set[tuple[float, int]]()
        while not copier.copied:
            if copier.progress is not None:
                seen.add((copier.moved, copier.progress.done))
            time.sleep(0.05)
    assert len(seen) > 5, "it moves while it waits"


@pytest.mark.parametrize("slow", [0.0, 60.0])
def test_copies_that_are_cut_off_after_long_warn_of_it(
    slow: float,
    far: JobDir,
    copier_of: Callable[..., Copier],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rekindle.agent.copier._SLOW", slow)
    put(far, 7, blocks_of(1), 0, 2)
    with serving(far) as nodes:
        copier = copier_of(nodes, limit=_PIECE)
        for round_ in (1, 2, 3):
            copier.aim(aim_at(7, round_))
            wait_until(lambda: copier.progress is not None and copier.progress.done)
            copier.aim(None)
            wait_until(lambda: copier.progress is None)
    lines = [line for line in caplog.text.splitlines() if "not safe from the loss of node far (rank 0)" in line]
    assert len(lines) == (not slow), "another node may have failed"
    said = rf"step 7 was given up when [\d,]+ of {BLOCK:,} bytes had come, at {_PIECE:,} bytes/s at most"
    assert all(re.search(said, line) for line in lines), lines


def test_a_copy_from_several_ranks_keeps_its_connections(far: JobDir, copier_of: Callable[..., Copier]) -> None:
    """Each thread that reads has one: those of a shard that is copied serve the next one."""
    ranks, links = range(4), set[Link]()
    data = {f"t{number}": bytes([number]) * (9 << 20) for number in range(4)}  # each is read by itself
    handlers = snapshot_handlers(far)

    def open_(link: Link, message: dict[str, Any]) -> dict[str, Any] | None:
        links.add(link)
        return handlers["open"](link, message)

    for step in (7, 8):
        for rank in ranks:
            put(far, step, data, rank, 5)
    with served(far, Node("far", HOST, 0, [*ranks]), **handlers | {"open": open_}) as one:
        copier = copier_of(Nodes(FIRST.id, 1, SECRET, 1, [one, Node("near", HOST, 1, [4])]))
        made = []
        for step in (7, 8):
            copier.aim(Aim(step, ShardId(step, 4, 5, FIRST), 0.0))
            wait_until(lambda step=step: step in copier.copied)
            made.append(len(links))
    assert made[1] <= len(ranks) + reader_threads(in_memory=False)


def test_a_source_that_stands_still_ends_a_copy_within_its_patience(
    far: JobDir, copier_of: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many connections lie idle: each would be waited for."""
    monkeypatch.setattr("rekindle.agent.copier._PATIENCE", 2.0)
    ranks, stopped, go_on = range(6), threading.Event(), threading.Event()
    for rank in ranks:
        put(far, 7, blocks_of(2), rank, 7)

    def still(handler: Handler) -> Handler:
        def answer(link: Link, message: dict[str, Any]) -> dict[str, Any] | None:
            if stopped.is_set():
                go_on.wait(60)
            elif message["verb"] == "read":
                stopped.set()
            return handler(link, message)

        return answer

    handlers = {verb: still(handler) for verb, handler in snapshot_handlers(far).items()}
    with served(far, Node("far", HOST, 0, [*ranks]), **handlers) as one:
        copier = copier_of(Nodes(FIRST.id, 1, SECRET, 1, [one, Node("near", HOST, 1, [6])]))
        copier.aim(Aim(1, ShardId(7, 6, 7, FIRST), 0.0))
        assert stopped.wait(60)
        began = time.monotonic()
        wait_until(lambda: copier.failed == (1, 7))
        assert time.monotonic() - began < 2 * 2.0 + 5.0, "six idle ones would take 12 s more"
        go_on.set()
