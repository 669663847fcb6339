"""Launchers' connections, over real sockets on this machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rekindle.launch.rendezvous.hosts import is_this_host, listen, own_host
from rekindle.launch.rendezvous.hub import Hub, View
from rekindle.launch.rendezvous.links import Identity
from rekindle.launch.rendezvous.wire import MOST_BYTES, Address

LONG = 60.0
LOCAL = "127.0.0.1"


@pytest.fixture
def hubs() -> Iterator[list[Hub]]:
    made: list[Hub] = []
    yield made
    for hub in made:
        hub.stop()


def start(hubs: list[Hub], endpoint: int = 0) -> int:
    """Starts a launcher of a job of two nodes. Returns the port at which it listens."""
    listener = listen(0)
    assert listener is not None
    address = Address(LOCAL, listener.getsockname()[1])
    first = Address(LOCAL, endpoint or address.port)
    own = () if endpoint else (address,)
    me = Identity("job", f"{address.port:016x}", address, 2, 2, 1.0, (first,), own)
    hubs.append(Hub(me, [listener], lambda: None))
    return address.port


def wait(hub: Hub, holds: Callable[[View], Any]) -> None:
    with hub.changed:
        assert hub.changed.wait_for(lambda: holds(hub.view), LONG), hub.view


def meet(hubs: list[Hub], first: int) -> None:
    """Has all of them ask for a round, and waits until both nodes are part of it."""
    before = [hub.view.round.number if hub.view.round else 0 for hub in hubs]
    for number, hub in enumerate(hubs):
        hub.want(Address(LOCAL, first + number))
    for number, hub in enumerate(hubs):
        wait(hub, lambda view, old=before[number]: view.round is not None and view.round.number > old)


def test_two_launchers_meet_and_hear_each_other(hubs: list[Hub]) -> None:
    port = start(hubs)
    start(hubs, port)
    meet(hubs, 1000)
    rounds = [hub.view.round for hub in hubs]
    assert [made and (made.place, made.world, made.store.port) for made in rounds] == [(0, 2, 1000), (1, 2, 1000)]
    hubs[0].want(Address(LOCAL, 1002))
    wait(hubs[1], lambda view: view.news.waiting)
    began = time.monotonic()
    hubs[1].want(Address(LOCAL, 1003))
    for hub, old in zip(hubs, rounds, strict=True):
        wait(hub, lambda view, old=old: view.round.number > old.number)
    assert time.monotonic() - began < 5.0
    hubs[1].bye(over=True)
    wait(hubs[0], lambda view: view.news.closed)


def test_a_launcher_leads_on_when_the_other_one_ends(hubs: list[Hub]) -> None:
    port = start(hubs)
    start(hubs, port)
    meet(hubs, 1000)
    hubs.pop(0).stop()
    wait(hubs[0], lambda view: view.leads)
    start(hubs, hubs[0]._node.me.address.port)
    meet(hubs, 2000)
    assert sorted(hub.view.round.place for hub in hubs if hub.view.round) == [0, 1]


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\n\r\n", b"{" * 100, b"x" * (MOST_BYTES + 2), b"\x00\xff\n", b"[]\n"],
    ids=["another protocol", "half a line", "a long line", "bytes", "a list"],
)
def test_nonsense_ends_its_connection_and_others_are_served(hubs: list[Hub], words: bytes) -> None:
    port = start(hubs)
    with socket.create_connection((LOCAL, port), LONG) as stranger:
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:  # ended before all was read
            pass
    start(hubs, port)
    meet(hubs, 1000)


def test_one_who_says_nothing_is_sent_away(hubs: list[Hub]) -> None:
    port = start(hubs)
    with socket.create_connection((LOCAL, port), LONG) as stranger:
        assert stranger.recv(1) == b""


def test_a_host_is_known_as_this_one_by_its_addresses() -> None:
    assert is_this_host(LOCAL) and is_this_host("localhost") and is_this_host(socket.gethostname())
    assert not is_this_host("192.0.2.1") and not is_this_host("no-such-host.invalid")
    assert own_host((Address("name", 1),), [Address("name", 1)]) == "name"
    assert own_host((Address(LOCAL, 1),), []) == LOCAL


def test_a_port_that_is_taken_is_not_taken_twice() -> None:
    first = listen(0)
    assert first is not None
    with first:
        assert listen(first.getsockname()[1]) is None
