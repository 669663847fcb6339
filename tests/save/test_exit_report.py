"""``with rekindle.Checkpointer(...) as ckpt:``: a clean end closes, an exception lets go and says what is where."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import rekindle
from rekindle.memory.job_dir import JobDir, memory_base
from tests import forked
from tests.faults.harness import wait_for
from tests.test_checkpointer import Training, go


def told(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("left by ")]
    return line


def test_a_clean_end_waits_until_the_newest_step_is_on_storage(root: Path, memory: Path) -> None:
    training = Training()
    with rekindle.Checkpointer(root, training.state) as ckpt:
        assert ckpt.restore() == 0
        go(ckpt, training, 1, 3)
    assert next(c.step for c in ckpt.checkpoints() if c.durable) == 3
    wait_for(lambda: not JobDir.of(root, memory_base()).path.exists(), what="memory to be given back")


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_exception_lets_go_without_waiting_and_says_what_is_where(
    error: type[BaseException], root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    with pytest.raises(error), rekindle.Checkpointer(root, training.state, persist_every=2) as ckpt:
        ckpt.restore()
        go(ckpt, training, 1, 2)
        ckpt.save(2, wait="durable", timeout=60)
        go(ckpt, training, 3, 3)
        raise error
    assert told(caplog) == (
        f"left by {error.__name__}, without waiting for storage: step 3 is in this node's memory, and the agent "
        "carries it to storage; step 2 is on storage"
    )
    again = Training()
    with rekindle.Checkpointer(root, again.state) as ckpt:  # though the first one is alive, and its traceback is
        assert ckpt.restore() == 3 and ckpt.metrics.restored_from == "memory"
        assert again.progress.epoch == 3


def test_storage_that_takes_nothing_keeps_nobody_who_leaves(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    with pytest.raises(RuntimeError), rekindle.Checkpointer(root, training.state) as ckpt:
        ckpt.restore()
        root.write_text("a file where the directory should be")
        go(ckpt, training, 1, 1)
        began = time.monotonic()
        raise RuntimeError
    assert time.monotonic() - began < 60, "close() would wait for 600 s"
    assert "step 1 is in this node's memory" in told(caplog) and "storage can't be read now" in told(caplog)


def test_without_anything_saved_that_is_what_is_said(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError), rekindle.Checkpointer(root, Training().state):
        raise RuntimeError
    assert told(caplog).endswith("without waiting for storage: nothing is on storage")


def test_without_memory_the_end_of_the_process_waits_for_what_is_being_written(root: Path, memory: Path) -> None:
    code = (
        "import sys, time, torch, rekindle\n"
        "from rekindle.storage.posix import PosixStore\n"
        "write = PosixStore.write_shard\n"
        "PosixStore.write_shard = lambda *args: (time.sleep(0.5), write(*args))[1]\n"
        "with rekindle.Checkpointer(sys.argv[1], {'model': torch.nn.Linear(2, 2)}, memory_limit=1) as ckpt:\n"
        "    ckpt.restore(); ckpt.step(1)\n"
        "    raise SystemExit(3)\n"
    )
    done = forked.run(forked.Code(code), root, timeout=100)
    assert done.returncode == 3
    assert "left by SystemExit" in done.stderr and "still writing to storage, and waits for that" in done.stderr
    assert (root / "step-0000000001" / "checkpoint.json").exists()
