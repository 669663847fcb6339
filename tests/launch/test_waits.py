"""The waits of torchrun's agent that are shortened: with real child processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.launch.waits import wait_for_ends
from tests import forked

LONG = 150.0
"""Seconds that no wait here may take."""


def test_the_launcher_notices_an_end_long_before_it_would_look(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(7)")
    options = [f"--monitor-interval={10 * LONG}", "--max-restarts=0", "--no-warm"]
    done = forked.run("rekindle", "run", "--standalone", *options, script, timeout=LONG)
    assert done.returncode == 1 and "ended with exit code 7" in done.stderr, done.stderr


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that end when they are killed."""
    started = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    yield started
    for child in started:
        child.kill()
        child.communicate()


def seconds(children: list[subprocess.Popen[bytes]], limit: float) -> float:
    began = time.monotonic()
    wait_for_ends([child.pid for child in children], limit)
    return time.monotonic() - began


def test_the_wait_ends_with_the_last_process(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.kill()
    assert seconds(children, LONG) < LONG
    assert all(child.poll() is not None for child in children)


def test_a_process_that_outlives_another_gets_time_to_end_by_itself(children: list[subprocess.Popen[bytes]]) -> None:
    children[0].kill()
    threading.Timer(0.3, children[1].kill).start()
    assert seconds(children, LONG) < LONG
    assert children[1].poll() is not None


def test_the_wait_is_given_up_where_none_ends_or_not_all_do(children: list[subprocess.Popen[bytes]]) -> None:
    assert 0.1 <= seconds(children, 0.1) < LONG
    children[0].kill()
    assert 0.1 <= seconds(children, 0.1) < LONG
    assert children[1].poll() is None


def test_a_process_that_torchrun_has_waited_for_is_none_that_ends(children: list[subprocess.Popen[bytes]]) -> None:
    children[0].kill()
    children[0].wait()
    assert 0.1 <= seconds(children, 0.1) < LONG
    children[1].kill()
    children[1].wait()
    assert 0.1 <= seconds(children, 0.1) < LONG
