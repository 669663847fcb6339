"""Links between nodes: messages, raw bytes, deadlines, and the server that answers."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rekindle.peers.server import listen
from rekindle.peers.wire import MAX_MESSAGE, Credentials, Link, WireError, call, connect
from tests.peers.ends import LONG, A, B, between, frame_from, serving

BLOCK = os.urandom(3 << 20)
"""More raw bytes than sockets hold."""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_request_is_answered_and_both_ends_know_the_other_ones_name(host: str) -> None:
    names: list[str] = []
    try:
        listen(host, 0).close()
    except OSError as error:
        pytest.skip(f"no such address here: {error}")
    with serving({"who": lambda link, message: names.append(link.peer)}, host=host) as served:
        link = served.link()
        link.send({"verb": "who"})
        assert call(link, {"verb": "echo", "said": "ü"}, LONG) == {"verb": "echo", "said": "ü"}
        assert (link.peer, names) == (B.name, [A.name])
        link.close()


def test_raw_bytes_follow_the_message_that_announces_them(tmp_path: Path) -> None:
    """From memory and from a file, asked for in other parts than they are sent in; in both directions."""
    path = tmp_path / "shard"
    path.write_bytes(b"head" + BLOCK)
    kept: list[bytes] = []

    def read(link: Link, message: dict[str, Any]) -> None:
        link.send({"bytes": len(BLOCK) + 4})
        link.send_bytes(b"head")
        fd = os.open(path, os.O_RDONLY)
        link.send_file(fd, 4, 4 + len(BLOCK))
        os.close(fd)

    def keep(link: Link, message: dict[str, Any]) -> dict[str, Any]:
        data = bytearray(message["bytes"])
        link.receive_into(memoryview(data))
        kept.append(bytes(data))
        return {}

    with serving({"read": read, "keep": keep}) as served:
        link = served.link()
        for _ in range(2):
            reply = call(link, {"verb": "read"}, LONG)
            data = bytearray(reply["bytes"])
            link.receive_into(memoryview(data)[:1000])
            link.receive_into(memoryview(data)[1000:])
            assert data == b"head" + BLOCK
        link.send({"verb": "keep", "bytes": len(BLOCK)})
        link.send_bytes(memoryview(BLOCK))
        assert link.receive(LONG) == {}
        assert kept == [BLOCK]
        link.close()


def test_a_file_that_ends_early_ends_the_link(tmp_path: Path) -> None:
    """An error in words would be taken for the bytes that are missing."""
    path = tmp_path / "shard"
    path.write_bytes(b"x" * 100)

    def read(link: Link, message: dict[str, Any]) -> None:
        link.send({"bytes": 200})
        with path.open("rb") as file:
            link.send_file(file.fileno(), 0, 200)

    with serving({"read": read}) as served:
        link = served.link()
        link.send({"verb": "read"})
        link.receive(LONG)
        with pytest.raises(ConnectionError):
            link.receive_into(memoryview(bytearray(200)))


def test_a_handler_that_fails_before_its_bytes_ends_the_link() -> None:
    def read(link: Link, message: dict[str, Any]) -> None:
        link.send({"bytes": 200})
        raise ValueError("no")

    with serving({"read": read}) as served:
        link = served.link()
        link.send({"verb": "read"})
        link.receive(LONG)
        with pytest.raises(ConnectionError):
            link.receive_into(memoryview(bytearray(200)))


def test_an_error_of_a_handler_is_told_and_the_link_goes_on() -> None:
    def fail(link: Link, message: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    def err(link: Link, message: dict[str, Any]) -> None:
        raise KeyError("rank")

    with serving({"fail": fail, "err": err}) as served:
        link = served.link()
        for request, words in [
            ({"verb": "fail"}, "node-b: No space left on device: make room there"),
            ({"verb": "err"}, "KeyError: 'rank'"),
            ({"verb": "open"}, "no such verb: 'open'"),
            ({"verb": ["open"]}, "no such verb"),
            ({}, "no such verb: 'None'"),
        ]:
            with pytest.raises(WireError, match=words):
                call(link, request, LONG)
        link.send({"verb": "fail", "bytes": len(BLOCK)})  # nobody reads them: they are not taken for a message
        link.send_bytes(BLOCK)
        assert "error" in link.receive(LONG)
        assert call(link, {"verb": "echo"}, LONG) == {"verb": "echo"}
        link.close()


def test_a_message_that_is_not_there_yet_can_be_waited_for_again() -> None:
    with between() as there:
        there.shake_hands()
        there.client().send({"number": 1})
        frame = frame_from(there.to_client)
        for part in (frame[:2], frame[2:9], frame[9:-1]):
            there.to_server.sendall(part)
            with pytest.raises(TimeoutError):
                there.server().receive(0.01)
        there.to_server.sendall(frame[-1:])
        assert there.server().receive(LONG) == {"number": 1}


def test_a_reply_that_comes_too_late_is_not_taken_for_the_next_one() -> None:
    with between() as there:
        there.shake_hands()
        with pytest.raises(TimeoutError):
            call(there.client(), {"verb": "echo"}, 0.01)
        with pytest.raises(OSError):
            there.client().send({"verb": "echo"})


def test_messages_have_a_longest() -> None:
    with serving({}) as served:
        link = served.link()
        text = "x" * (MAX_MESSAGE - len('{"verb":"echo","said":""}'))
        assert call(link, {"verb": "echo", "said": text}, LONG)["said"] == text
        with pytest.raises(WireError, match="can't be sent"):
            link.send({"verb": "echo", "said": text + "x"})


def test_raw_bytes_are_counted() -> None:
    """More than were announced, or a message in their place, would shift all that follows."""
    with between() as there:
        there.shake_hands()
        client, server = there.client(), there.server()
        client.send({"bytes": 3})
        there.to_server.sendall(frame_from(there.to_client) + b"abc")
        assert server.receive(LONG) == {"bytes": 3}
        with pytest.raises(WireError, match="4 raw bytes are asked for, and 3"):
            server.receive_into(memoryview(bytearray(4)))
        with pytest.raises(WireError, match="4 raw bytes are to be sent, and 3"):
            client.send_bytes(b"abcd")


def test_what_is_attached_to_a_link_is_closed_with_it() -> None:
    closed = threading.Event()
    with serving({"pin": lambda link, message: link.attached.callback(closed.set) and None}) as served:
        link = served.link()
        link.send({"verb": "pin"})
        assert call(link, {"verb": "echo"}, LONG) and not closed.is_set()
        link.close()
        assert closed.wait(LONG)


def test_a_server_that_closes_ends_links_and_threads() -> None:
    before = threading.enumerate()  # those of earlier tests may end meanwhile
    with serving({}) as served:
        link, silent = served.link(), served.raw()
        assert call(link, {"verb": "echo"}, LONG)
        assert set(threading.enumerate()) - set(before)
    assert not set(threading.enumerate()) - set(before)
    with pytest.raises(ConnectionError):
        call(link, {"verb": "echo"}, LONG)
    with pytest.raises(ConnectionRefusedError):
        served.link()
    silent.close()


def test_links_end_with_the_start_that_they_were_made_for() -> None:
    current: list[Credentials | None] = [B]
    with serving({}, lambda: current[0]) as served:
        link = served.link()
        assert call(link, {"verb": "echo"}, LONG)
        current[0] = B._replace(start="b" * 16)
        with pytest.raises(ConnectionError):
            call(link, {"verb": "echo"}, LONG)
        with pytest.raises(WireError, match="another start"):
            served.link()
        current[0] = None
        with pytest.raises(WireError, match="not in a mesh now"):
            served.link()


def test_a_port_that_nobody_listens_at_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(ConnectionRefusedError):
        connect(*address, A, LONG)


def test_many_links_at_once() -> None:
    """Each thread has its own, as the ranks that read a shard have."""

    def ask(number: int) -> list[int]:
        link = served.link()
        answers = [call(link, {"verb": "echo", "n": number * 100 + i}, LONG)["n"] for i in range(20)]
        link.close()
        return answers

    with serving({}) as served, ThreadPoolExecutor(16) as pool:
        for number, answers in enumerate(pool.map(ask, range(32))):
            assert answers == [number * 100 + i for i in range(20)]
