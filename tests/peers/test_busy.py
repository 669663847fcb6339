"""An hour of beats on nodes whose processors are full and whose agents are stopped: no false alarm, no missed loss.

The clock is virtual. One start of the job lasts for a tenth of 36,000 beats of each node, and ends with the loss of a
node, as a real one does. All the while, and while the loss is judged, every node is stalled again and again: its agent
stands still, and what reaches it waits.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rekindle.peers.membership import PATIENCE
from tests.peers.simulated import Harm, SimulatedJob

BEATS = 3600
SECONDS = 620.0
"""Virtual seconds in which each node sends so many: it is stalled for a third of the time."""
STALLS = ((0.05, 0.5), (0.5, 1.0), (1.0, 3.0), (3.0, 7.5))
"""Seconds of the kinds of stalls: late turns of a busy scheduler, its worst ones, swapping, a stopped agent."""
CHANCES = (60, 25, 12, 3)
LONG = (12.0, 30.0)
"""Seconds of stops beyond ``PATIENCE``. Steps that go on show that the node is there."""
BETWEEN = (0.6, 4.0)
"""Seconds between two stalls of a node."""
LATE = 2.0
"""Seconds by which a loss may be noticed late, beyond those for which nodes were stalled meanwhile. A stall counts for
half a second to the node itself, and what it said of others before counts until it speaks again."""


class BusyJob(SimulatedJob):
    """Nodes that are stalled all the time."""

    def __init__(self, count: int, chances: random.Random) -> None:
        super().__init__(count, chances, PATIENCE)
        self.beats = [0] * count
        self.stalls: Counter[tuple[float, float]] = Counter()
        self.stalled: list[Harm] = []
        """All stalls so far. Only those that are not over count as harms: each message looks at all of these."""
        self.long_until = 0.0
        """Time up to which stops may be long."""
        for node in range(count):
            self._stall_later(node)

    def _stall_later(self, node: int) -> None:
        self.at(self.now + self.chances.uniform(*BETWEEN), lambda: self._stall(node))

    def _stall(self, node: int) -> None:
        (kind,) = self.chances.choices(STALLS, CHANCES)
        if self.now + LONG[1] < self.long_until and self.chances.random() < 0.01:
            kind = LONG
        stall = Harm("stop", (node,), self.now, self.now + self.chances.uniform(*kind))
        self.stalls[kind] += 1
        self.stalled.append(stall)
        self.harms = [*(harm for harm in self.harms if harm.end > self.now), stall]
        self.at(stall.end, lambda: self._stall_later(node))

    def _beat(self, node: int) -> None:
        self.beats[node] += self._acts(node) and not self._resumes(node)
        super()._beat(node)

    def stalled_between(self, begin: float, end: float) -> float:
        """Returns the seconds for which nodes were stalled in that time, all of them together."""
        return sum(max(0.0, min(stall.end, end) - max(stall.begin, begin)) for stall in self.stalled)


class BusyStart:
    """One start, to the loss of a node."""

    def __init__(self, seed: int) -> None:
        chances = random.Random(seed)
        self.job = job = BusyJob(chances.randint(2, 5), chances)
        self.how, self.victim = ("power", "fin")[seed % 3 == 2], chances.randrange(job.count)
        self.end = SECONDS + chances.random() * 10.0
        if seed % 2 == 0:  # the others do something that has no steps, such as an evaluation
            job.long_until = self.end
            job.at(0.5, lambda: job.step(0.3))
        agent = chances.randrange(job.count)
        job.at(SECONDS / 2, lambda: job.end_agent(agent, job.now + 1.5))
        job.at(self.end, lambda: job.die(self.victim, self.how))
        job.run(self.end + 4 * PATIENCE)

    def check(self) -> None:
        assert min(self.job.beats) >= BEATS, self.job.beats
        for node, events in enumerate(self.job.events):
            lost = [(event.node, at) for at, event in events if event.kind == "lost"]
            assert {who for who, _ in lost} == ({self.victim} if node != self.victim else set()), f"{node}: {lost}"
            for _, at in lost:
                late = at - self.end - PATIENCE
                assert at > self.end and late <= LATE + self.job.stalled_between(self.end, at), f"{node}: {lost}"


def check(seeds: range) -> Counter[tuple[float, float]]:
    """Checks some starts. Returns the numbers of the kinds of their stalls."""
    stalls: Counter[tuple[float, float]] = Counter()
    for seed in seeds:
        start = BusyStart(seed)
        try:
            start.check()
        except AssertionError as error:
            what = f"seed {seed}: node {start.victim} of {start.job.count} is lost by {start.how} at {start.end:.1f}"
            raise AssertionError(f"{what}: {error}") from error
        stalls += start.job.stalls
    return stalls


def test_a_tenth_of_an_hour_on_busy_nodes_raises_no_false_alarm() -> None:
    assert check(range(1)).keys() >= set(STALLS)


@pytest.mark.campaign
def test_an_hour_on_busy_nodes_raises_no_false_alarm() -> None:
    """36,000 beats of each node to each other one, and the loss of a node in each tenth."""
    assert check(range(1, 11)).keys() == {*STALLS, LONG}
