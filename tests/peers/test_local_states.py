"""Local states that outlive their node: sent as they change, kept, brought back, and rebuilt from."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir
from rekindle.memory.local_state import LocalFiles, read_local_bytes, read_local_files
from rekindle.memory.rebuild import rebuild
from rekindle.memory.slots import Slots
from rekindle.peers.local_state_sender import LocalStateSender
from rekindle.peers.local_states import (
    MOST,
    bring_local_state,
    kept_local_states,
    local_state_handlers,
    take_kept_local_state,
)
from rekindle.peers.memory import PeerMemory
from rekindle.peers.wire import WireError, call
from tests.peers.peer import HOST, link_to, serving, wait_until
from tests.peers.two_nodes import SECOND, WORLD, Rank, keeping, put_whole, two_nodes


@contextmanager
def sending(near: JobDir, port: int) -> Iterator[None]:
    sender = LocalStateSender(near, two_nodes(port))
    sender.start()
    try:
        yield
    finally:
        sender.close()


def kept(far: JobDir, rank: int = 0) -> tuple[int, int] | None:
    files = read_local_files(far.others, rank)
    return None if files is None else files.newest


def files_of(job: JobDir, rank: int = 0) -> LocalFiles:
    found = read_local_files(job.paths, rank)
    assert found is not None
    return found


def test_what_a_lost_node_had_is_brought_to_the_next_one(near: JobDir, far: JobDir, memory: Path) -> None:
    with keeping(far) as port:
        with sending(near, port):
            rank = Rank(near)
            for step in range(1, 5):
                rank.put(step, (step,), b"step%d" % step)
                wait_until(lambda step=step: kept(far) == (1, step))
        assert read_local_bytes(far.others, 0) == read_local_bytes(near.paths, 0)
        assert far.others.directory.stat().st_mode & 0o777 == 0o700
        fresh = JobDir(memory / "fresh")
        fresh.path.mkdir()
        bring_local_state(fresh, 0, two_nodes(port), [kept_local_states(fresh), kept_local_states(far)])
    _, states, _ = files_of(fresh)
    assert [(state.stamp.step, state.values, bytes(state.tensors[:5])) for state in states] == [
        (4, b"[4]", b"step4"),
        (3, b"[3]", b"step3"),
    ]


def test_a_start_replaces_what_is_kept_once_it_has_made_a_step(near: JobDir, far: JobDir) -> None:
    """Until then the job would go on from what the start before had left."""
    with keeping(far) as port, sending(near, port):
        Rank(near, before_update=True).put(3)  # the next start may have no such file
        rank = Rank(near)
        rank.put(3)
        wait_until(lambda: kept(far) == (1, 3))
        before = read_local_bytes(far.others, 0)
        rank = Rank(near, start=SECOND)
        rank.put(3, (1,))  # with which it begins
        rank.put(3, (2,))
        link = link_to(port)
        first = read_local_bytes(near.paths, 0)
        assert keep(link, 0, first) == {"kept": False} and read_local_bytes(far.others, 0) == before
        rank.put(4)
        wait_until(lambda: kept(far) == (2, 4))
        assert keep(link, 0, before) == {"kept": False} and kept(far) == (2, 4)
        assert keep(link, 0, read_local_bytes(near.paths, 0)) == {"kept": True}
        assert not far.others.local_state(0, "u").exists()
        link.close()


def keep(link: Any, rank: int, files: dict[str, bytes]) -> dict[str, Any]:
    sizes = {which: len(raw) for which, raw in files.items()}
    link.send({"verb": "keep", "rank": rank, "files": sizes, "bytes": sum(sizes.values())})
    for raw in files.values():
        link.send_bytes(raw)
    return link.receive(30)


def test_only_sound_files_of_the_senders_own_ranks_are_kept(near: JobDir, far: JobDir) -> None:
    Rank(near, 0).put(1)
    Rank(near, 1).put(1)
    files = read_local_bytes(near.paths, 0)
    bad = {which: raw[:-1] + bytes([raw[-1] ^ 1]) for which, raw in files.items()}
    with keeping(far) as port:
        link = link_to(port)
        assert "rank 1 is not on node near" in keep(link, 1, read_local_bytes(near.paths, 1))["error"]
        for which in files:
            assert "damaged" in keep(link, 0, {**files, which: bad[which]})["error"]
        assert keep(link, 0, {"0": files["0"]}) == {"kept": False}  # of no plan that is known
        assert "make no sense" in keep(link, 0, {**files, "../x": b"x"})["error"]
        assert "make no sense" in keep(link, 0, {**files, "1": bytes(MOST + 1)})["error"]
        for sizes in ({"0": -1}, {"0": "1"}, ["0"], {"0": 1}):
            with pytest.raises(WireError, match="make no sense"):
                call(link, {"verb": "keep", "rank": 0, "files": sizes}, 30)
        assert not far.others.directory.exists()
        assert keep(link, 0, files) == {"kept": True}
        link.close()


def test_all_is_sent_again_to_an_agent_that_follows_a_dead_one(near: JobDir, far: JobDir) -> None:
    rank = Rank(near)
    with keeping(far) as port:
        sender = LocalStateSender(near, two_nodes(port))
        sender.start()
        rank.put(1)
        wait_until(lambda: kept(far) == (1, 1))
    far.others.directory.rename(far.path / "gone")
    try:
        handlers = local_state_handlers(far, lambda: two_nodes(0, own=1))
        with serving(handlers, port):
            rank.put(2)
            wait_until(lambda: kept(far) == (1, 2))
    finally:
        sender.close()
    assert read_local_bytes(far.others, 0) == read_local_bytes(near.paths, 0)


class Pauses(threading.Event):
    """Notes for how long it is waited for, and waits for less."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seen.append(timeout or 0.0)
        return super().wait(0.01)


def test_a_partner_that_does_not_answer_for_long_is_asked_as_often_as_at_first(near: JobDir, far: JobDir) -> None:
    """The steps that are made until it is asked again are lost with this node."""
    Rank(near).put(1)
    with socket.create_server((HOST, 0)) as deaf:
        port = deaf.getsockname()[1]
        deaf.settimeout(60)
        sender = LocalStateSender(near, two_nodes(port))
        sender._closed = pauses = Pauses()
        sender.start()
        for _ in range(8):
            deaf.accept()[0].close()
        deaf.close()
        with keeping(far, port):
            wait_until(lambda: kept(far) == (1, 1))
            sender.close()
    assert pauses.seen.count(0.5) >= 8 and max(pauses.seen) == 0.5


def test_what_is_kept_for_another_node_is_taken_where_the_job_goes_on_with_one(near: JobDir) -> None:
    Rank(near).put(5)
    take_kept_local_state(near, 0)
    assert files_of(near).newest == (1, 5)
    near.others.directory.mkdir()
    rank = Rank(JobDir(near.others.directory))
    rank.put(4)
    take_kept_local_state(near, 0)
    assert files_of(near).newest == (1, 5)
    rank.put(6)
    take_kept_local_state(near, 0)
    assert files_of(near).newest == (1, 6)


def test_a_large_local_state_stays_and_one_warning_says_so(
    near: JobDir, far: JobDir, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rekindle.agent")
    with keeping(far) as port, sending(near, port):
        rank = Rank(near)
        rank.put(1, tuple(range(1_400_000)))
        wait_until(lambda: caplog.messages)
        rank.put(2)
        rank.put(3)
        wait_until(lambda: kept(far) == (1, 3))
    assert [message for message in caplog.messages if "more than 8 MiB" in message] == caplog.messages[:1]


def test_the_newest_is_taken_wherever_it_lies(near: JobDir, far: JobDir) -> None:
    """Also where this node has kept it for another one, on which the rank was until now."""
    Rank(near).put(5)
    Rank(far).put(6)
    with keeping(far) as port:
        nodes = two_nodes(port)
        bring_local_state(near, 0, nodes, [kept_local_states(near), {}])
        assert files_of(near).newest == (1, 5)
        bring_local_state(near, 0, nodes, [kept_local_states(near), kept_local_states(far)])
        assert files_of(near).newest == (1, 6)
        near.others.directory.mkdir()
        Rank(JobDir(near.others.directory), start=SECOND).put(4)
        bring_local_state(near, 0, nodes, [kept_local_states(near), kept_local_states(far)])
        assert files_of(near).newest == (2, 4)
    bring_local_state(near, 0, two_nodes(port), [{}, {0: (9, 9, True)}])  # nobody answers
    assert files_of(near).newest == (2, 4)


def test_files_of_ranks_that_are_sent_elsewhere_now_are_removed(near: JobDir, far: JobDir) -> None:
    far.others.directory.mkdir()
    Rank(JobDir(far.others.directory), 7).put(1)
    with keeping(far) as port, sending(near, port):
        rank = Rank(near)
        rank.put(1)
        wait_until(lambda: kept(far) == (1, 1))
        assert kept(far, 7) == (1, 1)
        rank.put(2)
        wait_until(lambda: kept(far, 7) is None)
    assert {path.name[:10] for path in far.others.directory.iterdir()} == {"rank-00000"}


# -- rebuilding --------------------------------------------------------------------------------------------------------


def rebuilt(near: JobDir, port: int) -> list[int]:
    slots = Slots(near, 0, WORLD, [0])
    slots.adopt()
    made = rebuild(near, slots, PeerMemory(two_nodes(port)))
    slots.close()
    return made


def test_a_step_is_rebuilt_whose_replicas_are_on_another_node(near: JobDir, far: JobDir) -> None:
    rank = Rank(near)
    rank.put(6)
    rank.put(7)
    with keeping(far) as port:
        assert rebuilt(near, port) == []
        put_whole(far, 7)
        assert rebuilt(near, port) == [7]
    assert [stamp.step for stamp, _ in near.snapshots.shard_ids()] == [7]
    assert rebuilt(near, port) == []  # nobody answers any more


def test_a_step_of_an_older_start_is_not_rebuilt_in_place_of_a_newer_snapshot(near: JobDir, far: JobDir) -> None:
    """As when the newest local state was lost with a node, and an older one is brought from another."""
    put_whole(near, 4, 0, SECOND)
    Rank(near).put(3)
    put_whole(far, 3)
    with keeping(far) as port:
        assert rebuilt(near, port) == []
    assert [stamp.step for stamp, _ in near.snapshots.shard_ids()] == [4]


def test_an_update_that_was_under_way_is_inferred_from_a_rank_of_another_node(near: JobDir, far: JobDir) -> None:
    Rank(near).put(6, (6, 10))
    Rank(near, before_update=True).put(7, (6, 10))
    Rank(far, 1, before_update=True).put(7, (6, 20))
    Rank(far, 1).put(7, (7, 20))
    put_whole(far, 7)
    with keeping(far) as port:
        assert rebuilt(near, port) == [7]
    (path,) = [path for _, path in near.snapshots.shard_ids()]
    assert Receipt.decode(path.read_bytes(), path).values == [7, 10]
