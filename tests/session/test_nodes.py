"""Nodes that meet: their names, their order, and the addresses of their agents."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import pytest

from rekindle.format.lineage import Incarnation
from rekindle.memory.job import JobInfo
from rekindle.memory.nodes import Nodes
from rekindle.session import nodes as meeting_of_nodes
from rekindle.session.agent_keeper import AgentKeeper
from rekindle.session.nodes import Introduction, arrange, find_host
from rekindle.session.session import Meeting, Session


def _session(tmp_path: Path, rank: int, ranks: list[int]) -> Session:
    session = Session(tmp_path / "root", tmp_path)
    session.rank = rank
    session.join(Meeting(Incarnation(2, "b" * 16), 8, ranks, 4, None, found=False, deleted=False))
    return session


def _arranged(tmp_path: Path, own: int, *introduced: Introduction) -> Nodes:
    ranks = introduced[own].ranks
    return arrange(introduced, _session(tmp_path, ranks[-1], ranks))


def test_nodes_of_one_host_have_names_of_their_own(tmp_path: Path) -> None:
    same = [Introduction("host", ("10.0.0.1", 7 + n), [n], "", bytes([n]) * 32) for n in range(3)]
    nodes = _arranged(tmp_path, 1, *same, Introduction("host-2", None, [3], "", b""))
    assert {node.name: node.ranks for node in nodes.nodes} == {
        "host": [0],
        "host-2": [1],
        "host-3": [2],
        "host-2-2": [3],
    }
    assert nodes.here.ranks == [1] and (nodes.start, nodes.generation, nodes.secret) == ("b" * 16, 2, bytes(32))
    assert [(node.host, node.port) for node in nodes.nodes if node.ranks == [3]] == [("", 0)]


def test_nodes_of_one_rack_are_side_by_side_so_that_none_is_the_partner_of_another(tmp_path: Path) -> None:
    racks = ["west", "east", "west", "east"]
    introduced = [Introduction(f"n{n}", ("h", 1), [2 * n, 2 * n + 1], racks[n], bytes(32)) for n in range(4)]
    for own in range(4):
        nodes = _arranged(tmp_path, own, *introduced)
        assert [node.name for node in nodes.nodes] == ["n1", "n3", "n0", "n2"]
        assert nodes.here.name == f"n{own}" and nodes.nodes[nodes.partner].domain != nodes.here.domain


def test_the_address_is_the_one_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_ADDRESS", "127.0.0.7")
    assert find_host() == "127.0.0.7"


def test_the_address_is_that_of_the_way_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REKINDLE_ADDRESS", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert find_host() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert find_host() in ("127.0.0.1", "::1")


def test_an_address_that_nobody_knows_is_one_warning_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REKINDLE_ADDRESS", "no.such.host.invalid")
    assert find_host() == ""
    assert [record.getMessage() for record in caplog.records if "REKINDLE_ADDRESS" in record.getMessage()]


def test_a_master_of_this_hosts_own_name_does_not_make_loopback_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many hosts have their own name at 127.0.1.1: another node would look for them at itself."""
    monkeypatch.delenv("REKINDLE_ADDRESS", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.1")  # a name of loopback by which no user would mean it
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            elsewhere = probe.getsockname()[0]
    except OSError:
        elsewhere = "127.0.0.1"  # no way leads anywhere else
    assert find_host() == elsewhere


def test_only_an_agent_that_may_still_come_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_of_nodes, "_STARTS_WITHIN", 0.1)
    session = _session(tmp_path, 0, [0])
    session.job_dir.create()
    keeper = AgentKeeper(session.job_dir, JobInfo(str(tmp_path), [0], 8, 2, None, 600.0))
    began = time.monotonic()
    assert meeting_of_nodes._await_address(session, keeper, "127.0.0.1", began + 60.0) is None
    assert time.monotonic() - began < 50.0, "no agent was started"
    with subprocess.Popen(["sleep", "60"]) as keeper._process:
        until = time.monotonic() + 0.5
        assert meeting_of_nodes._await_address(session, keeper, "127.0.0.1", until) is None
        assert time.monotonic() >= until
        keeper._process.kill()
