"""Two Checkpointers of one root in one process, as when a notebook's cell runs again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rekindle
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.session import session
from tests.faults.harness import wait_for
from tests.test_checkpointer import Training, go


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test here waits for its own process to die."""
    monkeypatch.setattr(session, "_DYING", 600.0)
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 150


def test_a_cell_that_runs_again_goes_on_where_it_was(root: Path, memory: Path) -> None:
    training = Training()
    first = rekindle.Checkpointer(root, training.state, persist_every=1000)
    first.restore()
    go(first, training, 1, 3)
    again = Training()
    ckpt = rekindle.Checkpointer(root, again.state, persist_every=1000)
    assert ckpt.restore() == 3 and ckpt.metrics.restored_from == "memory"
    for use in (lambda: first.step(4), lambda: first.save(4), first.restore, first.guard, first.close):
        with pytest.raises(rekindle.UsageError, match=r"gave way to a later one of this process .* make a new one"):
            use()
    go(ckpt, again, 4, 5)
    ckpt.close()
    assert next(c.step for c in ckpt.checkpoints()) == 5
    hooks = [len(one.optimizer._optimizer_step_pre_hooks) for one in (training, again)]
    assert hooks == [0, 0]


def test_one_that_took_over_and_saved_nothing_gives_memory_back(root: Path, memory: Path) -> None:
    training = Training()
    first = rekindle.Checkpointer(root, training.state)
    first.restore()
    go(first, training, 1, 5)
    ckpt = rekindle.Checkpointer(root, Training().state)
    assert ckpt.restore() == 5
    ckpt.close()
    assert (root / "step-0000000005").exists()
    assert not JobDir.of(root, memory_base()).path.exists()


def test_after_an_exception_the_next_one_just_works(root: Path, memory: Path) -> None:
    kept = []
    for number in (1, 2, 3):
        training = Training()
        try:
            ckpt = rekindle.Checkpointer(root, training.state)
            assert ckpt.restore() == number - 1
            with ckpt.guard(watchdog=False):
                go(ckpt, training, number, number)
                raise ZeroDivisionError
        except ZeroDivisionError as error:
            kept.append(error)  # as sys.last_exc does
    rekindle.Checkpointer(root, Training().state).close()


def test_one_that_was_refused_when_it_was_made_keeps_no_place(root: Path, memory: Path) -> None:
    with pytest.raises(rekindle.MemoryStoreError) as kept:
        rekindle.Checkpointer(root, Training().state, strict=True, memory_limit=1)
    code = "import sys, torch, rekindle\nrekindle.Checkpointer(sys.argv[1], {'m': torch.nn.Linear(1, 1)}).close()"
    done = subprocess.run([sys.executable, "-c", code, str(root)], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0 and "waiting" not in done.stderr, done.stderr
    assert kept.value


def test_inside_of_guard_nothing_is_taken_away(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    ckpt.restore()
    with ckpt.guard(watchdog=False):
        go(ckpt, training, 1, 1)
        with pytest.raises(rekindle.BusyError, match=r"earlier Checkpointer of this process is inside of guard\(\)"):
            rekindle.Checkpointer(root, Training().state)
        go(ckpt, training, 2, 2)
    ckpt.close()
    assert next(c.step for c in ckpt.checkpoints()) == 2


def test_without_memory_the_later_one_finds_what_the_earlier_one_was_writing(root: Path, memory: Path) -> None:
    training = Training()
    first = rekindle.Checkpointer(root, training.state, memory_limit=1, persist_every=1)
    first.restore()
    go(first, training, 1, 2)
    ckpt = rekindle.Checkpointer(root, Training().state, memory_limit=1)
    assert ckpt.restore() == 2
    ckpt.close()


def test_a_lock_of_this_process_that_nobody_gives_back_is_called_that(root: Path, memory: Path) -> None:
    lock = JobDir.of(root, memory_base()).lock_rank(0, 1.0)
    with pytest.raises(
        rekindle.BusyError, match=f"process {os.getpid()}, which is this one, trains rank 0 of this root already"
    ):
        rekindle.Checkpointer(root, Training().state)
    lock.release()


def test_a_forked_child_takes_nothing_over_from_its_parent(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    ckpt.restore()
    go(ckpt, training, 1, 1)
    child = os.fork()
    if child == 0:
        try:
            ckpt._give_way()
            assert ckpt._session.lock is not None
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    go(ckpt, training, 2, 2)
    ckpt.close()
    wait_for(lambda: not JobDir.of(root, memory_base()).path.exists(), what="memory to be given back")
