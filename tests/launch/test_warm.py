"""The launcher's side of warm workers, in this process: how it keeps a spare, and where it does without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.launch import warm
from rekindle.launch.warm import WarmWorkers, warm_workers

COMMAND = [sys.executable, "-u", "-c", "raise SystemExit('the script itself has run')"]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def workers(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmWorkers]:
    monkeypatch.setattr(warm, "_REPLACED_WITHIN", 0.06)
    workers = WarmWorkers(tmp_path, tmp_path, said.append)
    yield workers
    workers.close()


def begin(workers: WarmWorkers, command: list[str] = COMMAND) -> None:
    """A first start, which is always cold."""
    assert workers.start(0, command, dict(os.environ), [0, 1, 2]) is None


def next_spare(workers: WarmWorkers, after: int = 0) -> int:
    """Process id of the spare that comes after another one."""
    pause = threading.Event()
    for _ in range(6000):
        workers.tend()
        if workers._spare is not None and workers._spare.pid != after:
            return workers._spare.pid
        pause.wait(0.01)
    raise AssertionError("no spare is started")


def kill(workers: WarmWorkers) -> int:
    spare = next_spare(workers)
    os.kill(spare, signal.SIGKILL)
    os.waitid(os.P_PID, spare, os.WEXITED | os.WNOWAIT)
    return spare


def test_a_spare_that_is_killed_time_and_again_is_given_up_until_the_next_restart(
    workers: WarmWorkers, said: list[str]
) -> None:
    begin(workers)
    for _ in range(3):
        next_spare(workers, after=kill(workers))
    kill(workers)
    workers.tend()
    assert [line.partition(": ")[2] for line in said] == [
        *["restarts are cold until another one is ready"] * 3,
        "4 times in a row, so the next restart is cold",
    ]
    assert all(line.startswith("the spare process was killed by SIGKILL: ") for line in said)
    workers.tend()
    assert workers._spare is None
    begin(workers)
    next_spare(workers)


def test_a_spare_that_can_not_be_started_costs_a_line(
    workers: WarmWorkers, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    begin(workers)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        before = len(os.listdir("/proc/self/fd"))
        workers.tend()
        assert len(os.listdir("/proc/self/fd")) == before
    assert len(said) == 1 and said[0].startswith("the spare process can't be started: Resource temporarily unavailable")
    next_spare(workers)


def test_another_interpreter_has_no_spare(workers: WarmWorkers, said: list[str]) -> None:
    begin(workers, ["/bin/sh", "-c", "true"])
    workers.tend()
    assert workers._spare is None and not said


@pytest.mark.parametrize("missing", ["function", "module", "method"])
def test_a_torch_that_starts_workers_in_another_way_starts_them_cold(
    missing: str, workers: WarmWorkers, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.elastic.multiprocessing.api as api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    if missing == "function":
        monkeypatch.delattr(api, "get_subprocess_handler")
    elif missing == "module":
        monkeypatch.setitem(sys.modules, SubprocessHandler.__module__.rpartition(".")[0], None)
    else:
        monkeypatch.delattr(SubprocessHandler, "_popen")
    before = vars(api).copy()
    with warm_workers(workers) as tend:
        tend()
        assert vars(api) == before
    assert len(said) == 1 and said[0].startswith("restarts are cold: torch ")


def test_threads_are_noticed_where_warnings_are_errors() -> None:
    """Python warns of a fork beside threads from 3.12 on; here every version does."""
    code = (
        "import _thread, os, warnings\n"
        "plain = os.fork\n"
        "def fork():\n"
        "    pid = plain()\n"
        "    if pid: warnings.warn('the process is multi-threaded', DeprecationWarning, stacklevel=2)\n"
        "    return pid\n"
        "os.fork = fork\n"
        "from rekindle.launch.preload import _has_threads\n"
        "assert not _has_threads()\n"
        "lock = _thread.allocate_lock()\n"
        "lock.acquire()\n"
        "_thread.start_new_thread(lock.acquire, ())\n"
        "assert _has_threads()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=100)
