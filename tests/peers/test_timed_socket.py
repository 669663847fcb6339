"""Raw bytes through a TCP connection, where the kernel's waits are shorter than the transfer."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rekindle.peers import timed_socket
from rekindle.peers.timed_socket import TimedSocket
from tests.peers.ends import LONG, exactly

DATA = os.urandom(3 << 20)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TimedSocket, socket.socket]]:
    """A connection whose near end looks up from each wait after 10 ms."""
    monkeypatch.setattr(timed_socket, "_LOOK", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname(), LONG)
        near = TimedSocket(listener.accept()[0])
    with far:
        yield near, far
    near.close()


def test_bytes_that_come_slowly_all_arrive(ends: tuple[TimedSocket, socket.socket]) -> None:
    near, far = ends
    room = bytearray(len(DATA))

    def send() -> None:
        for at in range(0, len(DATA), 100_000):
            far.sendall(DATA[at : at + 100_000])
            time.sleep(0.015)  # lets a wait or two end

    sender = threading.Thread(target=send)
    sender.start()
    near.read_into([memoryview(room)[at : at + 9973] for at in range(0, len(room), 9973)])  # more than one call takes
    sender.join()
    assert room == DATA


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_bytes_that_are_taken_slowly_all_leave(kind: str, ends: tuple[TimedSocket, socket.socket], tmp_path) -> None:
    near, far = ends
    near._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # else the kernel takes all at once
    (tmp_path / "shard").write_bytes(b"head" + DATA + b"rest")

    def send() -> None:
        if kind == "memory":
            near.write_view(memoryview(DATA))
        else:
            with (tmp_path / "shard").open("rb") as file:
                near.write_file(file.fileno(), 4, 4 + len(DATA))

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        taken = b""
        while len(taken) < len(DATA):
            taken += exactly(far, min(100_000, len(DATA) - len(taken)))
            time.sleep(0.015)
        sent.result(LONG)
    assert taken == DATA


def test_a_stop_in_the_middle_is_noticed(ends: tuple[TimedSocket, socket.socket], monkeypatch) -> None:
    near, far = ends
    monkeypatch.setattr(timed_socket, "STALL", 0.3)
    far.sendall(DATA[:1000])
    with pytest.raises(TimeoutError, match="nothing arrived"):
        near.read_into([memoryview(bytearray(1001))])


def test_an_end_in_the_middle_is_noticed(ends: tuple[TimedSocket, socket.socket]) -> None:
    near, far = ends
    far.sendall(DATA[:1000])
    far.close()
    with pytest.raises(ConnectionResetError):
        near.read_into([memoryview(bytearray(1001))])
