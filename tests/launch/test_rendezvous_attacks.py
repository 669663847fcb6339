"""Launchers' connections under attack, and under names and networks that fail, over real sockets."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rekindle.launch.rendezvous.hosts import BACKLOG, is_short_for, listen, own_host
from rekindle.launch.rendezvous.hub import Hub, View
from rekindle.launch.rendezvous.links import Identity
from rekindle.launch.rendezvous.wire import Address, Alive, Hello, Lead, encode

LONG = 60.0
LOCAL = "127.0.0.1"
JOB = "a-name-that-nobody-guesses"
SLOW = 1.5
"""Seconds that a lookup takes: longer than a launcher waits for the answer of another one."""


class Launchers:
    """Launchers of one job of two nodes."""

    def __init__(self) -> None:
        self.hubs: list[Hub] = []
        self.listener = self._listen()
        self.port = self.listener.getsockname()[1]

    def lead(self) -> Hub:
        """Starts the one at the endpoint."""
        endpoint = Address(LOCAL, self.port)
        return self._start(endpoint, self.listener, endpoint, (endpoint,))

    def follow(self, host: str = LOCAL) -> Hub:
        """Starts one that knows the endpoint by this name."""
        listener = self._listen()
        return self._start(Address(LOCAL, listener.getsockname()[1]), listener, Address(host, self.port), ())

    def meet(self) -> None:
        for number, hub in enumerate(self.hubs):
            hub.want(Address(LOCAL, 1000 + number))
        for hub in self.hubs:
            wait(hub, lambda view: view.round is not None)

    def _start(self, address: Address, listener: socket.socket, endpoint: Address, own: tuple[Address, ...]) -> Hub:
        me = Identity(JOB, f"{address.port:016x}", address, 2, 2, 1.0, (endpoint,), own)
        self.hubs.append(Hub(me, [listener], lambda: None))
        return self.hubs[-1]

    @staticmethod
    def _listen() -> socket.socket:
        listener = listen(0)
        assert listener is not None
        return listener


@pytest.fixture
def launchers() -> Iterator[Launchers]:
    made = Launchers()
    yield made
    for hub in made.hubs:
        hub.stop()
    made.listener.close()


def wait(hub: Hub, holds: Callable[[View], Any]) -> None:
    with hub.changed:
        assert hub.changed.wait_for(lambda: holds(hub.view), LONG), hub.view


def ends(stranger: socket.socket) -> bool:
    """Returns True once the other end has closed the connection."""
    with suppress(ConnectionError):
        while stranger.recv(1 << 16):
            pass
    return True


def hello(job: str) -> bytes:
    return encode(Hello(job, "f" * 16, Address(LOCAL, 1), 2, 2, 0, -1, 0, None, False, False))


def test_one_who_gives_signs_of_life_alone_is_sent_away(launchers: Launchers) -> None:
    launchers.lead()
    with socket.create_connection((LOCAL, launchers.port), LONG) as stranger:
        ended = threading.Event()

        def live() -> None:
            with suppress(OSError):
                while not ended.wait(0.5):
                    stranger.sendall(encode(Alive()))

        signs = threading.Thread(target=live)
        signs.start()
        try:
            assert ends(stranger)
        finally:
            ended.set()
            signs.join()


def test_a_stranger_without_the_jobs_name_takes_no_part_in_it_and_does_not_learn_it(launchers: Launchers) -> None:
    leader = launchers.lead()
    wait(leader, lambda view: view.leads)
    claim = Lead("a guess", "f" * 16, Address(LOCAL, 1), 1 << 40, 9, 9, True)
    with socket.create_connection((LOCAL, launchers.port), LONG) as stranger:
        stranger.sendall(hello("a guess"))
        answer = stranger.recv(1 << 16)
        assert b'"refused"' in answer and JOB.encode() not in answer
        stranger.sendall(encode(claim))
        assert ends(stranger)
    launchers.follow()
    launchers.meet()
    assert leader.view.leads


def test_one_who_asks_and_never_listens_holds_no_connection(launchers: Launchers) -> None:
    """Bytes that are not sent yet would keep the connection open for as long as its other end is there."""
    launchers.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    hub = launchers.lead()
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stranger.settimeout(LONG)
        stranger.connect((LOCAL, launchers.port))
        stranger.sendall(hello("another") * 2000)
        local = f"{launchers.port:04X}"
        remote = f"{stranger.getsockname()[1]:04X}"
        until = time.monotonic() + LONG
        while is_open(local, remote):
            assert time.monotonic() < until, "the connection stays"
            with hub.changed:
                hub.changed.wait(0.1)


def is_open(local: str, remote: str) -> bool:
    """Returns True while a process holds the connection between these ports."""
    lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    ends = [line.split()[1:4] for line in lines.splitlines()]
    return any(own.endswith(f":{local}") and far.endswith(f":{remote}") and state == "01" for own, far, state in ends)


def test_many_that_come_at_once_find_room(launchers: Launchers) -> None:
    hub = launchers.lead()
    wait(hub, lambda view: view.leads)
    info = launchers.listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert struct.unpack_from("I", info, 28)[0] == min(BACKLOG, most)  # of one that listens: its longest queue


def test_a_name_that_takes_long_to_look_up_is_reached(launchers: Launchers, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo
    asked = []

    def slowly(host: Any, *args: Any, **options: Any) -> Any:
        asked.append(host)
        time.sleep(SLOW)
        return look_up(LOCAL, *args, **options)

    launchers.lead()
    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    launchers.follow("slow-name.invalid")
    launchers.meet()
    assert 1 <= asked.count("slow-name.invalid") <= 3


def test_lookups_that_hang_hold_no_other_one_up_and_not_the_end(launchers: Launchers) -> None:
    hangs = threading.Event()
    look_up = socket.getaddrinfo
    before = threading.enumerate()

    def never(host: Any, *args: Any, **options: Any) -> Any:
        if host == "hangs.invalid":
            hangs.wait(LONG)
            raise OSError(errno.ETIMEDOUT, "no answer")
        return look_up(host, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", never)
        hub = launchers.follow("hangs.invalid")
        with hub.changed:
            hub.changed.wait_for(lambda: False, 2.0)
        lookups = [t for t in threading.enumerate() if t.name == "rekindle-lookup" and t not in before]
        assert len(lookups) <= 1
        hub.stop()
        assert hub.view.failed == "it was ended"
        hangs.set()


@pytest.mark.parametrize(
    ("host", "is_own"),
    [("job-0", True), ("job-0.jobs", True), ("JOB-0.jobs.ns.local", True), ("job", False), ("job-0.job", False)],
)
def test_a_host_knows_its_name_in_any_of_its_domains(host: str, is_own: bool) -> None:
    assert is_short_for(host, "job-0.jobs.ns.local") == is_own


def test_the_own_address_is_that_of_the_way_out_while_no_endpoint_is_known() -> None:
    assert own_host((Address("no-such-host.invalid", 1),), []) == own_host((Address("192.0.2.1", 1),), [])
