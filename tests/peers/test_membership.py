"""Judging which nodes are there: single rules, then thousands of jobs on a virtual clock."""

from __future__ import annotations

import random

import pytest

from rekindle.peers.membership import BEAT_EVERY, PATIENCE, SUSPECT, Event, Membership
from tests.peers.simulated import Harm, SimulatedJob


def kinds(events: list[Event]) -> list[tuple[str, int]]:
    return [(event.kind, event.node) for event in events]


class Node:
    """One node's judgement, on a clock that moves by ticks. All others are heard unless said otherwise."""

    def __init__(self, count: int = 3, patience: float = PATIENCE) -> None:
        self.now = 1000.0
        self.members = Membership(0, count, self.now, patience)
        self.others = range(1, count)
        self.told: list[Event] = []
        self.tick()

    def tick(self, seconds: float = BEAT_EVERY, but: tuple[int, ...] = (), hear: tuple[int, ...] | None = None):
        """Lets time pass while ``but`` are not heard. The others hear ``hear``; by default, all that this one hears."""
        events = []
        speaking = [node for node in self.others if node not in but]
        for _ in range(max(1, round(seconds / BEAT_EVERY))):
            self.now += BEAT_EVERY
            for node in speaking:
                self.members.heard(node, self.now, (0, *speaking) if hear is None else hear)
            events += self.members.tick(self.now)
        self.told += events
        return kinds(events)


def test_a_node_is_silent_after_a_second_lost_after_ten_and_back_when_heard():
    node = Node()
    assert node.tick(5.0) == []
    assert node.tick(SUSPECT - 0.15, but=(2,)) == [] and not node.members.misses()
    assert node.tick(0.3, but=(2,)) == [("silent", 2)] and node.members.misses()
    assert node.tick(8.7, but=(2,)) == []
    assert node.tick(0.5, but=(2,)) == [("lost", 2)]
    assert node.tick(60.0, but=(2,)) == [], "told twice"
    assert node.members.state(2) == "lost" and node.members.misses()
    assert node.tick(0.2) == [("back", 2)]
    assert node.members.state(2) == "there" and not node.members.misses()


def test_the_words_name_the_time_and_tell_if_others_hear_the_node():
    node = Node()
    node.tick(1.2, but=(2,), hear=(0, 2))
    node.tick(10.0, but=(2,), hear=(0,))
    node.tick()
    silent, lost, back = node.told
    assert (silent.why, silent.seconds) == ("no sign of it for 1.0 s, though another node hears it", pytest.approx(1.0))
    assert (lost.why, lost.seconds) == ("no sign of it for 10.0 s, and no other node hears it", pytest.approx(10.0))
    assert (back.why, back.seconds) == ("heard again after 11.3 s", pytest.approx(11.3))
    node.tick(1.2, but=(2,), hear=(0,))
    assert node.told[-1].why == "no sign of it for 1.0 s: it is lost if that lasts for 10 s"


def test_a_node_that_another_one_hears_is_never_lost():
    node = Node()
    node.tick()
    assert node.tick(60.0, but=(2,), hear=(0, 2)) == [("silent", 2)] and not node.members.misses()
    assert node.tick(2.0, but=(2,), hear=(0,)) == [("lost", 2)]


def test_the_word_of_a_node_that_is_silent_itself_does_not_count():
    node = Node()
    node.tick(1.0, hear=(0, 1, 2))
    assert node.tick(11.0, but=(1, 2)) == [("silent", 1), ("silent", 2), ("lost", 1), ("lost", 2)]


def test_a_node_whose_links_close_is_lost_as_soon_as_a_collective_fails():
    node = Node()
    node.tick()
    node.members.closed(2, node.now)
    assert node.tick(0.5, but=(2,)) == []
    node.members.collective_failed(node.now)
    assert node.tick(0.1, but=(2,)) == [("lost", 2)]


def test_a_collective_may_fail_just_before_the_links_close():
    node = Node()
    node.tick()
    node.members.collective_failed(node.now)
    node.tick(0.2)
    node.members.closed(2, node.now)
    assert node.tick(0.5, but=(2,)) == [("lost", 2)]


def test_a_collective_that_failed_long_ago_says_nothing_about_a_link_that_closes():
    node = Node()
    node.members.collective_failed(node.now)
    node.tick(5.0)
    node.members.closed(2, node.now)
    assert node.tick(2.0, but=(2,)) == [("silent", 2)]


def test_one_that_closes_a_link_and_comes_back_at_once_is_none_of_it():
    node = Node()
    node.tick()
    node.members.closed(2, node.now)
    node.members.collective_failed(node.now)
    assert node.tick(0.2, but=(2,)) == []
    assert node.tick(5.0) == []


def test_a_host_that_refuses_has_lost_its_agent_and_no_more():
    node = Node()
    node.tick()
    node.members.closed(2, node.now)
    seen = []
    for _ in range(60):
        node.members.refused(2, node.now)
        node.members.progressed(node.now)
        seen += node.tick(1.0, but=(2,))
    assert seen == [("agent gone", 2)]
    assert node.tick(0.2) == [("back", 2)]


def test_a_host_that_refuses_for_long_while_training_stands_still_is_lost():
    """A container whose processes were all killed, and a backend whose collectives wait for them for ever."""
    node = Node()
    node.tick()
    node.members.closed(2, node.now)
    seen = []
    for _ in range(29):
        node.members.refused(2, node.now)
        seen += node.tick(1.0, but=(2,))
    assert seen == [("agent gone", 2)]
    node.members.refused(2, node.now)
    assert node.tick(1.5, but=(2,)) == [("lost", 2)]
    assert "its host is up, and nothing runs there any more" in node.told[-1].why


def test_a_host_that_no_longer_refuses_is_silent_and_then_lost():
    node = Node()
    node.tick()
    node.members.refused(2, node.now)
    assert node.tick(11.0, but=(2,)) == [("agent gone", 2), ("silent", 2), ("lost", 2)]


def test_steps_that_go_on_show_that_all_nodes_live():
    """A network of its own may carry the collectives: the job trains on while no beat comes through."""
    node = Node()
    node.tick()
    seen = []
    for _ in range(60):
        node.members.progressed(node.now)
        seen += node.tick(1.0, but=(2,))
    assert seen == [("silent", 2)]
    assert node.tick(10.0, but=(2,)) == [("lost", 2)]


def test_a_node_that_was_never_heard_is_never_lost():
    """A firewall between agents must leave the job as it was without them."""
    node = Node()
    strange = Membership(0, 3, node.now)
    seen: list[Event] = []
    for _ in range(600):
        node.now += BEAT_EVERY
        strange.heard(1, node.now, {0})
        seen += strange.tick(node.now)
    assert kinds(seen) == [("silent", 2)] and not strange.misses()
    assert "see that nodes can connect" in seen[0].why


def test_an_agent_that_was_stopped_blames_nobody():
    node = Node()
    node.tick()
    node.now += 300.0
    assert node.members.tick(node.now) == []
    assert node.tick(0.3, but=(1, 2)) == [], "what others sent meanwhile is read only now"
    assert node.tick(5.0) == []


def test_an_agent_that_is_always_late_still_notices():
    """Full processors delay each tick."""
    node = Node()
    node.tick()
    events: list[Event] = []
    for _ in range(30):
        node.now += 0.7
        node.members.heard(1, node.now, {0})
        events += node.members.tick(node.now)
    assert kinds(events) == [("silent", 2), ("lost", 2)]


def test_who_hears_less_than_half_says_that_it_may_be_cut_off_itself():
    members = Membership(0, 5, 0.0)
    for node in range(1, 5):
        members.heard(node, 0.0, range(5))
    events = [event for beat in range(120) for event in members.tick(beat * BEAT_EVERY)]
    lost = [event.why for event in events if event.kind == "lost"]
    assert len(lost) == 4
    assert all("hears only 0 of 4 others, so it may be the one that is cut off" in why for why in lost)


def test_a_node_names_in_its_beats_whom_it_hears_itself():
    node = Node(count=4)
    node.tick()
    assert node.members.hears(node.now) == [1, 2, 3]
    node.members.closed(2, node.now)
    assert node.members.hears(node.now) == [1, 3]
    node.tick(SUSPECT + 0.1, but=(1, 2))
    assert node.members.hears(node.now) == [3]
    assert node.members.silence(1, node.now) == pytest.approx(SUSPECT + 0.1, abs=0.15)


def test_a_node_that_takes_no_part_is_not_missed():
    members = Membership(0, 3, 0.0, absent=[1])
    assert members.neighbours == [2]
    members.heard(1, 0.0, [])
    assert (members.state(1), members.silence(1, 0.0)) == ("unknown", None)
    assert Membership(1, 3, 0.0, absent=[1]).neighbours == []


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 18, 31, 32, 33, 200])
def test_neighbours_are_mutual_and_have_a_third_one_in_common(count: int):
    near = [set(Membership(own, count, 0.0).neighbours) for own in range(count)]
    for own, others in enumerate(near):
        assert own not in others
        assert (
            len(others) == count - 1 if count <= 16 else {(own + way) % count for way in (1, 2, count // 2)} <= others
        )
        assert len(others) <= max(15, 2 * count.bit_length() + 3)
        for other in others:
            assert own in near[other]
            assert count < 3 or near[own] & near[other] - {own, other}, "nobody could tell a broken link from a loss"


@pytest.mark.parametrize("count", [17, 128, 1000])
def test_words_that_are_told_on_reach_all_nodes_within_five_beats(count: int):
    near = [Membership(own, count, 0.0).neighbours for own in range(count)]
    reached, last = {0}, {0}
    for _ in range(5):
        last = {other for own in last for other in near[own]} - reached
        reached |= last
    assert len(reached) == count


class Trial:
    """One job with random harm, short of what makes a loss, and often with the loss of a node or two."""

    patience = 3.0
    harm_lasts = 1.3
    """Seconds of a disturbance at most: with what delays and pauses add, this stays short of patience."""
    bound = 1.6
    """Seconds by which a loss may be noticed late: the tick, the delay, the word of others who heard it last."""

    def __init__(self, seed: int) -> None:
        self.chances = random.Random(seed)
        count = self.chances.randint(17, 22) if seed % 25 == 24 else self.chances.randint(2, 12)
        self.job = SimulatedJob(count, self.chances, self.patience)
        self.how = self.chances.choice(["power", "fin", "agent", "collective", "apart", "nothing"])
        self.victims = self.chances.sample(range(count), 2 if count > 3 and self.chances.random() < 0.2 else 1)
        self.begin = 3.5 + self.chances.random() * 2
        steps = self.chances.choice([0.0, 0.3])
        if steps:
            self.job.at(0.5, lambda: self.job.step(steps))
        self._disturb()
        self._strike()
        self.job.run(self.begin + self.patience + 3.5)

    def _disturb(self) -> None:
        """Stops an agent, or cuts some nodes off, now and then; the last time may overlap the loss of a node."""
        at = 1.0
        while at < self.begin and self.chances.random() < 0.8:
            kind = self.chances.choice(["stop", "cut", "apart"])
            some = self.chances.sample(range(self.job.count), self.chances.randint(1, self.job.count))
            self.job.harms.append(Harm(kind, tuple(some), at, at + self.chances.random() * self.harm_lasts))
            at += self.harm_lasts + 1.0

    def _strike(self) -> None:
        for node in self.victims:
            if self.how in ("power", "fin"):
                self.job.at(self.begin, lambda node=node: self.job.die(node, self.how))
            elif self.how == "agent":
                until = self.begin + self.chances.choice([1.5, 1000.0])
                self.job.at(self.begin, lambda node=node, until=until: self.job.end_agent(node, until))
        if self.how == "collective":
            self.job.at(self.begin, self.job.fail_collectives)
        if self.how == "apart" and self.job.count > 2:  # for good, but with others that hear both
            pair = (0, self.chances.choice(self.job.members[0].neighbours))
            self.job.harms.append(Harm("apart", pair, self.begin, 1000.0))

    def check(self) -> None:
        for node in range(self.job.count):
            if node not in self.job.dead and node not in self.job.without_agent:
                self._check_order(node)
                self._check_losses(node)

    def _check_order(self, node: int) -> None:
        """No event comes twice, none without a reason, and after a loss only the return."""
        last: dict[int, str] = {}
        for _, event in self.job.events[node]:
            before = last.get(event.node)
            assert event.node != node
            assert event.kind != before
            assert (event.kind == "back") == (before == "lost") or before != "lost"
            assert event.kind != "back" or before not in (None, "back")
            last[event.node] = event.kind

    def _check_losses(self, node: int) -> None:
        """All nodes that are gone are called so in time, by the right name, and no others are."""
        lost = {event.node: at for at, event in self.job.events[node] if event.kind == "lost"}
        assert lost.keys() == self.job.dead.keys() & set(self.job.members[node].neighbours)
        calm = max([harm.end for harm in self.job.harms] + [self.begin])
        for gone, at in lost.items():
            wait = SUSPECT if self.how == "fin" else self.patience
            assert self.begin < at <= calm + wait + self.bound
            if calm == self.begin and self.how == "power":
                told = [at for at, event in self.job.events[node] if (event.kind, event.node) == ("silent", gone)]
                assert told[-1] <= self.begin + 2.0


MANY = [pytest.param(range(at, at + 1000), marks=pytest.mark.campaign(60)) for at in range(0, 10_000, 1000)]


@pytest.mark.timeout(900)  # computes for a minute, and may have a quarter of a core
@pytest.mark.parametrize("seeds", [range(30), *MANY], ids=lambda seeds: f"{seeds.start}-{seeds.stop}")
def test_no_node_is_taken_for_lost_and_each_loss_is_called_in_time(seeds: range):
    ways, harms, told = set(), set(), set()
    for seed in seeds:
        trial = Trial(seed)
        try:
            trial.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {trial.how} of {trial.victims}, {trial.job.harms}: {error}") from error
        ways.add(trial.how)
        harms |= {harm.kind for harm in trial.job.harms}
        told |= {event.kind for events in trial.job.events for _, event in events}
    assert ways == {"power", "fin", "agent", "collective", "apart", "nothing"}, "the trials left something out"
    assert harms == {"stop", "cut", "apart"}
    assert told == {"silent", "back", "lost", "agent gone"}


def test_an_hour_of_beats_raises_no_false_alarm():
    """36,000 beats of each node to each other one, over a network that loses one in thirty."""
    job = SimulatedJob(3, random.Random(1), PATIENCE)
    job.run(3600.0)
    assert job.events == [[], [], []]


# -- a link that comes back --------------------------------------------------------------------------------------------


def sent_again(cut: float, first: float) -> float:
    """When the kernel has delivered what was lost as a cut began: its first attempt after the cut's end."""
    at, pause = first, first
    while at < cut:
        pause *= 2
        at += pause
    return at


@pytest.mark.parametrize("first", [0.2, 0.3])
@pytest.mark.parametrize("again", [0.05, 0.4, 1.1])
def test_ranks_have_no_unexcused_second_until_a_link_has_sent_again_what_it_lost(first: float, again: float) -> None:
    """The least limit of a hang is a second and three steps. Beats come by a new link, ``again`` after the cut."""
    for tenths in range(1, 96):
        cut, node, unexcused = tenths / 10, Node(2), 0.0
        node.tick(3.0)
        began = node.now
        while node.now < began + sent_again(cut, first):
            node.tick(but=(1,) if node.now < began + cut + again else ())
            excused = node.members.state(1) == "silent" or node.members.settles()
            unexcused = 0.0 if excused else unexcused + BEAT_EVERY
            assert unexcused < 1.15, f"a cut of {cut} s at {node.now - began:.1f} s"


def test_a_link_that_is_back_for_as_long_as_it_was_away_excuses_nothing() -> None:
    node = Node()
    node.tick(3.0)
    node.tick(0.4, but=(2,))
    node.tick(0.1)
    assert not node.members.settles(), "ranks notice nothing of so short a cut"
    node.tick(4.0, but=(2,))
    assert not node.members.settles() and node.members.state(2) == "silent"
    node.tick(3.9)
    assert node.members.settles()
    node.tick(0.4)
    assert not node.members.settles()
    node.tick(60.0, but=(2,), hear=(0, 2))
    node.tick(PATIENCE + 0.3)
    assert not node.members.settles(), "a hang is noticed though a link was away for a minute"
