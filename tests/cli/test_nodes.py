"""The status of a job on several nodes, as any of them shows it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from rekindle.agent.http import send_request
from rekindle.cli import status
from rekindle.cli.ls import Row, make_rows
from rekindle.cli.main import main
from rekindle.cli.nodes import describe_missed, lag_of, ranks_of_nodes, take_nodes
from rekindle.cli.operations import job_status, stop
from rekindle.cli.other_memory import look_at_others
from rekindle.errors import BusyError, CorruptError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Node, Nodes, ranges
from rekindle.memory.notes import Common, SafeStep
from rekindle.memory.slots import Slots
from rekindle.storage.catalog import MEMORY, PEER, STORAGE, copies_from
from rekindle.storage.listing import ListedCopy
from rekindle.storage.posix import PosixStore
from rekindle.testing import make_shard
from tests.agent.agents import Agents
from tests.conftest import commit
from tests.faults.harness import wait_for
from tests.stored import START, job_in, remember


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


# -- steps that survive the loss of a node -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"node_safe_step": 17, "node_safe_lag": 2}, {"node-safe": "17, 2 steps behind"}),
        ({"node_safe_step": 17, "node_safe_lag": 1}, {"node-safe": "17, 1 step behind"}),
        ({"node_safe_step": 17, "node_safe_lag": 0}, {"node-safe": "17, the newest"}),
        ({}, {"node-safe": "-"}),
        ({"node_safe_before": 15}, {"node-safe": "15, of a former start, unless a node was lost since"}),
        ({"peer_every": None}, {"node-safe": "- (peer_every=None: nodes keep no copies)"}),
        ({"peer_every": None, "nodes": []}, {}),  # on one node
    ],
)
def test_status_has_a_line_on_the_step_that_survives_a_node(more: dict[str, Any], line: dict[str, str]) -> None:
    one: dict[str, Any] = {"node_safe_step": None, "node_safe_lag": None, "node_safe_before": None, "nodes": [{}]}
    assert status._node_safe({"peer_every": "auto", **one, **more}) == line


def test_the_lag_counts_from_the_newest_step_of_any_node() -> None:
    nodes = [node("A", "here", [0]), node("B", "there", [1], newest=21), node("C", "silent", [2], newest=None)]
    assert lag_of(15, [], nodes) == 6 and lag_of(30, [], nodes) == 0 and lag_of(None, [], nodes) is None


def test_status_tells_of_the_newest_start_only(root: Path, memory: Path) -> None:
    job = several(job_in(memory, root, world=2))
    remember(job, 9, world=2)
    for start, found in (("b" * 16, (None, None)), ("a" * 16, (7, 2))):
        job.notes.write_common(Common(start, 8, 7, -1))
        shown = job_status(job)
        assert (shown["node_safe_step"], shown["node_safe_lag"]) == found


def test_status_tells_of_a_former_starts_safe_step_while_the_new_one_has_none(root: Path, memory: Path) -> None:
    job = several(job_in(memory, root, world=2))
    remember(job, 5, world=2)
    info = job.read_job()
    assert info is not None

    def told() -> tuple[int | None, int | None]:
        shown = job_status(job)
        return shown["node_safe_step"], shown["node_safe_before"]

    job.notes.write_common(Common(START.id, 6, 5, -1))
    for start, expected in ((START.id, (5, None)), ("b" * 16, (None, 5))):
        job.write_job(replace(info, start=start))
        assert told() == expected
    job.notes.write_common(Common("b" * 16, 7, -1, -1))
    assert told() == (None, 5), "it has named a step"
    job.snapshots.remove()
    assert told() == (None, None)


def several(job: JobDir) -> JobDir:
    """Makes it a job on two nodes, of which nobody listens on the other one."""
    info = job.read_job()
    assert info is not None
    job.write_job(replace(info, start="a" * 16))
    nodes = [Node("A", "127.0.0.1", 1, [0]), Node("B", "127.0.0.1", 1, [1])]
    Nodes("a" * 16, 1, b"s" * 32, 0, nodes).write(job)
    return job


def ls(root: Path) -> tuple[int, list[dict[str, Any]], str]:
    """The exit code of ``rekindle ls``, what it shows to programs, and what it says beside that."""
    told = CliRunner().invoke(main, ["ls", str(root), "--json"])
    return told.exit_code, json.loads(told.stdout), told.stderr


def test_ls_names_a_node_that_does_not_answer_and_fails_while_the_job_is_trained(root: Path, memory: Path) -> None:
    job = several(job_in(memory, root, world=2))
    remember(job, 5, world=2)
    code, (entry,), said = ls(root)
    assert code == 0 and said == "node B (rank 1): its memory is not listed: no agent listens there\n"
    assert (entry["nodes"], entry["missing"], entry["node_safe"], entry["durable"]) == (["A"], [], False, False)
    lock = job.lock_rank(0, 5.0)
    code, entries, said = ls(root)
    lock.release()
    assert code == 1 and entries == [entry] and "not all nodes have told what their memory holds" in said


def test_ls_of_a_job_on_one_node_asks_nobody(root: Path, memory: Path) -> None:
    remember(job_in(memory, root), 5)
    assert [(entry["nodes"], entry["missing"]) for entry in ls(root)[1]] == [([], [])]
    assert "missing on" not in CliRunner().invoke(main, ["ls", str(root)]).stdout


def test_ls_asks_no_nodes_of_an_earlier_start(root: Path, memory: Path) -> None:
    job = several(job_in(memory, root, world=2))
    remember(job, 5, world=2)
    info = job.read_job()
    assert info is not None
    job.write_job(replace(info, start="b" * 16))
    code, (entry,), said = ls(root)
    assert (code, entry["nodes"], said) == (0, [], "")


def test_ls_marks_no_step_of_a_former_start_as_node_safe(root: Path, memory: Path) -> None:
    """One of the nodes on which it was safe may have been lost since."""
    job = several(job_in(memory, root, world=2))
    remember(job, 5, world=2)
    info = job.read_job()
    assert info is not None
    job.notes.write_common(Common(START.id, 6, 5, -1))
    for start, safe in ((START.id, True), ("b" * 16, False)):
        job.write_job(replace(info, start=start))
        assert [entry["node_safe"] for entry in ls(root)[1]] == [safe]


def rows_of(job: JobDir, safe: SafeStep | None = None, durable: tuple[int, ...] = ()) -> list[Row]:
    """The rows of ``rekindle ls`` for a job whose own memory and storage hold whole checkpoints."""
    listed = []
    for copy in copies_from(job, None, own=True):
        listed.append(ListedCopy(copy, 8, "complete"))
        if copy.step in durable:
            listed.append(ListedCopy(replace(copy, place=STORAGE), 8, "complete"))
    return make_rows(listed, look_at_others(job), safe)


def test_ls_shows_what_the_memory_of_all_nodes_holds(agents: Agents) -> None:
    agents.begin(2)
    start = Incarnation(agents.generation, agents.nodes[0].start)
    for number, step in ((0, 7), (1, 7), (0, 8)):
        stamp = ShardId(step, number, 2, start, persist=False)
        with closing(Slots(agents.hosts[number].job, number, 2, [number])) as slots:
            commit(slots, *make_shard(stamp, {f"x{number}": b"%d" % step}))
    rows = rows_of(agents.hosts[0].job, SafeStep(start.id, 7), durable=(7,))
    own = [row for row in rows if not (row.entry.copy.place == PEER and row.entry.copy.step == 8)]  # copies of rank 0's
    assert [(row.entry.copy.step, row.entry.copy.place, row.condition, row.durable) for row in own] == [
        *[(8, MEMORY, "complete", False), (7, MEMORY, "complete, node-safe", True)],
        *[(7, PEER, "complete, node-safe", True), (7, STORAGE, "complete, node-safe", True)],
    ]
    assert [row.missing for row in own] == [["n1"], [], [], []]
    assert [row.nodes for row in own] == [["n0"], ["n0"], ["n1"], []] and own[2].entry.copy.ranks >= {1}
    shown = own[2].to_json()
    assert (shown["place"], shown["bytes"], shown["path"], shown["node_safe"]) == (PEER, None, None, True)
    (there,) = (
        row for row in rows_of(agents.hosts[1].job) if row.entry.copy.step == 7 and row.entry.copy.place == PEER
    )
    assert there.nodes == ["n0"] and there.missing == [] and there.condition == "complete"


def test_copies_of_another_nodes_snapshots_are_shown_and_verified(root: Path, memory: Path) -> None:
    job = job_in(memory, root)
    remember(job, 7, 0, 2)
    job.copies.create()
    receipt = remember(job.copies, 7, 1, 2)

    def told(command: str) -> tuple[int, Any]:
        result = CliRunner().invoke(main, [command, str(root), "7", "--json"])
        return result.exit_code, json.loads(result.stdout)

    code, shown = told("inspect")
    assert code == 0 and [(shard["rank"], shard["copy"]) for shard in shown["shards"]] == [(0, False), (1, True)]
    assert "1 (copy)" in CliRunner().invoke(main, ["inspect", str(root)]).stdout
    code, found = told("verify")
    assert code == 0 and [(each["ranks"], each["condition"]) for each in found] == [([0], "incomplete"), ([1], "copy")]
    shard = receipt.with_suffix(".safetensors")
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    code, found = told("verify")
    assert code == CorruptError.exit_code and [each["verdict"] for each in found] == ["sound", "damaged"]
    job.snapshots.remove()
    assert [each["condition"] for each in told("verify")[1]] == ["copy"]
