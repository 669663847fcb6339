"""The public surface, used as a trainer uses it."""

from __future__ import annotations

import errno
import gc
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.save import saver
from rekindle.storage.catalog import list_checkpoints
from rekindle.storage.posix import PosixStore
from tests import forked
from tests.faults.harness import wait_for


class Training:
    """A model in training, without randomness."""

    def __init__(self, width: int = 8) -> None:
        self.model = torch.nn.Linear(width, width, bias=False)
        torch.nn.init.eye_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.progress = rekindle.Values(epoch=0)

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, self.model.in_features)).sum().backward()
        self.optimizer.step()
        self.progress.epoch += 1


def go(ckpt: rekindle.Checkpointer, training: Training, first: int, last: int) -> None:
    for step in range(first, last + 1):
        training.update()
        ckpt.step(step)


def test_save_close_and_restore(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    assert ckpt.restore() == 0
    assert ckpt.latest() is None
    go(ckpt, training, 1, 3)
    ckpt.close()
    ckpt.close()
    again = Training()
    ckpt = rekindle.Checkpointer(f"file://{root}", again.state)
    assert ckpt.restore() == 3
    assert torch.equal(again.model.weight, training.model.weight)
    assert again.progress.epoch == 3
    latest = ckpt.latest()
    assert latest is not None and latest.durable and latest.step == 3
    ckpt.close()


def test_snapshot_and_persist_intervals(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, snapshot_every=2, persist_every=4, keep=9)
    ckpt.restore()
    for step in range(1, 13):
        training.update()
        ckpt.step(step)
        if step % 4 == 0:
            wait_for(lambda step=step: (root / f"step-{step:010d}").exists(), what=f"step {step} on storage")
    assert ckpt.metrics.saves == 6
    assert {c.step for c in ckpt.checkpoints() if c.durable} == {4, 8, 12}
    ckpt.close()


def test_retention_keeps_the_newest_and_milestones(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, keep=2, keep_every=5)
    ckpt.restore()
    for step in range(1, 13):
        training.update()
        ckpt.save(step, wait="durable", timeout=30, pin=False)
    ckpt.close()
    wait_for(lambda: sorted(int(p.name[5:]) for p in root.glob("step-*")) == [5, 10, 11, 12], what="retention")


def test_wait_durable_upgrades_a_snapshot_that_policy_left_in_memory(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=1000)
    ckpt.restore()
    go(ckpt, training, 1, 2)
    assert not root.exists() or not list(root.iterdir())
    ckpt.save(2, wait="durable", timeout=30)
    latest = ckpt.latest()
    assert latest is not None and latest.step == 2 and latest.durable
    ckpt.close()


def test_a_checkpoint_that_cannot_become_durable_is_not_reported_saved(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    ckpt.restore()
    root.write_text("a file where the directory should be")
    training.update()
    with pytest.raises(rekindle.NotDurableError, match="step 1 is not on storage"):
        ckpt.save(1, wait="durable", timeout=1.0)
    root.unlink()
    ckpt.close(timeout=60)
    assert (root / "step-0000000001" / "checkpoint.json").exists()


def test_storage_that_cannot_be_read_does_not_pass_for_an_empty_one(root: Path, memory: Path) -> None:
    ckpt = rekindle.Checkpointer(root, Training().state)
    root.write_text("a file where the directory should be")  # later: at the start it is refused
    with pytest.raises(rekindle.NotFoundError, match="storage can't be read"):
        ckpt.restore()


def test_waiting_for_a_save_that_failed_is_an_error(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    ckpt.restore()
    ckpt.save(1, wait="durable", timeout=30)
    training.progress.lock = threading.Lock()
    for wait in ("memory", "durable"):
        with pytest.raises(rekindle.NotDurableError, match="step 2 is not saved"):
            ckpt.save(2, wait=wait, timeout=30)  # type: ignore[arg-type]
    del training.progress.__dict__["lock"]
    ckpt.close()


def test_a_look_at_a_job_takes_nothing_from_its_memory(root: Path, memory: Path) -> None:
    """A run that restores, saves nothing and closes must not drop what only memory holds: it sees it to storage."""
    from tests.faults.harness import Run, train

    dying = Run(root, memory, width=8, points={0: "save.committed@3"}, executable="/bin/false")
    assert train(Run(**{**vars(dying), "options": {"persist_every": 1000}})) == [-9]
    job = JobDir.of(root, memory_base(memory))
    options = {"persist_every": 1000, "fallback_after": 0.5}
    looking = Run(root, memory, width=8, steps=3, options=options, executable="/bin/false")
    assert list_checkpoints(job, PosixStore(root), [0])[0].places == ("memory",)
    assert train(looking) == [0]
    [kept] = list_checkpoints(job, PosixStore(root), [0])
    assert kept.step == 3 and kept.durable and not any(job.snapshots.shard_ids())


def test_restore_of_an_older_step_leaves_newer_ones_until_the_new_branch_is_durable(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, keep=5)
    ckpt.restore()
    for step in (1, 2, 3, 4):
        training.update()
        ckpt.save(step, wait="durable", timeout=30, pin=False)
    ckpt.close()
    wait_for(lambda: not JobDir.of(root, memory_base()).path.exists())
    again = Training()
    ckpt = rekindle.Checkpointer(root, again.state, keep=5)
    assert ckpt.restore(step=2) == 2
    assert again.progress.epoch == 2
    assert sorted(int(p.name[5:]) for p in root.glob("step-*")) == [1, 2, 3, 4]
    again.update()
    ckpt.save(3, wait="durable", timeout=30)
    wait_for(lambda: sorted(p.name for p in root.glob("step-*")) == [f"step-{s:010d}" for s in (1, 2, 3)])
    assert [c.generation for c in ckpt.checkpoints() if c.durable] == [2, 1, 1]
    ckpt.close()
    with pytest.raises(rekindle.NotFoundError, match="step 4"):
        rekindle.Checkpointer(root, Training().state).restore(step=4)


def test_a_run_that_forgot_to_restore_is_stopped_before_it_buries_the_old_one(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    ckpt.restore()
    go(ckpt, training, 1, 3)
    ckpt.close()
    ckpt = rekindle.Checkpointer(root, Training().state)
    with pytest.raises(rekindle.UsageError, match="call restore"):
        ckpt.step(1)
    ckpt.close()


@pytest.mark.parametrize("step", [-1, 1.0, "1", True, 10**10])
def test_steps_are_whole_numbers(step: object, root: Path, memory: Path) -> None:
    ckpt = rekindle.Checkpointer(root, Training().state)
    with pytest.raises(rekindle.UsageError):
        ckpt.save(step)  # type: ignore[arg-type]
    with pytest.raises(rekindle.UsageError):
        ckpt.step(step)  # type: ignore[arg-type]
    ckpt.close()


def test_saving_the_step_that_was_restored_is_no_error(root: Path, memory: Path) -> None:
    for _ in range(2):
        training = Training()
        ckpt = rekindle.Checkpointer(root, training.state)
        start = ckpt.restore()
        ckpt.save(start, wait="durable", timeout=30)
        ckpt.close()
    assert ckpt.metrics.saves == 0


def test_a_checkpointer_that_nobody_closed_gives_its_rank_back(root: Path, memory: Path) -> None:
    ckpt = rekindle.Checkpointer(root, Training().state)
    del ckpt
    gc.collect()
    rekindle.Checkpointer(root, Training().state).close()


def test_values_nested_too_deeply_are_refused_before_they_are_saved(root: Path, memory: Path) -> None:
    nested: list[object] = []
    for _ in range(300):
        nested = [nested]
    with pytest.raises(rekindle.UnsupportedValueError, match="nested more than"):
        rekindle.Checkpointer(root, {"values": rekindle.Values(nested=nested)})


def test_steps_grow(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    ckpt.restore()
    ckpt.step(5)
    ckpt.step(5)
    with pytest.raises(rekindle.UsageError, match="must grow"):
        ckpt.step(4)
    assert ckpt.metrics.saves == 1
    ckpt.close()
    with pytest.raises(rekindle.UsageError, match="closed"):
        ckpt.step(6)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"snapshot_every": 0}, {"persist_every": -1}, {"keep": 0}, {"keep": True}, {"keep": 1 << 63}),
        *({"keep_every": 0.5}, {"idle_timeout": -1}, {"idle_timeout": "10"}, {"fallback_after": math.nan}),
    ],
)
def test_arguments_that_make_no_sense(wrong: dict[str, object], root: Path, memory: Path) -> None:
    with pytest.raises(rekindle.UsageError, match=next(iter(wrong))):
        rekindle.Checkpointer(root, Training().state, **wrong)  # type: ignore[arg-type]


def test_roots_that_are_not_directories(memory: Path) -> None:
    for root in ("s3://", "http://host/run", "file://host/run", "file:///x/run#1", "file:///x/run?1", ""):
        with pytest.raises(rekindle.UsageError, match="root"):
            rekindle.Checkpointer(root, Training().state)


def test_a_place_inside_of_a_root_is_no_root(root: Path, memory: Path) -> None:
    """Else who gives a step's directory, to go on from it, would begin anew in there without a word."""
    for place in (root / "step-0000000100", root / "step-0000000100" / "checkpoint.json"):
        with pytest.raises(rekindle.UsageError, match=f"lies inside the root {root}, in its step 100: give that root"):
            rekindle.Checkpointer(place, {"values": rekindle.Values()})
    assert not root.exists()


def test_state_without_state_dict_is_refused_by_name(root: Path, memory: Path) -> None:
    with pytest.raises(rekindle.UsageError, match="epoch"):
        rekindle.Checkpointer(root, {"epoch": 3})


def test_a_second_trainer_of_the_same_rank_is_refused(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rekindle.session.session._SOON", 0.0)
    monkeypatch.setattr("rekindle.session.session._DYING", 0.2)
    code = (
        "import sys, torch, rekindle\n"
        "ckpt = rekindle.Checkpointer(sys.argv[1], {'model': torch.nn.Linear(2, 2)})\n"
        "print('there', flush=True); open(sys.argv[2]).read(); ckpt.close()\n"
    )
    go_on = root.with_name("go_on")
    os.mkfifo(go_on)
    other = forked.Program(forked.Code(code), root, go_on)
    assert other.stdout is not None and other.stdout.readline() == "there\n"
    with pytest.raises(rekindle.BusyError, match=f"process {other.pid} on this node: end it, or"):
        rekindle.Checkpointer(root, Training().state)
    assert f"process {other.pid} on this node; waiting 0 s for it to end" in caplog.text
    go_on.open("w").close()
    other.communicate(timeout=100)
    assert other.returncode == 0


def test_ranks_without_a_process_group_are_refused(root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(rekindle.UsageError, match="init_process_group"):
        rekindle.Checkpointer(root, Training().state)


def test_a_failing_save_warns_and_strict_raises(
    root: Path, tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for strict in (False, True):
        training = Training()
        ckpt = rekindle.Checkpointer(tmp_path / str(strict), training.state, strict=strict)
        ckpt.restore()
        go(ckpt, training, 1, 1)
        training.progress.lock = threading.Lock()
        if strict:
            with pytest.raises(rekindle.UnsupportedValueError, match=r"progress\.lock"):
                ckpt.step(2)
        else:
            ckpt.step(2)
            assert "progress.lock" in caplog.text
        assert ckpt.metrics.failed == 1
        del training.progress.__dict__["lock"]
        ckpt.step(3)
        ckpt.close()
        assert next(c.step for c in ckpt.checkpoints()) == 3


def test_memory_is_given_back_after_close_and_no_agent_stays(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    ckpt.restore()
    go(ckpt, training, 1, 2)
    ckpt.close()
    wait_for(lambda: not JobDir.of(root, memory_base()).path.exists(), what="the job's memory to be given back")


def test_plain_torchrun_is_warned_of_its_shared_store(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    rekindle.Checkpointer(root, Training().state).close()
    assert caplog.text.count("rekindle run") == 1
    caplog.clear()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # as torchrun says when it is told not to share
    rekindle.Checkpointer(root, Training().state).close()
    assert "rekindle run" not in caplog.text


def test_restore_by_a_world_of_another_size(root: Path, memory: Path) -> None:
    """State is whole on every rank, so any number of ranks can read what any number wrote."""
    from tests.faults.harness import Run, restored, train

    assert train(Run(root, memory, steps=3, world=2)) == [0, 0]
    assert train(Run(root, memory, steps=4, world=1)) == [0]
    assert restored(Run(root, memory))[-1] == 3
    assert train(Run(root, memory, steps=5, world=3)) == [0, 0, 0]
    assert [restored(Run(root, memory), rank)[-1] for rank in range(3)] == [4, 4, 4]


def test_memory_of_ranks_that_are_no_more_is_given_back(root: Path, memory: Path) -> None:
    from tests.faults.harness import Run, finish, kill, start, train

    assert train(Run(root, memory, world=2, points={0: "save.committed@3"}))[0] == -9
    job = JobDir.of(root, memory_base(memory))
    assert job.snapshots.rank_files(1)
    processes = start(Run(root, memory, world=1, steps=1000, pause=0.05))
    wait_for(
        lambda: job.snapshots.rank_files(0) and not job.snapshots.rank_files(1),
        what="the second rank's memory to be given back",
    )
    kill(processes[0].pid or 0)
    finish(processes)


def test_nothing_of_it_needs_a_terminal_or_a_home(root: Path, memory: Path) -> None:
    code = (
        "import sys, torch, rekindle\n"
        "model = torch.nn.Linear(2, 2)\n"
        "ckpt = rekindle.Checkpointer(sys.argv[1], {'model': model})\n"
        "ckpt.restore(); ckpt.step(1); ckpt.close()\n"
    )
    env = {"PATH": os.environ["PATH"], "REKINDLE_MEMORY": str(memory)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)], env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=150
    )
    assert done.returncode == 0, done.stderr


def test_a_forked_child_that_closes_takes_nothing_from_its_parent(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=1000)
    ckpt.restore()
    go(ckpt, training, 1, 3)
    child = os.fork()
    if child == 0:
        try:
            ckpt.close(timeout=10)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [(c.step, c.places) for c in ckpt.checkpoints()] == [(3, ("memory",)), (2, ("memory",))]
    go(ckpt, training, 4, 5)
    ckpt.close(timeout=30)
    assert (ckpt.metrics.direct, ckpt.metrics.failed) == (0, 0)


def test_a_forked_child_does_not_wait_at_its_end_for_what_its_parent_writes(root: Path, memory: Path) -> None:
    code = (
        "import os, sys, threading, time, torch, rekindle\n"
        "from rekindle.storage.posix import PosixStore\n"
        "PosixStore.write_shard = lambda *args: threading.Event().wait()\n"
        "ckpt = rekindle.Checkpointer(sys.argv[1], {'model': torch.nn.Linear(2, 2)}, memory_limit=1)\n"
        "ckpt.restore(); ckpt.step(1)\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(0)\n"
        "end = time.monotonic() + 20\n"
        "while time.monotonic() < end and not os.waitpid(child, os.WNOHANG)[0]: time.sleep(0.05)\n"
        "late = time.monotonic() >= end\n"
        "if late: os.kill(child, 9)\n"
        "os._exit(late)\n"
    )
    assert forked.run(forked.Code(code), root, timeout=100).returncode == 0


@pytest.mark.parametrize("how", ["refuses", "hangs"])
@pytest.mark.parametrize("often", [{"persist_seconds": 0}, {"persist_every": 1000}])
def test_saving_the_step_that_was_restored_waits_for_no_storage(
    how: str, often: dict[str, float], root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, **often)  # type: ignore[arg-type]
    ckpt.restore()
    go(ckpt, training, 1, 3)
    ckpt._saver.secure(10)
    del ckpt
    gc.collect()
    ckpt = rekindle.Checkpointer(root, Training().state, **often)  # type: ignore[arg-type]
    assert ckpt.restore() == 3 and ckpt.metrics.restored_from == "memory"
    free = threading.Event()

    def durable(*args: object) -> bool:
        free.wait(120 if how == "hangs" else 0)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("rekindle.storage.posix.PosixStore.durable", durable)
        patch.setattr(saver, "_LOOK", 0.2)
        began = time.monotonic()
        ckpt.save(3)
        assert time.monotonic() - began < 60
        free.set()
    assert ckpt.metrics.saves == (0 if "persist_seconds" in often else 1), (
        "only what no agent would carry is saved again"
    )
    ckpt.save(3, wait="durable", timeout=30)
    ckpt.close(timeout=30)
    assert ckpt.metrics.failed == 0
