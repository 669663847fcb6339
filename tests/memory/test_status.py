"""The status page: what is written is read, whole, also after the writer's death."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from rekindle.errors import FormatError
from rekindle.memory.status import SECURED, STABLE, UPDATING, StatusPage, StatusReader, read_status


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003.status"
    page = StatusPage(path, generation=7)
    page.phase, page.stage, page.step, page.snapshot, page.longest, page.note = UPDATING, SECURED, 12, 11, 0.25, b"eval"
    page.progress = time.monotonic_ns()
    page.write()
    seen = read_status(path)
    assert (seen.pid, seen.generation, seen.phase, seen.stage) == (os.getpid(), 7, UPDATING, SECURED)
    assert (seen.step, seen.snapshot, seen.secured, seen.longest, seen.note) == (12, 11, -1, 0.25, "eval")
    assert 0 <= seen.age < 5
    assert path.stat().st_size == 4096 and not list(tmp_path.glob(".*"))


def _write_for_ever(path: Path) -> None:
    page = StatusPage(path, 1)
    for number in range(10**9):
        page.phase = STABLE
        page.step = page.snapshot = page.secured = page.progress = number
        page.longest = float(number)
        page.write()


def test_no_look_sees_two_writes_mixed_and_none_is_lost_by_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "page"
    process = multiprocessing.get_context("spawn").Process(target=_write_for_ever, args=(path,))
    process.start()
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    reader, steps = StatusReader(path), []
    while len(set(steps)) < 300 and time.monotonic() < deadline:
        seen = reader.read()
        assert seen.step == seen.snapshot == seen.secured == seen.longest
        steps.append(seen.step)
    assert steps == sorted(steps) and len(set(steps)) >= 300
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    left = read_status(path)
    assert left.step == left.snapshot == left.secured == left.progress and left.step >= steps[-1]


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(b"x" * 4096)
    with pytest.raises(FormatError, match="not a status page"):
        read_status(path)
    path.write_bytes(b"short")
    with pytest.raises(FormatError):
        read_status(path)
    with pytest.raises(FileNotFoundError):
        read_status(tmp_path / "none")


def test_a_truncated_page_ends_nobody_and_is_mended_by_its_owners_next_write(tmp_path: Path) -> None:
    path = tmp_path / "page"
    page = StatusPage(path, 1)
    reader = StatusReader(path)
    for size in (0, 10, 70):
        os.truncate(path, size)
        with pytest.raises(FormatError, match="not a status page"):
            reader.read()
        page.step = size
        page.write()
        assert reader.read().step == read_status(path).step == size
