"""The status of a job on several nodes, as any of them shows it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rekindle.agent.http import send_request
from rekindle.cli import status
from rekindle.cli.nodes import describe_missed, ranks_of_nodes, take_nodes
from rekindle.cli.operations import job_status, stop
from rekindle.errors import BusyError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Node, Nodes, ranges
from rekindle.memory.slots import Slots
from rekindle.storage.posix import PosixStore
from rekindle.testing import make_shard
from tests.agent.agents import Agents
from tests.conftest import commit
from tests.faults.harness import wait_for


def node(name: str, state: str, ranks: list[int], seconds: float | None = 0.04, **more: Any) -> dict[str, Any]:
    """What an agent says of a node."""
    page = {"phase": "stable", "does": "before its next update", "step": 17, "in_memory": 16, "age": 0.1}
    page |= {"longest_step": 0.3, "note": ""}
    pages = {str(rank): page for rank in ranks} if state in ("here", "there") else {}
    steps = {rank: 17 for rank in pages}
    known: dict[str, Any] = {"newest": 16, "durable": 10, **more}
    return {"name": name, "ranks": ranks, "state": state, "seconds": seconds, "steps": steps, "pages": pages, **known}


LOST = {"cause": "lost", "rank": 2, "what": "node B (ranks 2, 3) is lost"}


@pytest.mark.parametrize(
    "state, fault, trains, said",
    [
        ("there", None, True, None),
        ("unknown", None, True, None),
        ("silent", None, True, "node B (ranks 2-3) is silent: last heard 3.2 s ago"),
        ("agent gone", None, True, "node B (ranks 2-3) has no agent: last heard 3.2 s ago"),
        ("lost", LOST, True, "node B (ranks 2-3) is lost: last heard 3.2 s ago"),
        ("lost", LOST, False, "node B (ranks 2-3) is lost: last heard 3.2 s ago"),
        ("lost", None, False, None),  # the job has ended here and there, and its agents leave when they are done
        ("lost", {**LOST, "rank": 0}, False, None),
        ("agent gone", None, False, None),
        ("silent", None, False, None),
    ],
)
def test_a_node_that_should_be_there_and_is_not_is_a_problem(
    state: str, fault: dict[str, Any] | None, trains: bool, said: str | None
) -> None:
    nodes = [node("A", "here", [0, 1], None), node("B", state, [2, 3], 3.2)]
    assert describe_missed(nodes, fault, trains=trains) == said


def test_a_node_that_was_never_heard_is_told_of_too() -> None:
    nodes = [node("B", "silent", [1], None), node("C", "lost", [2])]
    said = "node B (rank 1) is silent, and was never heard; node C (rank 2) is lost: last heard 0.0 s ago"
    assert describe_missed(nodes, None, trains=True) == said


def test_ranks_of_all_nodes_are_listed_with_their_nodes() -> None:
    answer = {"step": 5, "nodes": [node("B", "there", [0, 3]), node("A", "here", [1, 2])]}
    nodes = take_nodes(answer)
    own = {1: {"step": 18}, 2: {"step": 18}}
    found = ranks_of_nodes(nodes, own)
    assert [(rank, page["node"], page["step"]) for rank, page in found.items()] == [
        *[(0, "B", 17), (1, "A", 18), (2, "A", 18), (3, "B", 17)]
    ]
    assert "nodes" not in answer and all("pages" not in each for each in nodes)
    assert nodes[0]["steps"] == {0: 17, 3: 17}
    assert take_nodes(None) == take_nodes({"step": 5}) == []


def test_numbers_are_given_as_ranges() -> None:
    assert ranges([]) == "" and ranges([4]) == "4" and ranges([9, 0, 1, 2, 5, 6]) == "0-2, 5-6, 9"


@pytest.mark.parametrize("columns", [100, 60])
def test_the_tables_fit_the_terminal(columns: int) -> None:
    names = ["a-host-with-a-long-name.example.org", "gpu-17"]
    nodes = take_nodes(
        {"nodes": [node(names[0], "here", [*range(8)], None), node(names[1], "agent gone", [8, 9], 3.2)]}
    )
    console = Console(width=columns)
    with console.capture() as shown:
        console.print(status._nodes_table(nodes))
        console.print(status._ranks_table(ranks_of_nodes(nodes, {1: nodes[0]["pages"][1]})))
    text = shown.get()
    assert max(map(len, text.splitlines())) <= columns, text
    assert {"0-7", "8-9", "17", "16", "10"} <= set(text.split()), text
    if columns == 100:
        assert "agent gone" in text and "3.2 s ago" in text, text


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    made = Agents(tmp_path_factory.mktemp("nodes"), 2)
    yield made
    made.close()


def problem(agents: Agents) -> str:
    return str(job_status(agents.hosts[0].job)["problem"])


def test_each_node_shows_the_whole_job(agents: Agents) -> None:
    for rank in agents.begin(2):
        rank.page.step, rank.page.snapshot, rank.page.progress = 17, 16, time.monotonic_ns()
        rank.page.note = b"epoch %d" % rank.number
        rank.page.write()
    for host in agents.hosts:
        found = wait_for(
            lambda host=host: (
                (seen := job_status(host.job))["ranks"].get(1 - host.number, {}).get("step") == 17 and seen
            ),
            what="the page of the other node's rank",
        )
        pages = {rank: (page["node"], page["step"], page["note"]) for rank, page in found["ranks"].items()}
        assert pages == {0: ("n0", 17, "epoch 0"), 1: ("n1", 17, "epoch 1")}
        assert [each["state"] for each in found["nodes"]] == [("here", "there")[n != host.number] for n in (0, 1)]
        assert found["trainers"] == {host.number: os.getpid()} and found["problem"] is None


def test_a_node_that_falls_silent_is_named_and_one_without_an_agent_too(agents: Agents) -> None:
    agents.begin(2)
    assert problem(agents) == "None"
    agents.hosts[1].signal_agent(signal.SIGSTOP)
    wait_for(lambda: "node n1 (rank 1) is silent: last heard " in problem(agents), what="a word on the silent node")
    agents.hosts[1].signal_agent(signal.SIGCONT)
    wait_for(lambda: problem(agents) == "None", what="its return")
    agents.hosts[1].signal_agent(signal.SIGKILL)
    wait_for(lambda: "node n1 (rank 1) has no agent: last heard " in problem(agents), what="a word on the agent")
    assert agents.hosts[0].fault() is None


def test_stop_ends_a_job_on_all_of_its_nodes_and_on_none_while_one_trains(tmp_path: Path) -> None:
    agents = Agents(tmp_path, 3)
    try:
        agents.begin(3)
        agents.end()
        start = Incarnation(agents.generation, agents.nodes[0].start)
        for host in agents.hosts:
            stamp = ShardId(7, host.number, 3, start)
            with closing(Slots(host.job, host.number, 3, [host.number])) as slots:
                commit(slots, *make_shard(stamp, {f"x{host.number}": b"%d" % host.number}))
        one, other, third = agents.hosts
        one.trainer.release()
        third.trainer.release()
        with pytest.raises(BusyError, match=rf"other nodes: node n1 \(rank 1\) by processes {os.getpid()}: end them"):
            stop(one.job, 30.0, lambda progress: None)
        assert not send_request(third.job.paths.agent_socket, "GET", "/status")["stopping"]
        other.trainer.release()
        told = stop(one.job, 60.0, lambda progress: None)
        assert told == {"node n1 (rank 1)": "its agent has ended", "node n2 (rank 2)": "its agent has ended"}
        # An agent hears others no more a moment before the last of its files is removed.
        wait_for(lambda: not any(host.job.path.exists() for host in agents.hosts))
        assert [entry.stamp.step for entry in PosixStore(agents.root).published()] == [7]
    finally:
        agents.close()


def lone_node(place: Path) -> JobDir:
    """The memory of a node whose job another node without an agent has, too."""
    job = JobDir(place / "job")
    job.create()
    nodes = [Node("A", "127.0.0.1", 1, [0, 1]), Node("B", "127.0.0.1", 1, [2, 3])]
    Nodes("a" * 16, 1, b"s" * 32, 0, nodes).write(job)
    return job


def test_stop_does_not_wait_for_a_node_without_an_agent(tmp_path: Path) -> None:
    job = lone_node(tmp_path)
    assert stop(job, 5.0, lambda progress: None) == {"node B (ranks 2-3)": "no agent listens there"}
    assert not job.path.exists()


def test_stop_does_not_discard_what_other_nodes_hold(tmp_path: Path) -> None:
    job = lone_node(tmp_path)
    told = stop(job, 5.0, lambda progress: None, discard=True)
    assert told == {"node B (ranks 2-3)": "keeps its memory: run 'rekindle stop --discard' there, too"}
    assert not job.path.exists()
