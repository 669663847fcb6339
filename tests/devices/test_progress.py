"""The clock of devices: which step stands, what counts after a fault, and what a failed device leaves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rekindle.devices.events import Event
from rekindle.errors import RekindleError
from rekindle.save import progress
from rekindle.save.progress import KEPT, DeviceClock, Progress, StateMoved, standing_step
from tests.devices.fake import DEVICE, FakeBackend

OTHER = torch.device(DEVICE.type, 1)


class Point:
    """A point in a queue, which the test lets the device reach."""

    def __init__(self) -> None:
        self.done = False
        self.lost = False

    def query(self) -> bool:
        if self.lost:
            raise RuntimeError("device-side assert triggered")
        return self.done


TABLE = [
    ([], None),
    ([(3, True, True)], 3),
    ([(3, True, False)], None),
    ([(3, True, True), (4, False, False)], 3),
    ([(3, True, True), (4, True, False)], None),
    ([(3, True, True), (4, True, True)], 4),
    ([(3, True, True), (4, True, True), (5, False, False), (6, False, False)], 4),
    ([(3, True, False), (4, True, True)], 4),  # an end that doesn't count, but its successor's does
    ([(3, False, False)], None),
]


@pytest.mark.parametrize(("progress", "step"), TABLE)
def test_the_newest_step_begun_stands_if_it_has_ended(progress: list[tuple[int, bool, bool]], step: int | None) -> None:
    assert standing_step([Progress(*one) for one in progress]) == step


class Queue:
    """A clock whose device does what the test says: events in the order in which they were queued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.points = DeviceClock(), list[Point]()
        monkeypatch.setattr(progress, "record", self.record)
        self.end(0)
        self.reach(1)

    def record(self, device: torch.device) -> Event:
        self.points.append(Point())
        return Event(device, self.points[-1])

    def update(self, step: int) -> None:
        self.clock.begin_update(step)

    def again(self) -> None:
        self.clock.update_again()

    def end(self, step: int) -> None:
        self.clock.end_step(step, {DEVICE: self.record(DEVICE)})

    def step(self, step: int) -> None:
        self.update(step)
        self.end(step)

    def reach(self, count: int) -> None:
        for point in self.points[:count]:
            point.done = True

    def lose(self) -> None:
        for point in self.points:
            point.lost = True


@pytest.fixture
def queue(device: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(monkeypatch)


def test_the_host_may_be_ahead(queue: Queue) -> None:
    for step in (1, 2, 3):
        queue.step(step)
    found = []
    for count in range(1, 8):
        queue.reach(count)
        found.append(queue.clock.standing())
    assert found == [0, None, 1, None, 2, None, 3]


def test_nothing_is_recorded_while_the_state_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> Event:
        raise AssertionError(device)

    monkeypatch.setattr(progress, "record", fail)
    clock = DeviceClock()
    clock.end_step(1, {})
    clock.begin_update(2)
    assert not clock.in_use and clock.standing() is None and not clock.awaits(-1)
    clock.check(1)
    clock.freeze(late=False)


def test_a_step_stands_only_where_all_devices_have_ended_it(device: FakeBackend) -> None:
    clock = DeviceClock()
    first, second = (Point(), Point()), (Point(), Point())
    clock.end_step(1, {DEVICE: Event(DEVICE, first[0]), OTHER: Event(OTHER, first[1])})
    first[0].done = first[1].done = True
    clock.end_step(2, {DEVICE: Event(DEVICE, second[0]), OTHER: Event(OTHER, second[1])})
    assert clock.standing() == 1
    second[0].done = True
    assert clock.standing() is None
    with pytest.raises(StateMoved):
        clock.check(1)
    second[1].done = True
    assert clock.standing() == 2


@pytest.mark.parametrize(
    ("late", "reached", "counts"),
    [
        (False, 1, 0),  # the update had not begun: what follows may be an abort
        (False, 2, 1),  # it had begun, with gradients that were complete
        (False, 3, 1),
        (False, 4, 2),
        (True, 1, 2),
    ],
)
def test_only_what_was_begun_before_the_fault_counts(queue: Queue, late: bool, reached: int, counts: int) -> None:
    queue.step(1)
    queue.step(2)
    queue.reach(reached)
    queue.clock.freeze(late=late)
    queue.reach(5)
    assert queue.clock.standing() == (2 if counts == 2 else None)
    assert queue.clock.lost() == (counts < 2)
    assert [queue.clock.counts(step) for step in (0, 1, 2)] == [True, counts >= 1, counts >= 2]


def test_the_first_notice_is_what_a_later_one_refers_to(queue: Queue) -> None:
    queue.step(1)
    queue.clock.freeze(late=True)
    queue.reach(3)
    queue.clock.freeze(late=False)
    assert not queue.clock.counts(1) and queue.clock.standing() is None


@pytest.mark.parametrize("updates", [1, 10])
def test_the_host_may_be_ahead_by_steps_of_several_updates(queue: Queue, updates: int) -> None:
    """The first update since a step is announced as the one that makes the next, whatever is told then."""
    for told in range(1, KEPT):
        queue.update((told - 1) * updates + 1)
        queue.end(told * updates)
    queue.update((KEPT - 1) * updates + 1)
    assert queue.clock.standing() == 0 and queue.clock.awaits(0)
    queue.reach(3)
    assert queue.clock.standing() == updates


def test_a_step_of_several_updates_counts_only_if_the_last_was_over(queue: Queue) -> None:
    """Others come behind the update that had begun at the notice, each with a collective that may be aborted."""
    queue.update(1)
    queue.end(10)
    queue.reach(2)
    queue.clock.freeze(late=False)
    queue.reach(3)
    assert not queue.clock.counts(10) and queue.clock.standing() is None and queue.clock.lost()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("reached", "counts"), [(2, False), (3, True)])
def test_a_step_of_two_optimizers_counts_once_the_second_has_begun(
    queue: Queue, reached: int, counts: bool, late: bool
) -> None:
    """A collective for the second one's gradients stands behind the first one's update."""
    queue.update(1)
    queue.again()
    queue.end(1)
    queue.reach(reached)
    queue.clock.freeze(late=late)
    queue.reach(4)
    assert queue.clock.counts(1) == (counts or late) == (queue.clock.standing() == 1)


@pytest.mark.parametrize("late", [False, True])
def test_an_update_that_is_announced_after_the_notice_is_not_one_that_had_begun(queue: Queue, late: bool) -> None:
    queue.update(1)
    queue.reach(2)
    queue.clock.freeze(late=late)
    queue.again()
    queue.end(1)
    queue.reach(4)
    assert queue.clock.counts(1) == late == (queue.clock.standing() == 1)
    queue.clock.freeze(late=False)
    assert not queue.clock.counts(1) and queue.clock.counts(0)


@pytest.mark.parametrize("reached", [1, 2, 3])
def test_nothing_counts_after_an_abort(queue: Queue, reached: int) -> None:
    queue.step(1)
    queue.clock.freeze(late=True)
    queue.reach(reached)
    assert queue.clock.awaits(0) == (reached < 3)
    queue.clock.distrust()
    queue.reach(3)
    assert queue.clock.counts(1) == (reached == 3) == (queue.clock.standing() == 1)
    assert not queue.clock.awaits(0)


def test_a_failed_device_is_told_of(queue: Queue) -> None:
    queue.step(1)
    assert queue.clock.standing() == 0
    queue.lose()
    for ask in (queue.clock.standing, lambda: queue.clock.check(0)):
        with pytest.raises(RekindleError, match="a device has failed"):
            ask()
    queue.clock.freeze(late=False)
    queue.clock.distrust()
    assert queue.clock.counts(0) and not queue.clock.counts(1)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.data())
def test_any_order_of_host_and_device(moves: list[int], data: st.DataObject) -> None:
    """The host goes on by 0 to 3 calls, then the device by any number of points; the clock knows it at any time."""
    with pytest.MonkeyPatch.context() as patch:
        queue = Queue(patch)
        reached, calls = 1, 0
        for move in moves:
            for _ in range(move):
                if len(queue.points) - reached < 2 * KEPT - 2:  # the host waits else
                    calls += 1
                    (queue.end if calls % 2 == 0 else queue.update)((calls + 1) // 2)
            reached = data.draw(st.integers(reached, len(queue.points)))
            queue.reach(reached)
            expected = (reached - 1) // 2 if reached % 2 else None  # 0 ends, 1 begins, 1 ends, 2 begins, ...
            assert queue.clock.standing() == expected
