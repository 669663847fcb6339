"""Somebody on the network who lacks the job's secret: refused, bounded, and no hindrance to those who have it."""

from __future__ import annotations

import json
import re
import resource
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.peers import server as server_module
from rekindle.peers import timed_socket, wire
from rekindle.peers.wire import MAX_MESSAGE, Credentials, Link, WireError, call, connect
from tests.faults.harness import wait_for
from tests.peers.ends import LONG, A, B, Served, between, exactly, frame_from, is_closed, serving

OTHER = bytes(32)


def frame(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text


def hello(**changed: Any) -> bytes:
    said = {"rekindle": 1, "name": A.name, "start": A.start, "nonce": "0" * 64, **changed}
    return frame(json.dumps(said).encode())


# ---- no secret


def test_a_wrong_secret_is_refused_at_both_ends() -> None:
    """A client learns it from the server's proof, which comes first; one that goes on all the same is cut off."""
    asked: list[str] = []
    with serving({"fault": lambda link, message: asked.append(link.peer)}) as served:
        with pytest.raises(WireError, match="has not proved to know this job's secret"):
            served.link(A._replace(secret=OTHER))
        with served.raw() as intruder:
            intruder.sendall(hello())
            assert "proof" in json.loads(frame_from(intruder, mac=0)[4:])
            intruder.sendall(frame(json.dumps({"proof": "0" * 64}).encode()) + frame(b'{"verb":"fault"}') + bytes(16))
            assert is_closed(intruder)
        assert call(served.link(), {"verb": "echo"}, LONG)
    assert not asked


def test_a_forged_start_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Of a node that knows the secret and belongs to an earlier start, and of one whose word was changed on the way."""
    with serving({}) as served, pytest.raises(WireError, match="another start of the job"):
        served.link(A._replace(start="b" * 16))
    assert "127.0.0.1" not in caplog.text  # nodes that change over do that, and nobody needs to know

    def change(number: int, said: bytes) -> bytes:
        return said.replace(b"b" * 16, A.start.encode())

    with between(A._replace(start="b" * 16)) as there:  # B believes the word, and its proof is for another start
        there.shake_hands(change)
        with pytest.raises(WireError, match="has not proved"):
            there.client()


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("field", ["name", "nonce"])
def test_a_handshake_that_was_changed_on_the_way_fails(number: int, field: str) -> None:
    """A node can't be made to take another one for its partner."""

    def change(which: int, said: bytes) -> bytes:
        message = json.loads(said[4:])
        if which == number:
            message[field] = "node-c" if field == "name" else secrets.token_hex(32)
        return frame(json.dumps(message).encode())

    with between() as there:
        there.shake_hands(change)
        with pytest.raises(WireError, match="has not proved"):
            there.client()
        there.to_server.close()
        with pytest.raises((WireError, OSError)):
            there.server()


def test_a_node_is_not_linked_with_itself() -> None:
    """Somebody who leads a node's connection back to the node has a server that knows the secret."""
    with serving({}) as served, pytest.raises(WireError, match="is this node, node-b, itself"):
        served.link(B)


# ---- recorded messages


def test_a_recorded_connection_can_not_be_played_again() -> None:
    """The server's nonce is another one each time, so the recorded proof fits none."""
    heard: list[dict[str, Any]] = []
    with between() as there:
        passed = there.shake_hands()
        there.client().send({"verb": "beat"})
        recorded = [passed[0], passed[2], frame_from(there.to_client)]
    with serving({"beat": lambda link, message: heard.append(message)}) as served:
        with served.raw() as intruder:
            intruder.sendall(b"".join(recorded))
            assert is_closed(intruder)
        assert call(served.link(), {"verb": "echo"}, LONG)
    assert not heard


def twice(frames: list[bytes]) -> list[bytes]:
    return [frames[0], frames[0]]


def in_another_order(frames: list[bytes]) -> list[bytes]:
    return [frames[1], frames[0]]


def without_the_first(frames: list[bytes]) -> list[bytes]:
    return frames[1:]


def with_another_rank(frames: list[bytes]) -> list[bytes]:
    return [frames[0].replace(b'"rank":0', b'"rank":1')]


def with_another_mac(frames: list[bytes]) -> list[bytes]:
    return [frames[0][:-1] + bytes([frames[0][-1] ^ 1])]


def shorter(frames: list[bytes]) -> list[bytes]:
    return [(int.from_bytes(frames[0][:4], "big") - 1).to_bytes(4, "big") + frames[0][4:]]


@pytest.mark.parametrize(
    "change", [twice, in_another_order, without_the_first, with_another_rank, with_another_mac, shorter]
)
def test_a_beat_that_is_forged_or_played_again_ends_the_link(change: Callable[[list[bytes]], list[bytes]]) -> None:
    """The receiver gets none but those that were sent, in their order, each once."""
    with between() as there:
        there.shake_hands()
        client, server = there.client(), there.server()
        sent = [{"verb": "beat", "rank": 0, "n": n} for n in range(2)]
        frames = []
        for message in sent:
            client.send(message)
            frames.append(frame_from(there.to_client))
        there.to_server.sendall(b"".join(change(frames)))
        received = []
        with pytest.raises(WireError, match="wrong MAC"):
            while True:
                received.append(server.receive(LONG))
        assert received == sent[: len(received)]
        with pytest.raises(OSError):
            server.receive(LONG)


def test_a_message_that_is_sent_back_or_comes_from_another_link_is_refused() -> None:
    with between() as there, between() as other:
        there.shake_hands()
        other.shake_hands()
        there.client().send({"verb": "beat"})
        passed = frame_from(there.to_client)
        there.to_client.sendall(passed)
        other.to_server.sendall(passed)
        for end in (there.client(), other.server()):
            with pytest.raises(WireError, match="wrong MAC"):
                end.receive(LONG)


def test_raw_bytes_that_were_changed_on_the_way_arrive_changed() -> None:
    """As docs/security.md says: checksums of receipts find damage in them, and nothing here finds a forger."""
    with between() as there:
        there.shake_hands()
        there.client().send({"bytes": 3})
        there.client().send_bytes(b"abc")
        there.to_server.sendall(frame_from(there.to_client) + exactly(there.to_client, 3).upper())
        there.server().receive(LONG)
        data = bytearray(3)
        there.server().receive_into(memoryview(data))
        assert data == b"ABC"


# ---- nonsense


NONSENSE = {
    "http": b"GET / HTTP/1.1\r\nHost: node-b\r\n\r\n",
    "tls": bytes.fromhex("16030100a5010000a10303") + bytes(64),
    "huge length": b"\xff\xff\xff\xff" + bytes(1000),
    "longer than a handshake": frame(b" " * 5000),
    "no json": frame(b"\x00\x01\x02"),
    "no object": frame(b"[1, 2]"),
    "deep": frame(b"[" * 4000),
    "long number": frame(b'{"rekindle": ' + b"9" * 4000 + b"}"),
    "no fields": frame(b"{}"),
    "no text": hello(name=5),
    "long name": hello(name="x" * 300),
    "control characters": hello(name="a\x1b[2J"),
    "half of a character": hello(nonce="\ud800"),
    "no nonce": hello(nonce=None),
    "other version": hello(rekindle=2),
    "proof of no text": hello() + frame(b'{"proof": 1}'),
    "proof of other letters": hello() + frame(b'{"proof": "\xc3\xbc"}'),
}


@pytest.mark.parametrize("text", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_refused_and_others_are_served(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: neither the end of the nonsense nor the time for a handshake is waited for."""
    monkeypatch.setattr(server_module, "_HANDSHAKE", 10 * LONG)
    with serving({}) as served:
        with served.raw() as intruder:
            with suppress(ConnectionError):
                intruder.sendall(text)
            assert is_closed(intruder)
        assert call(served.link(), {"verb": "echo"}, LONG)


def test_a_server_of_nonsense_is_refused() -> None:
    """Also one that announces more than memory holds: nothing is made of its word."""
    for text in (
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frame(b"{}"),
        b"\x7f\xff\xff\xff",
        frame(b'{"refused": "\\u001b"}'),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            dialing = threading.Thread(target=lambda: answer(listener, text))  # noqa: B023
            dialing.start()
            with pytest.raises((WireError, ConnectionError)):
                connect(*listener.getsockname(), A, LONG)
            dialing.join()


def answer(listener: socket.socket, text: bytes) -> None:
    accepted, _ = listener.accept()
    with accepted:
        frame_from(accepted, mac=0)
        accepted.sendall(text)


@settings(max_examples=50)
@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_do_harm(noise: bytes, framed: bool) -> None:
    with between() as there:
        with suppress(OSError):  # it may have closed the connection already
            there.to_server.sendall(frame(noise) if framed else noise)
            there.to_server.shutdown(socket.SHUT_WR)
        with pytest.raises((WireError, OSError)):
            there.server()


# ---- too much


def test_a_message_that_is_longer_than_any_is_refused_before_it_arrives() -> None:
    """By the receiver: the sender knows the secret, and its message is sound but for its length."""
    heard: list[dict[str, Any]] = []
    framed = frame(b'{"verb":"keep"}' + b" " * (MAX_MESSAGE + 1 - 15))
    with serving({"keep": lambda link, message: heard.append(message)}) as served:
        link = served.link()
        with pytest.raises(ConnectionError):
            link._stream.write(framed + wire._mac(link._sending, 0, framed), LONG)
            link.receive(LONG)
    assert not heard
    with between() as there:
        there.shake_hands()
        there.to_server.sendall(framed[:4])
        with pytest.raises(WireError, match=f"{MAX_MESSAGE + 1} bytes was announced, the most are {MAX_MESSAGE}"):
            there.server().receive(LONG)


def test_memory_is_taken_only_for_what_has_arrived() -> None:
    """Of messages that are not too long, and of which only a few bytes come."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with serving({}) as served, ExitStack() as open_ones:
        links = [served.link() for _ in range(100)]
        for link in links:
            open_ones.callback(link.close)
            assert call(link, {"verb": "echo"}, LONG)
        before = resident()
        for link in links:
            link._stream.write(MAX_MESSAGE.to_bytes(4, "big") + b" " * 100, LONG)
        assert call(served.link(), {"verb": "echo"}, LONG)
        time.sleep(0.2)  # for all of the server's threads to have read that
        assert resident() - before < 30 * MAX_MESSAGE


def test_more_raw_bytes_than_any_refused_request_brings_are_not_read() -> None:
    most = wire._MAX_SKIPPED
    with serving({}) as served:
        link = served.link()
        link.send({"verb": "none", "bytes": most})
        link.send_bytes(bytes(most))
        assert "no such verb" in link.receive(LONG)["error"]
        assert call(link, {"verb": "echo"}, LONG), "they were skipped"
    with between() as there:
        there.shake_hands()
        there.client().send({"bytes": most + 1})
        there.to_server.sendall(frame_from(there.to_client))
        there.server().receive(LONG)
        with pytest.raises(WireError, match=f"{most + 1} raw bytes are too many to skip"):
            there.server().skip()


# ---- slow ends, and many


def test_a_silent_and_a_slow_client_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """One says nothing; one sends a byte now and then, so that it never is silent for long."""
    monkeypatch.setattr(server_module, "_HANDSHAKE", 0.3)
    with serving({}) as served, served.raw() as silent, served.raw() as slow:
        slow.settimeout(0.02)
        with suppress(ConnectionError):
            for byte in frame(b" " * 4000):
                slow.sendall(bytes([byte]))
                with suppress(TimeoutError):
                    if not slow.recv(1):
                        break
            else:
                pytest.fail("the slow client was never cut off")
        assert is_closed(silent)


def test_a_reader_that_takes_no_bytes_frees_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_socket, "STALL", 0.3)
    freed = threading.Event()

    def read(link: Link, message: dict[str, Any]) -> None:
        link.attached.callback(freed.set)
        link.send({"bytes": 64 << 20})
        link.send_bytes(bytes(64 << 20))

    with serving({"read": read}) as served:
        link = served.link()
        link.send({"verb": "read"})
        assert freed.wait(LONG)
        link.close()


def test_a_file_that_nobody_reads_is_let_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timed_socket, "STALL", 0.3)
    freed = threading.Event()
    path = tmp_path / "shard"
    with path.open("wb") as file:
        file.truncate(64 << 20)

    def read(link: Link, message: dict[str, Any]) -> None:
        link.attached.callback(freed.set)
        link.send({"bytes": 64 << 20})
        with path.open("rb") as file:
            link.send_file(file.fileno(), 0, 64 << 20)

    with serving({"read": read}) as served:
        link = served.link()
        link.send({"verb": "read"})
        assert freed.wait(LONG)
        link.close()


def test_a_writer_that_sends_no_bytes_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_socket, "STALL", 0.3)
    ended: list[BaseException] = []

    def keep(link: Link, message: dict[str, Any]) -> dict[str, Any]:
        try:
            link.receive_into(memoryview(bytearray(message["bytes"])))
        except OSError as error:
            ended.append(error)
            raise
        return {}

    with serving({"keep": keep}) as served:
        link = served.link()
        link.send({"verb": "keep", "bytes": 100})
        with pytest.raises(ConnectionError):
            link.receive(LONG)
    assert isinstance(ended[0], TimeoutError)


def test_a_flood_of_connections_neither_ends_links_nor_keeps_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest that has not proved itself goes for the next one, a hundred in a second; those that have stay."""
    monkeypatch.setattr(server_module, "_HANDSHAKE", 10 * LONG)  # none ends of itself
    others = threads_that_serve()  # of tests before, which may not have ended yet
    with serving({}) as served, ExitStack() as open_ones:
        link = served.link()
        assert call(link, {"verb": "echo"}, LONG)  # the server has seen its proof by now
        flood = [open_ones.enter_context(served.raw()) for _ in range(127)]
        wait_for(lambda: len(served.server._connections) == 128)
        began = time.monotonic()
        flood += [open_ones.enter_context(served.raw()) for _ in range(100)]
        assert all(is_closed(each) for each in flood[:100])
        assert time.monotonic() - began >= 0.9
        assert call(link, {"verb": "echo"}, LONG)
        assert call(served.link(), {"verb": "echo"}, LONG)
        wait_for(lambda: threads_that_serve() <= others + 128)
        assert not select.select(flood[101:], [], [], 0)[0], "no more than had to go"
        assert call(link, {"verb": "echo"}, LONG)


def threads_that_serve() -> int:
    return sum(each.name == "rekindle-peer" for each in threading.enumerate())


def test_beyond_the_limit_a_newcomer_goes_and_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MOST", 3)
    with serving({}) as served:
        links = [served.link() for _ in range(3)]
        assert all(call(link, {"verb": "echo"}, LONG) for link in links)
        with pytest.raises(OSError):
            served.link()
        links.pop().close()
        wait_for(lambda: may_enter(served))
        assert all(call(link, {"verb": "echo"}, LONG) for link in links)


def may_enter(served: Served) -> bool:
    with suppress(OSError):
        served.link().close()
        return True
    return False


def test_a_reset_connection_leaves_nothing() -> None:
    with serving({}) as served:
        before = threading.active_count()
        for _ in range(20):
            with served.raw() as intruder:
                intruder.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                intruder.sendall(hello()[:10])
        assert call(served.link(), {"verb": "echo"}, LONG)
        wait_for(lambda: threading.active_count() <= before + 1)


def test_intruders_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving({}) as served:
        for _ in range(5):
            with served.raw() as intruder:
                intruder.sendall(frame(b"{}"))
                assert is_closed(intruder)
    assert [record.message for record in caplog.records if "127.0.0.1" in record.message] == [
        "a connection from 127.0.0.1 was closed: the other end speaks no version of the protocol that is known here"
    ]


def test_a_secret_is_never_sent() -> None:
    with between() as there:
        passed = b"".join(there.shake_hands())
        there.client().send({"verb": "beat"})
        passed += frame_from(there.to_client)
    for form in (A.secret, A.secret.hex().encode()):
        assert form not in passed


def test_credentials_that_appear_later_count_at_once() -> None:
    current: list[Credentials | None] = [None]
    with serving({}, lambda: current[0]) as served:
        with pytest.raises(WireError, match="not in a mesh now"):
            served.link()
        with served.raw() as client:
            client.sendall(hello())
            assert b"refused" in frame_from(client, mac=0)
            assert client.recv(1) == b""  # and no reset, which could overtake the answer
        current[0] = B
        assert call(served.link(), {"verb": "echo"}, LONG)


def test_each_line_of_the_page_on_security_names_tests_that_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    here = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for line in lines:
        tests = re.findall(r"`(?:tests/\w+/)?(test_\w+)(\.py)?`", line.rpartition("| ")[2] or line)
        assert tests, line
        assert all(path or f"def {test}(" in here for test, path in tests), line
