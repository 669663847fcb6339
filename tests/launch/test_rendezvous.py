"""The launchers' rendezvous as rules: who leads, who takes part, and that faults of all kinds leave one job."""

from __future__ import annotations

import itertools

import pytest

from rekindle.launch.rendezvous.node import FIRST_COMES_WITHIN, LOST_AFTER
from rekindle.launch.rendezvous.roster import ENDS_WITHIN, REJOIN_WITHIN, SMALLER_SIDE_WAITS, VACANT_FOR, Roster
from rekindle.launch.rendezvous.wire import (
    MOST_BYTES,
    SUCCESSORS,
    Address,
    Alive,
    Bye,
    Done,
    Elsewhere,
    Hello,
    Lead,
    Message,
    News,
    Refused,
    Round,
    Successor,
    Want,
    decode,
    encode,
)
from tests.launch.simulated_launchers import PORT, Launcher, Network

AT = Address("node-1", 29400)
ID = "0123456789abcdef"
LONGEST = Address("n" * 250, 65535)
PLACES = frozenset(range(1 << 16))
MESSAGES: list[Message] = [
    Hello("job", ID, AT, 1, 4, 7, 2, 3, None, False, True),
    Hello("job", ID, Address("fe80::1%eth0", 1), 1, 4, 0, -1, 0, AT, True, False),
    Want(AT, 7),
    Want(AT, 7, 60),
    Done(7),
    Alive(),
    Bye(True),
    News(1, 7, 2, (Successor(ID, LONGEST),) * SUCCESSORS, -1, 2, False, False, True, False, PLACES, True, False),
    News(1, 7, 2, (), -1, 2, False, False, True, False, frozenset(), True, False),
    Round(8, 0, 2, AT),
    Elsewhere(None),
    Elsewhere(AT),
    Refused("no", same_job=True),
    Lead("job", ID, AT, 3, 2, 1, False),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    line = encode(message)
    found = decode(line)
    assert found == message and type(found) is type(message)
    assert len(line) <= MOST_BYTES and line.endswith(b"\n")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b"\xff",
        b'{"is": "none"}',
        b'{"is": "bye"}',
        b'{"is": "bye", "over": 1}',
        b'{"is": "bye", "over": true, "more": 1}',
        b'{"is": "elsewhere", "address": ["a b", 1]}',
        b'{"is": "elsewhere", "address": ["../a", 1]}',
        b'{"is": "elsewhere", "address": ["a", 0]}',
        b'{"is": "elsewhere", "address": ["a", true]}',
        b'{"is": "want", "store": null, "after": 0}',
        b'{"is": "want", "store": ["a", 1], "after": -1}',
        b'{"is": "refused", "why": "a\\nb", "same_job": true}',
    ],
)
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line)


# -- one fault ---------------------------------------------------------------------------------------------------------


def part(launchers: list[Launcher]) -> list[Launcher]:
    """Launchers whose ranks run, by their place in the newest round."""
    newest = max((x.rounds[-1].number for x in launchers if x.rounds), default=0)
    found = [x for x in launchers if x.alive and x.runs and x.rounds[-1].number == newest]
    return sorted(found, key=lambda x: x.rounds[-1].place)


def hosts(launchers: list[Launcher]) -> str:
    return "".join(x.host for x in part(launchers))


def job(network: Network, names: str = "abc", *, at: str = "a", least: int = 2, most: int = 2) -> list[Launcher]:
    """Launchers that have met; those after the most wait as spares."""
    made = []
    for name in names:
        made.append(network.add(name, at=at, least=least, most=most))
        network.run(0.5)
    network.run_until(lambda: len(part(made)) == min(most, len(names)))
    network.run(3.0)
    return made


def test_nodes_meet_within_milliseconds_in_the_order_of_their_names() -> None:
    network = Network()
    made = [network.add(name, most=4, least=4) for name in ("a10", "a9", "a")]
    network.run(2.0)
    assert not any(x.rounds for x in made)
    made.append(network.add("a2", most=4, least=4))
    assert network.run_until(lambda: len(part(made)) == 4) < 0.3
    assert [x.host for x in part(made)] == ["a", "a2", "a9", "a10"]
    assert {x.rounds[-1].store for x in made} == {Address("a", 1000)}


def test_a_rank_that_failed_costs_one_round_of_the_same_nodes_and_no_spare_takes_part() -> None:
    network = Network()
    made = job(network)
    assert hosts(made) == "ab"
    made[1].fail()
    assert network.run_until(lambda: len(part(made)) == 2 and len(made[0].rounds) == 2) < 1.0
    network.run(20.0)
    assert hosts(made) == "ab" and [len(x.rounds) for x in made] == [2, 2, 0]
    assert made[2].node.news is not None and made[2].node.news.spare


@pytest.mark.parametrize("power", [True, False], ids=["power", "closed"])
@pytest.mark.parametrize("lost", [0, 1], ids=["that leads", "that follows"])
def test_a_spare_takes_the_place_of_a_lost_node_whichever_it_is(lost: int, power: bool) -> None:
    network = Network()
    made = job(network)
    (network.lose_power if power else network.kill)(made[lost])
    seconds = network.run_until(lambda: len(part(made)) == 2 and len(part(made)[0].rounds) > 0 and made[2].runs)
    expected = LOST_AFTER if power else VACANT_FOR
    assert expected - 0.6 < seconds < expected + 0.9
    assert hosts(made) == ("cb" if lost == 0 else "ac")
    network.run(20.0)
    assert len(made[2].rounds) == 1


def test_a_connection_that_is_broken_for_a_moment_or_ends_costs_no_restart() -> None:
    network = Network()
    made = job(network)
    for launcher in made[:2]:
        network.cut(launcher.host)
        network.run(LOST_AFTER - 1.0)
        network.cut()
        network.run(10.0)
        network.sever(launcher)
        network.run(10.0)
    assert [len(x.rounds) for x in made] == [1, 1, 0]


def test_without_a_spare_the_others_wait_for_a_node_that_comes_later() -> None:
    network = Network()
    made = job(network, "ab")
    network.lose_power(made[0])
    network.run(LOST_AFTER + REJOIN_WITHIN + 1.0)
    made[1].fail()
    network.run(60.0)
    assert not part(made) and made[1].node.leads
    made.append(network.add("a"))
    network.run_until(lambda: hosts(made) == "ab")


def test_a_node_that_comes_back_under_the_endpoints_name_finds_the_job_that_goes_on_elsewhere() -> None:
    network = Network()
    made = job(network)
    network.kill(made[0])
    network.run_until(lambda: hosts(made) == "cb")
    network.run(5.0)
    made.append(network.add("a"))
    network.run(20.0)
    assert hosts(made) == "cb" and made[3].node.news is not None and made[3].node.news.spare
    assert [x.node.leads for x in made if x.alive] == [True, False, False]
    assert len(made[2].rounds) == 1


def test_the_second_endpoint_leads_where_the_first_never_comes() -> None:
    network = Network()
    made = [network.add(name, at="a,b") for name in "bc"]
    seconds = network.run_until(lambda: len(part(made)) == 2)
    assert FIRST_COMES_WITHIN <= seconds < FIRST_COMES_WITHIN + 2.0


def test_a_fresh_node_finds_the_job_by_the_second_endpoint() -> None:
    network = Network()
    made = job(network, at="a,b")
    network.lose_power(made[0])
    network.run_until(lambda: hosts(made) == "cb")
    network.kill(made[2])
    made.append(network.add("d", at="a,b"))
    network.run_until(lambda: hosts(made) == "db")


def test_a_job_that_may_grow_takes_nodes_in_and_goes_on_with_less() -> None:
    network = Network()
    made = job(network, "abc", least=2, most=4)
    assert hosts(made) == "abc"
    made.append(network.add("d", least=2, most=4))
    network.run_until(lambda: hosts(made) == "abcd")
    network.lose_power(made[1])
    network.run(20.0)
    assert hosts(made) == "acd"
    before = [len(x.rounds) for x in made]
    made[0].fail()
    network.run_until(lambda: hosts(made) == "acd" and len(made[0].rounds) > before[0])
    network.run(20.0)
    assert [len(x.rounds) for x in made] == [before[0] + 1, before[1], before[2] + 1, before[3] + 1]


def test_the_smaller_side_of_a_parted_job_waits() -> None:
    network = Network()
    made = job(network, "abc", least=1, most=3)
    network.cut("c")
    network.run(1.0)
    for launcher in made:
        launcher.fail()
    network.run(SMALLER_SIDE_WAITS - 5.0)
    assert hosts(made) == "ab" and not made[2].runs
    network.cut()
    network.run_until(lambda: hosts(made) == "abc")
    assert sum(x.node.leads for x in made) == 1


def test_two_that_led_on_after_others_were_lost_find_each_other() -> None:
    """Neither has lost the other one, and the endpoint is gone."""
    network = Network()
    made = job(network, "eabcd", at="e", least=1, most=5)
    e, a, b, c, d = made
    network.kill(e)
    network.run(20.0)
    assert a.node.leads
    network.cut("c", "d")
    network.run(20.0)
    assert c.node.leads
    network.kill(c)
    network.run(20.0)
    assert a.node.leads and d.node.leads
    network.cut()
    network.run(SMALLER_SIDE_WAITS + 20.0)
    assert sum(x.node.leads for x in (a, b, d)) == 1


def test_ranks_of_a_node_that_missed_a_round_end_so_that_it_takes_part_again() -> None:
    network = Network()
    made = job(network, "abc", least=2, most=3)
    network.cut("c")
    network.run(LOST_AFTER + 1.0)
    made[0].fail()
    network.run_until(lambda: hosts(made) == "ab")
    assert made[2].runs
    network.cut()
    network.run_until(lambda: hosts(made) == "abc")


def test_spares_alone_begin_nothing() -> None:
    network = Network()
    made = job(network, "abcd")
    network.cut("c", "d")
    network.run(200.0)
    assert hosts(made) == "ab" and [len(x.rounds) for x in made] == [1, 1, 0, 0]


def test_a_spare_of_a_job_of_one_node_goes_on_once_it_has_waited_for_that_node() -> None:
    network = Network()
    made = job(network, "abc", least=1, most=1)
    network.cut("a")
    seconds = network.run_until(lambda: made[1].runs or made[2].runs)
    assert SMALLER_SIDE_WAITS < seconds < SMALLER_SIDE_WAITS + LOST_AFTER + REJOIN_WITHIN
    assert hosts(made) == "b"
    network.cut()
    network.run(20.0)
    assert [x.runs for x in made] == [False, True, False]
    assert sum(x.node.leads for x in made) == 1


@pytest.mark.parametrize("fresh", ["ab", "a", "be"])
def test_fresh_nodes_in_place_of_half_at_least_begin_with_the_spares_that_are_left(fresh: str) -> None:
    network = Network()
    made = job(network, "abc", at="a,b")
    for launcher in made[:2]:
        network.kill(launcher)
    network.run(5.0)
    assert made[2].node.leads
    made += [network.add(name, at="a,b") for name in fresh]
    seconds = network.run_until(lambda: len(part(made)) == 2)
    assert SMALLER_SIDE_WAITS - 6.0 < seconds < SMALLER_SIDE_WAITS + 3.0
    assert hosts(made) == {"ab": "ab", "a": "ac", "be": "be"}[fresh]  # memory may be left on a host that is fresh
    network.run(20.0)
    assert sum(x.node.leads for x in made if x.alive) == 1


def test_a_fresh_node_for_one_of_four_is_not_enough_for_spares_to_begin() -> None:
    network = Network()
    made = job(network, "abcdefgh", at="a,e", least=4, most=4)
    network.cut("e", "f", "g", "h", "i")
    network.run(10.0)
    made.append(network.add("i", at="a,e", least=4, most=4))
    network.run(200.0)
    assert made[8].node.news is not None and made[8].node.news.round == made[0].rounds[0].number
    assert hosts(made) == "abcd" and not any(x.rounds for x in made[4:])


@pytest.mark.parametrize("stuck", [0, 1], ids=["that leads", "that follows"])
def test_a_node_whose_ranks_do_not_end_gives_its_place_to_a_spare(stuck: int) -> None:
    network = Network()
    made = job(network)
    late, other = made[stuck], made[1 - stuck]
    late.is_stuck = True
    other.fail()
    seconds = network.run_until(lambda: made[2].runs, limit=2 * ENDS_WITHIN)
    assert ENDS_WITHIN - 1.0 < seconds < ENDS_WITHIN + 1.0
    assert hosts(made) == ("cb" if stuck == 0 else "ac")
    late.is_stuck = False
    network.run(20.0)
    assert not late.runs and late.node.news is not None and late.node.news.spare
    assert [len(other.rounds), len(made[2].rounds)] == [2, 1]


@pytest.mark.parametrize("pauses", [0, 1], ids=["that leads", "that follows"])
def test_a_node_that_pauses_before_its_restart_keeps_its_place(pauses: int) -> None:
    network = Network()
    made = job(network)
    made[pauses].fail(pause=int(2 * ENDS_WITHIN))
    network.run(1.0)
    assert not any(x.runs for x in made), "the others' ranks end at once"
    seconds = network.run_until(lambda: len(part(made)) == 2, limit=4 * ENDS_WITHIN)
    assert 2 * ENDS_WITHIN - 2.0 < seconds < 2 * ENDS_WITHIN
    assert hosts(made) == "ab" and not made[2].rounds


def test_without_a_spare_the_others_wait_for_ranks_that_end_late() -> None:
    network = Network()
    made = job(network, "ab")
    made[1].is_stuck = True
    made[0].fail()
    network.run(ENDS_WITHIN / 2)
    assert [x.node.news is not None and x.node.news.ending for x in made] == [True, False]
    network.run(2 * ENDS_WITHIN)
    assert not part(made[:1])
    made[1].is_stuck = False
    assert network.run_until(lambda: hosts(made) == "ab" and len(made[1].rounds) == 2) < 1.0
    network.run(20.0)
    assert hosts(made) == "ab" and len(made[1].rounds) == 2


def test_the_end_of_the_job_is_heard_by_all() -> None:
    network = Network()
    made = job(network)
    made[1].finish()
    network.run(0.1)
    assert all(x.node.news is not None and x.node.news.closed and not x.node.news.over for x in made)
    made[0].finish()
    network.run(0.1)
    assert [x.node.news is not None and x.node.news.over for x in made] == [True, True, False]


def test_another_jobs_launcher_and_one_with_another_number_of_nodes_are_sent_away() -> None:
    network = Network()
    made = job(network, "ab")
    other = network.add("c", least=3, most=3)
    network.run(1.0)
    assert "--nnodes 2:2, and not 3:3" in other.node.refused
    assert hosts(made) == "ab"


# -- places -----------------------------------------------------------------------------------------------------------


def hello(name: str, *, round: int = 0, place: int = -1, world: int = 0) -> Hello:
    return Hello("job", name * 16, Address(name, PORT), 2, 3, round, place, world, Address(name, 1000), False, False)


def begun(*names: str) -> Roster:
    """The roster of a round that these launchers have begun, at time 0; the first one leads."""
    roster = Roster(2, 3, 1.0, names[0] * 16)
    for name in names:
        roster.join(hello(name), 0.0)
    roster.tick(0.0)
    assert [place_of(roster, name) for name in sorted(names)] == [*range(len(names))]
    return roster


def place_of(roster: Roster, name: str) -> int | None:
    found = roster.round_of(name * 16)
    return None if found is None else found.place


def test_a_node_that_lost_its_connection_before_it_heard_of_a_round_is_told_of_it() -> None:
    roster = begun("a", "b", "c")
    number = roster.round
    roster.leave("b" * 16, 0.1)
    roster.join(hello("b"), 0.2)
    roster.tick(5.0)
    assert roster.round == number and roster.seen == 3 and place_of(roster, "b") == 1
    assert not any(news.spare or news.waiting for news in roster.news(5.0).values())


def test_a_node_that_missed_a_round_has_its_place_before_one_that_waited_meanwhile() -> None:
    roster = begun("a", "b", "c")
    first = roster.round
    roster.leave("c" * 16, 1.0, silent=True)
    for name in "ab":
        roster.want(name * 16, Address(name, 1001), first, 1.0)
    roster.tick(1.0)
    second = roster.round
    rounds = [roster.round_of("a" * 16), begun("a", "b", "c").round_of("b" * 16)]
    assert [made is not None and made.is_first for made in rounds] == [False, True]
    assert second > first and place_of(roster, "c") is None
    roster.join(hello("d"), 2.0)
    roster.join(hello("c", round=first, place=2, world=3), 2.1)
    for name in "ab":
        roster.want(name * 16, Address(name, 1002), second, 2.2)
    roster.tick(2.2)
    assert [place_of(roster, name) for name in "abcd"] == [0, 1, 2, None]


def test_a_spare_has_to_wait_for_a_node_whose_connection_ended_also_when_all_ranks_have() -> None:
    roster = begun("a", "b", "c")
    first = roster.round
    roster.join(hello("d"), 0.5)
    roster.leave("c" * 16, 1.0)
    for name in "ab":
        roster.want(name * 16, Address(name, 1001), first, 1.0)
    roster.tick(1.0 + 0.9 * VACANT_FOR)
    assert roster.round == first
    roster.join(hello("c", round=first, place=2, world=3), 1.0 + 0.9 * VACANT_FOR)
    roster.tick(1.0 + 0.9 * VACANT_FOR)
    assert roster.round > first and [place_of(roster, name) for name in "abcd"] == [0, 1, 2, None]


def test_ranks_that_dump_for_longer_have_as_long_to_end() -> None:
    roster = begun("a", "b", "c")
    roster.ends_within = 2 * ENDS_WITHIN
    first = roster.round
    roster.join(hello("d"), 0.5)
    for name in "ab":
        roster.want(name * 16, Address(name, 1001), first, 1.0)
    roster.tick(1.0)
    roster.tick(1.9 * ENDS_WITHIN)
    assert roster.seen == 3
    roster.tick(2.1 * ENDS_WITHIN)
    assert roster.round > first and [place_of(roster, name) for name in "abcd"] == [0, 1, None, 2]


def test_rounds_that_two_launchers_make_apart_have_different_numbers() -> None:
    assert begun("a", "b", "c").round != begun("b", "c", "a").round


# -- many faults -------------------------------------------------------------------------------------------------------


def check_rounds(launchers: list[Launcher]) -> None:
    """No two launchers have one place of a round; all of a round agree on it; each launcher's rounds go up."""
    seen: dict[tuple[int, int], Launcher] = {}
    rounds: dict[int, set[tuple[int, Address]]] = {}
    for launcher in launchers:
        assert all(one.number < other.number for one, other in itertools.pairwise(launcher.rounds))
        for made in launcher.rounds:
            assert seen.setdefault((made.number, made.place), launcher) is launcher
            rounds.setdefault(made.number, set()).add((made.world, made.store))
    assert all(len(agreed) == 1 for agreed in rounds.values())


def befall(network: Network, launchers: list[Launcher], least: int, most: int, at: str) -> None:
    """Lets one fault happen. As many launchers as the job needs stay alive."""
    chance = network.chance
    alive = [x for x in launchers if x.alive]
    victim = chance.choice(alive)
    kind = chance.choice(("fail", "fail", "kill", "power", "cut", "again", "new", "stuck"))
    if kind == "fail":
        victim.fail()
    elif kind in ("kill", "power") and len(alive) > least:
        (network.kill if kind == "kill" else network.lose_power)(victim)
    elif kind == "cut" and len(alive) > 1:
        network.cut(*chance.sample([x.host for x in alive], chance.randint(1, len(alive) - 1)))
        network.run(chance.uniform(0.1, 12.0))
        network.cut()
    elif kind == "again" and len(alive) > least:
        network.kill(victim)
        network.run(chance.uniform(0.0, 2.0))
        launchers.append(network.add(victim.host, least=least, most=most, at=at))
    elif kind == "stuck":
        victim.is_stuck = True
        chance.choice(alive).fail()
        network.run(chance.uniform(0.0, 2 * ENDS_WITHIN))
        victim.is_stuck = False
    elif kind == "new" and len(alive) < most + 3:
        launchers.append(network.add(f"x{len(launchers)}", least=least, most=most, at=at))


def suffer(seed: int) -> None:
    network = Network(seed)
    chance = network.chance
    network.slowest = chance.choice((0.001, 0.02, 0.3))
    most = chance.randint(2, 5)
    least = chance.choice((most, max(1, most - 2)))
    at = chance.choice(("a", "a,b"))
    launchers = job(network, "abcdefgh"[: most + chance.randint(0, 2)], at=at, least=least, most=most)
    for _ in range(chance.randint(1, 6)):
        befall(network, launchers, least, most, at)
        network.run(chance.uniform(0.0, 6.0))
        check_rounds(launchers)
    newest = max(x.rounds[-1].number for x in launchers if x.rounds)
    if not any(x.alive and x.rounds and x.rounds[-1].number == newest for x in launchers):
        return  # all nodes of the newest round are lost: those that are left remember nothing of it
    network.run(SMALLER_SIDE_WAITS + 30.0)
    for launcher in launchers:  # ranks whose partners are gone fail sooner or later
        if launcher.alive and launcher not in part(launchers):
            launcher.fail()
    if (there := part(launchers)) and len(there) < there[0].rounds[-1].world:
        there[0].fail()
    network.run(SMALLER_SIDE_WAITS + 30.0)
    alive = [x for x in launchers if x.alive and x.node.news is not None]  # others' endpoints may all be gone
    check_rounds(launchers)
    if len(alive) < least:
        return
    assert sum(x.node.leads for x in alive) == 1, "one leads"
    assert len(part(launchers)) == min(most, len(alive)) == part(launchers)[0].rounds[-1].world, "all places are taken"
    assert sum(x.runs for x in alive) == len(part(launchers)), "the others wait"
    before = [len(x.rounds) for x in launchers]
    network.run(30.0)
    assert [len(x.rounds) for x in launchers] == before, "nothing is started again without a reason"


@pytest.mark.parametrize("seed", range(10))
def test_after_any_faults_one_job_goes_on(seed: int) -> None:
    suffer(seed)


@pytest.mark.campaign(seconds=50)
def test_after_any_of_thousands_of_faults_one_job_goes_on() -> None:
    for seed in range(1000, 1600):
        try:
            suffer(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
