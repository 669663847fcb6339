"""Threads that do work in order, and don't keep a process from ending."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from rekindle.common.workers import Workers

SOON = 20.0


def test_one_thread_does_all_in_order() -> None:
    workers, done = Workers(1, "test-order"), list[int]()
    for number in range(100):
        last = workers.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    last.result(SOON)
    assert done == list(range(100))
    workers.close()


def test_work_is_done_at_once_by_as_many_threads() -> None:
    workers, meet = Workers(3, "test-many"), threading.Barrier(3)
    for future in [workers.submit(lambda: meet.wait(SOON)) for _ in range(3)]:
        future.result(SOON)
    workers.close()


def test_what_goes_wrong_is_the_future_s_and_the_thread_goes_on() -> None:
    workers = Workers(1, "test-error")
    with pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 // 0).result(SOON)
    assert workers.submit(lambda: 7).result(SOON) == 7
    workers.close()


def test_close_waits_for_what_was_submitted() -> None:
    workers, go, done = Workers(1, "test-close"), threading.Event(), list[int]()
    workers.submit(lambda: go.wait(SOON))
    workers.submit(lambda: done.append(1))
    go.set()
    workers.close()
    assert done == [1] and not any(thread.is_alive() for thread in workers._threads)
    with pytest.raises(RuntimeError, match="after the end"):
        workers.submit(lambda: None)


def test_threads_end_with_their_owner() -> None:
    workers = Workers(2, "test-forgotten")
    workers.submit(lambda: None).result(SOON)
    threads = list(workers._threads)
    del workers
    gc.collect()
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)


def test_the_end_of_a_process_waits_for_work() -> None:
    ended = run(
        "import time\n"
        "from rekindle.common.workers import Workers\n"
        "workers = Workers(1, 'w')\n"
        "workers.submit(lambda: (time.sleep(1), print('done', flush=True)))\n"
        "raise SystemExit(3)\n"
    )
    assert ended.returncode == 3 and ended.stdout == "done\n"


def test_work_that_waits_sees_the_process_end() -> None:
    ended = run(
        "import time\n"
        "from rekindle.common.workers import Workers, ending\n"
        "def wait():\n"
        "    while not ending():\n"
        "        time.sleep(0.01)\n"
        "    print('seen', flush=True)\n"
        "workers = Workers(1, 'w')\n"
        "workers.submit(wait)\n"
        "raise ValueError\n"
    )
    assert ended.returncode == 1 and ended.stdout == "seen\n"


def test_the_end_of_a_process_that_was_interrupted_while_a_thread_started() -> None:
    """The interrupt comes once the thread runs, as the starting one waits for it."""
    ended = run(
        "import sys, threading\n"
        "from rekindle.common.workers import Workers\n"
        "def interrupt(frame, event, arg):\n"
        "    if frame.f_code is threading.Event.wait.__code__:\n"
        "        raise KeyboardInterrupt\n"
        "workers, go = Workers(3, 'w'), threading.Event()\n"
        "workers.submit(go.wait)\n"
        "sys.settrace(interrupt)\n"
        "try:\n"
        "    workers.submit(go.wait)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
        "sys.settrace(None)\n"
        "workers.submit(go.wait)\n"
        "go.set()\n"
        "raise SystemExit(3)\n"
    )
    assert ended.returncode == 3 and ended.stdout == "interrupted\n", ended.stderr


def test_work_goes_on_after_an_interrupt_before_a_thread_started() -> None:
    ended = run(
        "import sys, threading\n"
        "from rekindle.common.workers import Workers\n"
        "def interrupt(frame, event, arg):\n"
        "    if frame.f_code is threading.Thread.start.__code__:\n"
        "        raise KeyboardInterrupt\n"
        "workers = Workers(1, 'w')\n"
        "sys.settrace(interrupt)\n"
        "try:\n"
        "    workers.submit(lambda: None)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
        "sys.settrace(None)\n"
        "print(workers.submit(lambda: 'done').result(60), flush=True)\n"
    )
    assert ended.returncode == 0 and ended.stdout == "interrupted\ndone\n", ended.stderr


@pytest.mark.parametrize(("where", "done"), [("parent", "done\n"), ("child", "done\nparent\n")])
def test_the_end_of_a_forked_child_waits_for_its_own_work_only(where: str, done: str) -> None:
    """The import and the parent's threads are before the fork."""
    ended = run(
        "import os, sys, time\n"
        "from rekindle.common.workers import Workers\n"
        "def work():\n"
        "    time.sleep(1)\n"
        "    print('done', flush=True)\n"
        "workers = Workers(1, 'parent')\n"
        "workers.submit(lambda: None).result()\n"
        f"in_child = {where == 'child'}\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    if in_child:\n"
        "        own = Workers(1, 'child')\n"
        "        own.submit(work)\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "if in_child:\n"
        "    print('parent', flush=True)\n"
        "else:\n"
        "    workers.submit(work)\n"
    )
    assert ended.returncode == 0 and ended.stdout == done, ended.stderr
