"""Agents of several nodes know of each other's ranks, and act as one at a fault."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from rekindle.format.lineage import Incarnation
from rekindle.memory.fault import Fault
from rekindle.memory.job import JobInfo
from rekindle.memory.slots import Slots
from rekindle.peers.wire import Credentials, WireError, connect
from rekindle.session.nodes import read_address
from tests.agent.agents import Agents, Rank
from tests.faults.harness import wait_for
from tests.memory import saved


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    made = Agents(tmp_path_factory.mktemp("nodes"), 3)
    yield made
    made.close()


def culprits(agents: Agents, count: int) -> list[tuple[str, int]]:
    """The cause and the rank in each node's record of the fault."""
    faults = [host.fault() for host in agents.hosts[:count]]
    return [("", -1) if fault is None else (cause_of(fault), fault.rank) for fault in faults]


def cause_of(fault: Fault) -> str:
    """The cause, where a killed rank is no victim of another program that takes all memory of this machine."""
    return fault.cause.replace("oom", "signal")


def step(ranks: list[Rank], number: int) -> None:
    for rank in ranks:
        rank.page.step, rank.page.longest, rank.page.progress = number, 0.02, time.monotonic_ns()
        rank.page.write()


def test_a_death_is_known_on_all_nodes_at_once_and_by_one_name(agents: Agents) -> None:
    ranks = agents.begin(3)
    killed = ranks[1].kill()
    for rank in (ranks[0], ranks[2]):
        told, fault = rank.fault()
        assert fault.what.startswith("rank 1 was killed by ") and cause_of(fault) == "signal"
        assert told - killed < 1.0, "50 ms on a machine that is not busy"
        assert killed - 0.1 < fault.noticed <= told, "its time is by this node's clock"
    wait_for(lambda: culprits(agents, 3) == [("signal", 1)] * 3)


def test_a_fault_from_before_the_agents_knew_each_other_is_told_once_they_do(agents: Agents) -> None:
    agents.end()

    def before() -> None:
        wait_for(lambda: not any(host.nodes() for host in agents.hosts[:2]), what="the end of the mesh before")
        agents.ranks = [Rank(host.job, host.number, agents.generation, None) for host in agents.hosts[:2]]
        wait_for(lambda: all(rank.joined() for rank in agents.ranks))
        agents.ranks[0].raises("ValueError: odd")
        agents.ranks[0].fault()

    agents.meet(2, before)
    _, fault = agents.ranks[1].fault()
    assert (fault.cause, fault.rank) == ("exception", 0)
    wait_for(lambda: culprits(agents, 2) == [("exception", 0)] * 2)


def test_all_nodes_tell_what_they_know_of_all(agents: Agents) -> None:
    ranks = agents.begin(2)
    step(ranks, 17)
    wait_for(lambda: [node["steps"] for node in agents.hosts[0].nodes()] == [{"0": 17}, {"1": 17}])
    here, there = agents.hosts[1].nodes()[1], agents.hosts[1].nodes()[0]
    assert (here["name"], here["state"], here["ranks"]) == ("n1", "here", [1])
    assert (there["name"], there["state"], there["ranks"]) == ("n0", "there", [0]) and there["seconds"] < 1


def test_a_notice_names_the_node_that_is_silent(agents: Agents) -> None:
    """A launcher that misses it ends the ranks of all others."""
    ranks = agents.begin(2)
    agents.hosts[1].signal_agent(signal.SIGSTOP)
    try:
        wait_for(lambda: agents.hosts[0].state(1) == "silent")
        ranks[0].say({"fault": Fault("notice", 0, agents.generation, 3, "rank 0 was sent SIGTERM").to_json()})
        _, fault = ranks[0].fault()
        told = {"afar": {"reached": -1, "told": True, "misses": True}}
        wait_for(lambda: told in [message for _, message in ranks[0].heard], what="word that nobody is waited for")
    finally:
        agents.hosts[1].signal_agent(signal.SIGCONT)
    assert fault.what == "rank 0 was sent SIGTERM while node n1 (rank 1) was silent"


def test_an_exception_that_follows_from_a_death_elsewhere_is_not_its_cause(agents: Agents) -> None:
    for _ in range(5):  # the answer of a node that gets no processor for long comes too late
        ranks = agents.begin(2)
        agents.hosts[1].signal_agent(signal.SIGSTOP)  # it notices the death later than the other node the exception
        ranks[1].kill()
        ranks[0].raises("RuntimeError: Connection closed by peer")
        agents.hosts[1].signal_agent(signal.SIGCONT)
        with suppress(AssertionError):
            wait_for(lambda: culprits(agents, 2) == [("signal", 1)] * 2, 5.0)
            return
    raise AssertionError(culprits(agents, 2))


def test_ranks_too_are_told_of_the_death_that_their_exception_follows_from(agents: Agents) -> None:
    told = []
    for _ in range(5):  # the answer of a node that gets no processor for long comes too late for them
        ranks = agents.begin(2)
        ranks[1].kill()
        ranks[0].raises("RuntimeError: Connection closed by peer")
        told.append(cause_of(ranks[0].fault()[1]))
        if told[-1] == "signal":
            return
    raise AssertionError(told)


def test_of_two_exceptions_that_of_a_collective_is_not_the_cause(agents: Agents) -> None:
    for _ in range(5):  # an exception that is read late, on a busy machine, follows from the one that was told before
        ranks = agents.begin(2)
        ranks[0].raises("RuntimeError: [gloo] Connection closed by peer")
        ranks[1].raises("ValueError: odd")
        with suppress(AssertionError):
            wait_for(lambda: culprits(agents, 2) == [("exception", 1)] * 2, 5.0)
            return
    raise AssertionError(culprits(agents, 2))


def test_a_hang_is_judged_once_and_each_node_reports_its_ranks(agents: Agents) -> None:
    ranks = agents.begin(2, floor=0.0)
    step(ranks, 7)
    step(ranks[:1], 8)
    for rank in ranks:
        _, fault = rank.fault()
        assert (fault.cause, fault.rank, fault.step) == ("hang", 1, 7)
        assert "rank 0: after step 8" in fault.detail and "rank 1: after step 7" in fault.detail
        assert len(rank.faults()) == 1
    for rank in ranks:
        rank.process.wait(60)  # the agent ends it
    assert len({rank.fault()[1].at for rank in ranks}) == 1, "one agent has judged"
    reports = [agents.root / f"hang-{agents.generation}-step-7" / f"report-n{number}.txt" for number in (0, 1)]
    for report, own, other in zip(reports, "01", "10", strict=True):
        wait_for(report.exists)
        assert f"== rank {own} ==" in report.read_text() and f"== rank {other} ==" not in report.read_text()


def test_an_agent_that_is_killed_is_no_loss_and_the_next_one_takes_its_place(agents: Agents) -> None:
    ranks = agents.begin(2)
    port = agents.hosts[1].port()
    agents.hosts[1].signal_agent(signal.SIGKILL)
    wait_for(lambda: agents.hosts[0].state(1) == "agent gone")
    agents.hosts[1].run_agent()
    assert agents.hosts[1].port() == port
    wait_for(lambda: agents.hosts[0].state(1) == "there" and agents.hosts[1].state(0) == "there")
    assert culprits(agents, 2) == [("", -1)] * 2
    ranks[0].raises("ValueError: odd")
    assert ranks[1].fault()[1].what == "rank 0 raised ValueError: odd"


def test_an_agent_that_stands_still_for_a_while_is_no_loss(agents: Agents) -> None:
    ranks = agents.begin(2, floor=0.0)
    step(ranks, 3)
    wait_for(lambda: [node["steps"] for node in agents.hosts[0].nodes()] == [{"0": 3}, {"1": 3}])
    agents.hosts[1].signal_agent(signal.SIGSTOP)
    wait_for(lambda: agents.hosts[0].state(1) == "silent")
    wait_for(lambda: agents.hosts[0].nodes()[1]["seconds"] > 2.5, what="longer than a rank may be silent")
    agents.hosts[1].signal_agent(signal.SIGCONT)
    wait_for(lambda: agents.hosts[0].state(1) == "there")
    step(ranks, 4)
    assert "node n1 (rank 1) is silent" in agents.hosts[0].log() and "node n1 (rank 1) is back" in agents.hosts[0].log()
    assert culprits(agents, 2) == [("", -1)] * 2 and not ranks[0].faults(), "nor do ranks hang that waited for it"


def test_a_node_that_is_lost_is_the_cause_of_what_follows(agents: Agents) -> None:
    ranks = agents.begin(2)
    step(ranks, 5)
    agents.hosts[1].signal_agent(signal.SIGKILL)
    ranks[1].kill()
    ranks[0].raises("RuntimeError: Connection closed by peer")
    assert ranks[0].fault()[1].cause in ("exception", "lost"), "nobody has to wait for the judgement"
    wait_for(lambda: culprits(agents, 1) == [("lost", 1)], what="the right culprit")


def test_agents_of_another_start_are_refused(agents: Agents) -> None:
    agents.begin(2)
    before, port = agents.nodes[1], agents.hosts[0].port()
    agents.begin(2)
    assert agents.hosts[0].port() == port, "agents go on listening"
    for secret, start in ((before.secret, before.start), (before.secret, agents.nodes[1].start)):
        with pytest.raises((WireError, ConnectionError)):
            connect(agents.hosts[0].address, port, Credentials(secret, start, "n1"), 30.0)


def test_an_agent_that_cannot_listen_says_so_and_tries_again_at_the_next_start(agents: Agents) -> None:
    agents.end()
    host = agents.hosts[0]

    def begin(address: str) -> str:
        start = Incarnation.begin(9).id
        host.job.write_job(JobInfo(str(agents.root), [0], 1, 2, None, 600.0, start=start, host=address))
        return start

    assert host.trainer.held() or host.trainer.acquire(10.0)
    if host.agent is None or host.agent.poll() is not None:
        host.run_agent()
    nowhere = "192.0.2.1"  # an address of no host
    start = begin(nowhere)
    wait_for(lambda: read_address(host.job, nowhere, start) == (nowhere, 0))
    assert read_address(host.job, nowhere, Incarnation.begin(9).id) is None
    start = begin(host.address)
    assert wait_for(lambda: read_address(host.job, host.address, start))[1] > 0


def test_a_node_whose_memory_was_removed_is_in_the_mesh_again(agents: Agents) -> None:
    """The agent that has lost its directory ends, however late, and the next one listens where the others look."""
    agents.begin(2)
    host = agents.hosts[1]
    former = host.agent
    assert former is not None
    host.signal_agent(signal.SIGSTOP)
    try:
        shutil.rmtree(host.job.path)
        assert host.job.retake(host.trainer) and host.job.read_job() is None
        host.job.write_job_again()
        host.run_agent()
        wait_for(lambda: "without a mesh" in host.log(), what="a try")
    finally:
        former.kill()
        former.wait()
    wait_for(lambda: agents.hosts[0].state(1) == host.state(0) == "there", what="the mesh")


def test_nodes_keep_each_others_part_of_a_step_and_an_agent_that_is_killed_changes_nothing(agents: Agents) -> None:
    ranks = agents.begin(2)
    hosts, start = agents.hosts[:2], Incarnation(agents.generation, agents.nodes[0].start)
    with ExitStack() as stack:
        slots = [Slots(host.job, host.number, 2, [host.number]) for host in hosts]
        for one in slots:
            stack.callback(one.close)

        def save(number: int) -> None:
            for rank, one in zip(ranks, slots, strict=True):
                saved.save(one, number, start, persist=False)
                rank.page.snapshot = number
            step(ranks, number)

        def are_safe(number: int) -> bool:
            return [node["safe"] for node in hosts[0].nodes()] == [number, number]

        save(1)
        wait_for(lambda: are_safe(1), what="a safe step")
        agents.hosts[1].signal_agent(signal.SIGKILL)
        agents.hosts[1].run_agent()
        save(2)
        wait_for(lambda: are_safe(2), what="the next one")
        for host in hosts:
            saved.assert_sound(host.job.copies, 2, 1 - host.number, 2)
            common = host.job.notes.common()
            assert common is not None and (common.start, common.safe) == (start.id, 2)


@pytest.mark.campaign(seconds=11)
def test_a_node_that_nobody_hears_is_lost_once_patience_is_over(agents: Agents) -> None:
    ranks = agents.begin(3)
    agents.hosts[2].signal_agent(signal.SIGSTOP)
    stopped = time.monotonic()
    for rank in ranks[:2]:
        told, fault = rank.fault()
        assert (fault.cause, fault.rank) == ("lost", 2) and told - stopped > 9
        assert fault.what.startswith("node n2 (rank 2) is lost: no sign of it for 1")
    agents.hosts[2].signal_agent(signal.SIGCONT)


@pytest.mark.campaign(seconds=30)
def test_agents_keep_no_threads_and_no_files_of_the_starts_before(agents: Agents) -> None:
    agents.end()
    one, other = agents.hosts[:2]
    held: list[int] = []
    for _ in range(100):
        agents.meet(2)
        wait_for(lambda: "there" in (one.state(1), other.state(0)), what="a link")  # the second one takes a second
        held.append(max(one.held(), other.held()))
    wait_for(lambda: max(one.held(), other.held()) < max(held[:10]) + 10, what=f"no more than at first: {held}")
