"""Saves that go straight to storage: how often, the same steps on all ranks, and nothing lost at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rekindle
from rekindle.save.adaptive import Adaptive
from rekindle.save.cadence import Cadence, Fixed
from rekindle.save.metrics import Metrics
from rekindle.save.schedule import DirectSaveLimit, Schedule
from rekindle.save.snapshot_price import SnapshotPrice
from rekindle.save.step_clock import StepClock
from rekindle.save.timed import Timed
from rekindle.settings import Settings
from rekindle.storage.posix import PosixStore
from tests.faults.harness import Run, restored, train

NO_EFFECT = "persist_seconds=10 has no effect"
NOWHERE = "/proc/none"
"""No memory store can be had there."""


def schedule_of(settings: Settings, nodes: int, world: int, cadence: Cadence | None = None) -> Schedule:
    return Schedule(settings, nodes, world, Metrics(), StepClock(), cadence or Fixed(1))


def adaptive(*, small: bool) -> Adaptive:
    return Adaptive(0.01, 1, lambda own: lambda: own, SnapshotPrice(), lambda: small, small=small)


class Rank:
    """One rank's choice, on a clock of its own."""

    def __init__(self, world: int, took: float = 1.0) -> None:
        self.now, self.saved = 0.0, list[tuple[int, float]]()
        self.limit = DirectSaveLimit(30.0, world, lambda: took, lambda: self.now)

    def step(self, n: int, seconds: float) -> None:
        self.now += seconds
        if self.limit.due(n):
            self.limit.saved(n)
            self.saved.append((n, self.now))

    @property
    def gaps(self) -> list[float]:
        return [later - at for (_, at), (_, later) in zip(self.saved, self.saved[1:], strict=False)]


def test_one_rank_saves_when_the_time_has_come() -> None:
    rank = Rank(1)
    for n in range(1, 1001):
        rank.step(n, 0.25)
    assert rank.saved[0][0] == 1 and set(rank.gaps) == {30.0}
    slow = Rank(1, took=9.0)
    for n in range(1, 1001):
        slow.step(n, 0.25)
    assert set(slow.gaps) == {90.0}


def test_what_failed_is_tried_again_by_one_rank_alone() -> None:
    for world, due in ((1, True), (2, False)):
        rank = Rank(world)
        rank.step(1, 0.25)
        rank.limit.failed()
        assert rank.limit.due(2) is due


@given(st.floats(0.003, 100), st.floats(0.8, 1.25), st.floats(0.1, 20), st.floats(0.6, 1.6), st.integers(1, 10**6))
def test_several_ranks_save_the_same_steps_without_talking(
    pace: float, drift: float, took: float, slower: float, first: int
) -> None:
    ranks = [Rank(2, took), Rank(2, took * slower)]
    longest = max(30.0, 10 * took * max(1.0, slower))
    count = int(6 * max(longest / pace, 1)) + 3
    if count > 20_000:
        return
    for n in range(first, first + count):
        ranks[0].step(n, pace)
        ranks[1].step(n, pace * drift)
    both = sorted(set(dict(ranks[0].saved)) & set(dict(ranks[1].saved)))
    assert both[0] == first
    assert len(both) >= 2, (ranks[0].saved, ranks[1].saved)
    assert all(gap >= min(30.0, longest) / 2 for rank in ranks for gap in rank.gaps)


def test_nothing_is_lost_at_the_end_and_little_is_written(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = rekindle.Values(x=0)
    ckpt = rekindle.Checkpointer(root, {"values": values}, memory=NOWHERE)
    assert "at most every 30 s" in caplog.text and "a process that dies loses" in caplog.text
    for step in range(1, 101):
        values.x = step
        ckpt.step(step)
    assert ckpt.metrics.direct <= 3, "on a machine that is very busy the loop takes its time"
    values.x = -1  # after the last step's end: no part of it
    ckpt.close(timeout=60)
    assert [entry.stamp.step for entry in PosixStore(root).published()][-1] == 100
    again = rekindle.Checkpointer(root, {"values": values}, memory=NOWHERE)
    assert again.restore() == 100 and values.x == 100
    again.close()
    assert ckpt.metrics.failed == 0


def test_what_is_asked_for_is_written_at_once(root: Path, memory: Path) -> None:
    values = rekindle.Values(x=0)
    ckpt = rekindle.Checkpointer(root, {"values": values}, memory=NOWHERE)
    for step in range(1, 4):
        ckpt.save(step)
    ckpt.step(4)
    with ckpt.guard(watchdog=False):
        ckpt.step(5)
    ckpt.save(5, wait="durable", timeout=60)
    assert ckpt.metrics.direct == 4
    ckpt.close()
    assert PosixStore(root).find(5) is not None


def test_without_a_pause_every_step_is_written(root: Path, memory: Path) -> None:
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(x=0)}, memory=NOWHERE, persist_seconds=0)
    for step in range(1, 6):
        ckpt.step(step)
    ckpt.close(timeout=60)
    assert ckpt.metrics.direct == 5


def test_two_ranks_without_memory_bring_the_last_step_to_storage_together(root: Path, memory: Path) -> None:
    run = Run(root, Path(NOWHERE), steps=7, world=2, options={"persist_seconds": 30.0})
    assert train(run) == [0, 0], run.log(0).read_text()
    there = [entry.stamp.step for entry in PosixStore(root).published()]
    assert there[-1] == 7 and len(there) < 7, there
    again = Run(root, Path(NOWHERE), steps=8, world=2, options={"persist_seconds": 30.0})
    assert train(again) == [0, 0] and [restored(again, rank)[-1] for rank in range(2)] == [7, 7]


@pytest.mark.parametrize("place", [None, NOWHERE])
def test_seconds_beside_a_number_of_steps_are_said_to_be_ignored(
    place: str | None, root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"values": rekindle.Values(x=0)}
    rekindle.Checkpointer(root, state, persist_seconds=10, persist_every=5, memory=place).close()
    assert f"{NO_EFFECT} beside persist_every" in caplog.text and "a multiple of 5" in caplog.text
    caplog.clear()
    for options in ({"persist_seconds": 10}, {"persist_every": 5}):
        rekindle.Checkpointer(root, state, memory=place, **options).close()  # type: ignore[arg-type]
    assert "has no effect" not in caplog.text


def test_time_decides_on_several_nodes_that_reach_each_other_too(caplog: pytest.LogCaptureFixture) -> None:
    for nodes in (1, 2):
        schedule = schedule_of(Settings(persist_seconds=10), nodes, nodes)
        assert (schedule.persist_every, schedule.pause) == (None, 10)
        assert not any(map(schedule.persists, range(1, 300)))
        schedule.warn_of_ignored_seconds()
    assert "has no effect" not in caplog.text


def test_a_number_decides_where_nodes_do_not_reach_each_other(caplog: pytest.LogCaptureFixture) -> None:
    schedule = schedule_of(Settings(persist_seconds=10), 2, 2)
    schedule.do_without_mesh()
    schedule.warn_of_ignored_seconds()
    assert f"{NO_EFFECT} on several nodes" in caplog.text and "multiple of 100" in caplog.text
    assert schedule.pause is None and [n for n in range(1, 300) if schedule.persists(n)] == [100, 200]
    given = schedule_of(Settings(persist_every=7), 2, 2)
    given.do_without_mesh()
    assert given.persist_every == 7
    caplog.clear()
    schedule_of(Settings(), 2, 2).warn_of_ignored_seconds()
    assert not caplog.text


def test_without_a_pause_one_node_sends_every_step_and_several_those_that_their_agents_agree_on() -> None:
    alone, together = (schedule_of(Settings(persist_seconds=0), nodes, nodes) for nodes in (1, 2))
    assert alone.persists(1) and alone.pause is None
    assert not together.persists(1) and together.pause == 0
    assert together.limit_direct_saves(lambda: 1.0).due(1) and together.limit_direct_saves(lambda: 1.0).due(2)


@pytest.mark.parametrize(
    ("nodes", "options", "meshed", "told", "untold"),
    [
        (1, {}, True, ["if this node is lost, up to 30 s"], ["node-safe", "DDP"]),
        (2, {}, True, ["newest step that is node-safe", "if more than one node is lost, up to 30 s"], ["DDP"]),
        (2, {"peer_every": 20}, True, ["one step after the other of the multiples of 20:"], []),
        (2, {"peer_every": None}, True, ["if this node is lost, up to 30 s", "under DDP and HSDP"], ["node-safe"]),
        (2, {}, False, ["if this node is lost, up to 100 steps", "under DDP and HSDP"], ["node-safe"]),
        (2, {"persist_every": 7}, True, ["node-safe", "if more than one node is lost, up to 7 steps"], ["DDP"]),
    ],
)
def test_the_log_says_what_the_loss_of_a_node_costs(
    nodes: int,
    options: dict[str, Any],
    meshed: bool,
    told: list[str],
    untold: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="rekindle")
    schedule = schedule_of(Settings(**options), nodes, nodes)
    if not meshed:
        schedule.do_without_mesh()
    schedule.tell_cost_of_a_node()
    assert all(words in caplog.text for words in told), caplog.text
    assert not any(words in caplog.text for words in untold), caplog.text


@pytest.mark.parametrize(
    ("cadence", "apart"),
    [
        (Fixed(1), False),
        (adaptive(small=True), False),
        (adaptive(small=False), True),
        (Fixed(20), True),
        (Timed(60.0, 1, lambda own: lambda: own, StepClock()), True),
    ],
)
def test_the_log_adds_the_steps_between_two_snapshots_where_there_are_some(
    cadence: Cadence, apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Storage can't have what was not taken: a large state has a snapshot every so many steps."""
    caplog.set_level("INFO", logger="rekindle")
    schedule_of(Settings(), 1, 1, cadence).tell_cost_of_a_node()
    assert ("up to 30 s of training, the steps between two snapshots (snapshot_every) and" in caplog.text) is apart
    assert ("up to 30 s of training and the time of one write are lost" in caplog.text) is not apart


def test_a_time_for_storage_is_a_pause_and_auto_begins_with_the_default() -> None:
    by_time, chosen, free = (
        schedule_of(Settings(**options), 1, 1)
        for options in (
            {"persist_every": "10min"},
            {"persist_every": "auto"},
            {"persist_every": "auto", "persist_seconds": 0},
        )
    )
    assert (by_time.persist_every, by_time.pause, by_time.budget) == (None, 600, None)
    assert (chosen.persist_every, chosen.pause, chosen.budget) == (None, 30, 0.01)
    assert (free.pause, free.budget) == (0, 0.01), "where it begins with is no word on whether it chooses"
    assert not any(one.persists(n) for one in (by_time, chosen, free) for n in range(1, 200))


@pytest.mark.parametrize(
    ("options", "meshed", "told"),
    [
        ({"persist_every": "10min"}, True, None),
        (
            {"persist_every": "10min"},
            False,
            "persist_every='10min' has no effect on several nodes whose agents don't reach",
        ),
        ({"persist_every": "auto"}, False, "persist_every='auto' has no effect on several nodes"),
        ({"persist_every": "auto", "persist_seconds": 10}, True, None),
        ({"persist_every": "10min", "persist_seconds": 10}, True, f"{NO_EFFECT} beside persist_every"),
    ],
)
def test_a_time_that_decides_nothing_is_named(
    options: dict[str, Any], meshed: bool, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = schedule_of(Settings(**options), 2, 2)
    if not meshed:
        schedule.do_without_mesh()
    schedule.warn_of_ignored_seconds()
    assert told in caplog.text if told else not caplog.text
    assert schedule.budget is None or meshed
