"""The launchers' rendezvous among others that are no part of it, and beside launchers that begin the same job anew."""

from __future__ import annotations

import pytest

from rekindle.launch.rendezvous.links import Identity
from rekindle.launch.rendezvous.node import Node
from rekindle.launch.rendezvous.wire import Address, Hello, Want
from tests.launch.simulated_launchers import PORT, Launcher, Network

SECRET = "an-id-that-nobody-guesses"
AT = Address("a", PORT)


def job(network: Network, names: str, *, at: str, least: int = 2, most: int = 2) -> list[Launcher]:
    """Launchers that have met, one after the other; those after the most wait as spares."""
    made = []
    for name in names:
        made.append(network.add(name, at=at, least=least, most=most, job=SECRET))
        network.run(0.5)
    network.run_until(lambda: sum(x.runs for x in made) == min(most, len(names)))
    return made


def without_first(network: Network) -> list[Launcher]:
    """A job that has lost the node of the first of its two endpoints, and goes on."""
    made = job(network, "abc", at="a,b")
    network.kill(made[0])
    network.run_until(lambda: [x.runs for x in made[1:]] == [True, True] and len(made[1].rounds) == 2)
    return made[1:]


def test_a_job_goes_on_though_another_one_has_come_to_its_endpoint() -> None:
    network = Network()
    second, third = without_first(network)
    stranger = network.add("a", job="another")
    network.run(3.0)
    network.kill(second)
    network.run_until(lambda: third.node.leads)
    assert not third.node.refused and stranger.node.leads
    fresh = network.add("b", at="a,b", job=SECRET)
    network.run_until(lambda: third.runs and fresh.runs)


@pytest.mark.parametrize("seed", range(4))
def test_a_fresh_launcher_passes_over_an_endpoint_that_another_job_has(seed: int) -> None:
    network = Network(seed)
    second, third = without_first(network)
    network.add("a", job="another")
    network.kill(third)
    fresh = network.add("d", at="a,b", job=SECRET)
    network.run_until(lambda: fresh.runs and second.runs)
    assert not fresh.node.refused


def test_one_that_finds_only_other_jobs_is_told_so_but_not_their_name() -> None:
    network = Network()
    job(network, "ab", at="a")
    other = network.add("c", job="another")
    network.run(1.0)
    assert "have another --rdzv-id" in other.node.refused and SECRET not in other.node.refused


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("least", "most"), [(1, 3), (2, 2)])
def test_launchers_that_begin_at_the_endpoint_begin_no_second_job(least: int, most: int, seed: int) -> None:
    network = Network(seed)
    network.slowest = 0.1
    made = job(network, "abc", at="a", least=least, most=most)
    network.kill(made[0])
    for launcher in made[1:]:
        launcher.fail()
    network.run(network.chance.uniform(10.0, 12.0))
    fresh = [network.add("a", least=least, most=most, job=SECRET)]
    network.run(network.chance.uniform(0.0, 0.3))
    fresh.append(network.add("d", least=least, most=most, job=SECRET))
    network.run(20.0)
    assert made[1].runs and made[1].rounds[-1].world == most
    assert {each.number for x in fresh for each in x.rounds} <= {each.number for each in made[1].rounds}


def test_the_end_of_a_job_is_heard_by_all_though_the_one_that_led_is_lost_just_then() -> None:
    network = Network()
    _, second, third, spare = made = job(network, "abcd", at="a", most=3, least=3)
    network.kill(made[0])
    third.finish()
    network.run(2.0)
    assert all(x.node.news is not None and x.node.news.closed for x in (second, third, spare))


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("line\nbreak", AT),
        ("j" * 1025, AT),
        ("", AT),
        ("job", Address("kn\u00f6ten-1", PORT)),
        ("job", Address("a b", 1)),
    ],
)
def test_a_launcher_that_no_other_one_would_understand_does_not_begin(name: str, address: Address) -> None:
    with pytest.raises(ValueError, match=r"a text is empty|it is no address"):
        Node(Identity(name, "0" * 16, address, 2, 2, 1.0, (AT,), ()), 0.0)


def test_a_restart_of_many_nodes_tells_each_of_them_a_few_things() -> None:
    count = 64
    node = Node(Identity("job", "f" * 16, AT, count, count, 1.0, (AT,), (AT,)), 0.0)
    node.tick(0.0)
    node.want(AT, 0.0)
    links = [node.accept(2.0) for _ in range(count - 1)]
    for number, link in enumerate(links):
        host = Address(f"n{number}", PORT)
        node.received(link, Hello("job", f"{number:016x}", host, count, count, 0, -1, 0, host, False, False), 2.0)
        node.settle(2.0)
    before = node.round
    assert before is not None and before.world == count
    node.output.clear()
    node.want(AT, 3.0)
    for link in links:
        node.received(link, Want(AT, before.number), 3.0)
        node.settle(3.0)
    assert node.round is not None and node.round.number > before.number
    assert len(node.output) < 8 * count


def test_one_that_leads_on_waits_for_the_others_before_it_ends() -> None:
    network = Network()
    made = job(network, "abc", at="a")
    network.kill(made[0])
    network.run_until(lambda: made[1].node.leads)
    made[1].finish()
    assert made[1].node.has_members(network.now), "the spare one has not heard of the end"
    network.run(3.0)
    assert made[2].node.news is not None and made[2].node.news.closed
