"""The rendezvous tells people what they have to change, and why it waits."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError

from rekindle.errors import UsageError
from rekindle.faults.torchelastic import FRESH_STORE
from rekindle.launch.rendezvous import handler
from rekindle.launch.rendezvous.handler import Rendezvous

WITHIN = 60.0


@pytest.fixture(autouse=True)
def _mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FRESH_STORE, "")  # so that it is taken back: a handler sets it for the ranks


def parameters(endpoint: str, job: str = "job", **settings: object) -> RendezvousParameters:
    return RendezvousParameters("rekindle", endpoint, job, 2, 2, **settings)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (parameters("node-1:99999"), "must be an integer between 0 and 65536"),
        (parameters("node 1:29400"), "must be a dot-separated list of labels"),
        (parameters("node-1:0"), "needs a port that the nodes know"),
        (parameters("node-1:29400,node-2:29400", is_host=1), "which one of several endpoints"),
        (parameters("n\u00f6de:0,node-2:1", is_host=0), "needs a port that the nodes know"),
        (parameters("127.0.0.1:1", join_timeout="soon"), "join_timeout of --rdzv-conf is 'soon'"),
        (parameters("127.0.0.1:1", "line\nbreak", is_host=0), "a text is empty, not printable, or longer"),
        (parameters("127.0.0.1:1", local_addr="n\u00f6de", is_host=0), "it is no address"),
    ],
)
def test_what_no_node_could_meet_by_is_a_usage_error(given: RendezvousParameters, why: str) -> None:
    with pytest.raises(UsageError) as raised:
        Rendezvous(given)
    assert why in str(raised.value).replace("\n", " ")


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_one_that_waits_for_ranks_of_other_nodes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_WAITS_QUIETLY", 0.2)
    monkeypatch.setattr(handler, "_LEAVE_WITHIN", 0.1)
    monkeypatch.setenv("TTP_NORMAL_ACTION_TIME_LIMIT", "100")  # for a dump
    endpoint, said = free_endpoint(), list[str]()
    both = [Rendezvous(parameters(endpoint, is_host=number == 0)) for number in range(2)]
    both[0].say = said.append
    with ThreadPoolExecutor(2) as pool:
        try:
            for done in [pool.submit(launcher.next_rendezvous) for launcher in both]:
                done.result(WITHIN)
            said.clear()
            monkeypatch.setattr(both[0], "_join_within", 1.0)
            error = pool.submit(both[0].next_rendezvous).exception(WITHIN)
        finally:
            for launcher in both:
                launcher.shutdown()
    assert isinstance(error, RendezvousTimeoutError) and "ranks of other nodes have not ended within 1 s" in str(error)
    (line,) = said
    assert line.startswith("waits for the ranks of other nodes to end") and "after 135 s a spare takes" in line
    assert both[0]._hub._node.me.ends_within == 135.0


def test_one_that_waits_for_more_nodes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_WAITS_QUIETLY", 0.5)
    endpoint = free_endpoint()
    said: list[str] = []
    launcher = Rendezvous(parameters(endpoint, join_timeout=2.0))
    launcher.say = said.append
    with ThreadPoolExecutor(1) as pool:
        try:
            error = pool.submit(launcher.next_rendezvous).exception(WITHIN)
        finally:
            launcher.shutdown()
    assert isinstance(error, RendezvousTimeoutError) and "too few nodes have come to" in str(error)
    (line,) = said
    assert line.startswith(
        "waits for other nodes, for 2 s at most (join_timeout of --rdzv-conf): start 'rekindle run' on"
    )
