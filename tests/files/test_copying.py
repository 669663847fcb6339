"""A file in memory, read as torch reads an open one."""

from __future__ import annotations

import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rekindle.files.copying import CopiedFile

MIB = 1 << 20
DATA = os.urandom(13 * MIB + 77)


@pytest.mark.parametrize("start", [0, 1, 4097, 5 * MIB + 3, len(DATA) - 5, len(DATA), len(DATA) + 9])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4 * MIB, 4 * MIB + 1, 8 * MIB, 20 * MIB])
def test_each_read_is_that_of_a_file(start: int, nbytes: int) -> None:
    plain, theirs, ours = io.BytesIO(DATA), bytearray(b"-" * nbytes), bytearray(b"-" * nbytes)
    plain.seek(start)
    with CopiedFile(memoryview(bytearray(DATA))) as file:
        assert file.seek(start) == start
        assert file.readinto(ours) == plain.readinto(theirs)
        assert ours == theirs and file.read() == plain.read()


def test_seeks_are_those_of_a_file() -> None:
    with CopiedFile(memoryview(bytearray(DATA))) as file:
        assert file.seek(-3, os.SEEK_END) == file.tell() == len(DATA) - 3
        assert file.read(2) == DATA[-3:-1] and file.seek(-2, os.SEEK_CUR) == len(DATA) - 3
        assert file.readable() and file.seekable() and not file.writable()


def test_an_empty_file() -> None:
    with CopiedFile(memoryview(b"")) as file:
        assert file.read() == b"" and file.seek(0, os.SEEK_END) == 0


def test_what_a_thread_fails_at_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(place: memoryview, address: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("rekindle.files.copying.copy_from_address", fail)
    with CopiedFile(memoryview(bytearray(DATA))) as file, pytest.raises(OSError, match="Input/output"):
        file.readinto(bytearray(8 * MIB))


def test_nobody_writes_into_a_buffer_after_a_read_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted, late = threading.Event(), threading.Event()
    first: list[int] = []

    def copy(place: memoryview, address: int) -> None:
        if not first:
            first.append(address)
            raise KeyboardInterrupt
        interrupted.wait(0.2)  # longer than the way of the interrupt
        if interrupted.is_set():
            late.set()

    monkeypatch.setattr("rekindle.files.copying.copy_from_address", copy)
    monkeypatch.setattr("rekindle.files.copying.reader_threads", lambda *, in_memory: 2)
    with CopiedFile(memoryview(bytearray(DATA))) as file:
        with pytest.raises(KeyboardInterrupt):
            file.readinto(bytearray(12 * MIB))
        interrupted.set()
    assert not late.is_set()


def test_a_read_where_no_more_threads_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody copies after its return: what a thread has taken is waited for."""
    real, left = threading.Thread.start, [1]

    def start(self: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        real(self)

    monkeypatch.setattr("rekindle.files.copying.reader_threads", lambda *, in_memory: 4)
    monkeypatch.setattr(threading.Thread, "start", start)
    with CopiedFile(memoryview(bytearray(DATA))) as file:
        assert file.read(len(DATA)) == DATA


def test_its_threads_end_with_it() -> None:
    with CopiedFile(memoryview(bytearray(DATA))) as file:
        file.readinto(bytearray(8 * MIB))
        threads: ThreadPoolExecutor = file._threads
        assert threads._threads
    assert not any(thread.is_alive() for thread in threads._threads)
