"""Checkpoints that stay on storage whatever retention says: asked for by a script, by a person, and let go again."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

import rekindle
from rekindle.agent.drain import Drainer
from rekindle.cli.main import main
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import MANIFEST
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.slots import Slots
from rekindle.storage import disk
from rekindle.storage.posix import PosixStore
from tests.conftest import commit, make_shard
from tests.faults.harness import wait_for
from tests.stored import START, job_in, save, steps_on

FIRST = Incarnation(1, "a" * 16)


def pinned(root: Path) -> list[int]:
    return [entry.stamp.step for entry in PosixStore(root).published() if entry.pinned]


def test_what_a_script_waited_for_or_pinned_stays(root: Path, memory: Path) -> None:
    values = rekindle.Values(x=0)
    ckpt = rekindle.Checkpointer(root, {"values": values}, keep=1)
    for step in (1, 2):
        ckpt.save(step, wait="durable", timeout=60)
    ckpt.save(3, wait="durable", timeout=60, pin=False)
    for step in range(4, 8):
        ckpt.save(step, pin=step == 5)  # nobody waits for it, and newer ones come at once
    ckpt.step(8)
    ckpt.save(8, pin=True)  # is in memory already, without
    wait_for(lambda: pinned(root) == [1, 2, 5, 8], what="pins")
    ckpt.save(9, wait="durable", timeout=60, pin=False)
    wait_for(lambda: steps_on(root) == [1, 2, 5, 8, 9], what="retention")
    assert [(one.step, one.pinned) for one in ckpt.checkpoints() if one.durable][:3] == [
        (9, False),
        (8, True),
        (5, True),
    ]
    ckpt.unpin(2)
    with pytest.raises(rekindle.NotFoundError, match="no checkpoint of step 3"):
        ckpt.unpin(3)
    ckpt.close(timeout=60)

    again = rekindle.Checkpointer(root, {"values": values}, keep=1)
    assert again.restore() == 9
    again.save(9, pin=True)  # it was restored, and is on storage
    assert pinned(root) == [1, 5, 8, 9]
    again.save(10, wait="durable", timeout=60)
    wait_for(lambda: steps_on(root) == [1, 5, 8, 9, 10], what="retention after a restart")
    again.close(timeout=60)


def test_pinned_saves_that_nobody_waits_for_all_stay(root: Path, memory: Path) -> None:
    values = rekindle.Values(x=0)
    ckpt = rekindle.Checkpointer(root, {"values": values}, keep=1)
    ckpt.save(1, wait="durable", timeout=60, pin=False)
    agent = JobDir.of(root, memory_base()).agent()
    assert agent is not None
    os.kill(agent, signal.SIGSTOP)
    try:
        ckpt.save(2, pin=True)
        with pytest.raises(rekindle.NotDurableError, match=r"step 3 is saved, but .* step 2.* not on storage"):
            ckpt.save(3, pin=True, timeout=0.0)
        for step in range(4, 9):  # training goes on, and step 2 stays in memory
            ckpt.save(step)
    finally:
        os.kill(agent, signal.SIGCONT)
    for step in range(9, 13):
        ckpt.save(step, pin=True, timeout=60)
    for step in range(13, 19):
        ckpt.step(step)
    ckpt.close(timeout=60)
    assert pinned(root) == [2, 9, 10, 11, 12] and steps_on(root) == [2, 9, 10, 11, 12, 18]


def test_without_memory_pins_are_the_same(root: Path, memory: Path) -> None:
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(x=0)}, memory="/proc/none", keep=1)
    for step in range(1, 5):
        ckpt.save(step, pin=step == 2)
    ckpt.save(4, pin=True)  # is on its way there, without
    assert pinned(root) == [2, 4]
    ckpt.close(timeout=60)
    assert steps_on(root) == [2, 4]


@pytest.mark.parametrize("asked", ["before the drain", "during the drain"])
def test_a_pin_is_there_with_the_checkpoint(
    asked: str, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobDir.of(root, memory_base())
    job.create()
    job.write_job(JobInfo(str(root), [0], 1, 1, None, 600.0))
    slots = Slots(job, 0, 1, [0])
    stamp = ShardId(1, 0, 1, FIRST, pinned=asked == "before the drain")
    receipt, data = make_shard(stamp, {"x": b"x" * 1000})
    commit(slots, receipt, data)
    write = PosixStore.write_shard

    def meanwhile(self: PosixStore, *args: object) -> None:
        write(self, *args)  # type: ignore[arg-type]
        if asked == "during the drain":
            wanted = ShardId(1, 0, 1, FIRST, pinned=True)
            slots.write_receipt(wanted, receipt.with_stamp(wanted))

    monkeypatch.setattr(PosixStore, "write_shard", meanwhile)
    assert Drainer(job).tick() and pinned(root) == [1]
    slots.close()


def test_people_pin_unpin_and_prune(root: Path, memory: Path) -> None:
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(x=0)}, keep=9)
    for step in range(1, 6):
        ckpt.save(step, wait="durable", timeout=60, pin=False)
    ckpt.close(timeout=60)

    def ask(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, [arguments[0], str(root), *arguments[1:]])
        assert result.exit_code == code, result.output
        return str(result.output)

    ask("pin", "2")
    ask("pin", "4")
    assert "pinned" in ask("ls")
    assert [one["step"] for one in json.loads(ask("ls", "--json")) if one["pinned"]] == [4, 2]
    assert "no checkpoint of step 7" in ask("pin", "7", code=3)
    assert "no checkpoint of step 7" in ask("unpin", "7", code=3)
    assert "1, 3" in ask("prune", "--keep", "1", "--dry-run") and steps_on(root) == [1, 2, 3, 4, 5]
    assert json.loads(ask("prune", "--keep", "1", "--json")) == {"removed": [1, 3], "left": [2, 4, 5]}
    ask("unpin", "4")
    assert "nothing" in ask("prune") and steps_on(root) == [2, 4, 5], "of all ages"
    ask("prune", "--keep", "1")
    assert steps_on(root) == [2, 5]
    shutil.rmtree(root)
    ask("prune", code=3)


@pytest.mark.parametrize(
    ("keep", "keep_every", "left", "told"),
    [
        (10, None, [*range(3, 13)], "keep=10\n"),
        (None, 4, [4, 8, 11, 12], "keep_every=4\n"),
        (1, 6, [6, 12], "keep=1 and keep_every=6\n"),
        (None, None, [1, 5, 9, 11, 12], "the default, by which the newest two"),
    ],
)
def test_prune_keeps_what_the_job_keeps(
    keep: int | None, keep_every: int | None, left: list[int], told: str, root: Path, tmp_path: Path
) -> None:
    job = job_in(tmp_path / "memory", root)
    job.write_job(JobInfo(str(root), [0], 1, keep, keep_every, 900.0))
    for step in range(1, 13):
        save(root, step)
    result = CliRunner().invoke(main, ["prune", str(root), "--memory", str(tmp_path / "memory"), "--json"])
    assert result.exit_code == 0, result.output
    assert steps_on(root) == json.loads(result.stdout)["left"] == left
    assert told in result.stderr and "The job's own settings decide" in result.stderr


def test_prune_tells_that_it_does_not_know_the_job(root: Path, memory: Path) -> None:
    for step in range(1, 13):
        save(root, step)
    result = CliRunner().invoke(main, ["prune", str(root), "--dry-run"])
    assert "has no settings of a job" in result.stderr and "the default decides" in result.stderr
    job_in(memory, root).paths.job.write_text("damaged")
    assert "has no settings of a job" in CliRunner().invoke(main, ["prune", str(root), "--dry-run"]).stderr
    job_in(memory, root)
    assert not CliRunner().invoke(main, ["prune", str(root), "--keep", "3", "--dry-run"]).stderr
    assert len(steps_on(root)) == 12


def test_prune_believes_no_job_of_somebody_else(root: Path, memory: Path) -> None:
    job = job_in(memory, root)
    save(root, 1)
    job.path.parent.chmod(0o777)
    result = CliRunner().invoke(main, ["prune", str(root)])
    assert result.exit_code == rekindle.MemoryStoreError.exit_code and "is open to others" in result.stderr


def test_a_restore_that_loads_nothing_costs_no_checkpoint(root: Path, memory: Path) -> None:
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(x=0)}, keep=2)
    for step in (1, 2):
        ckpt.save(step, wait="durable", timeout=60, pin=False)
    ckpt.close(timeout=60)
    other = rekindle.Checkpointer(root, {"other": rekindle.Values(y=0)}, keep=1, rng=False)
    with pytest.raises(rekindle.StateMismatchError, match="nothing of 'other' can be loaded"):
        other.restore(partial=True)
    with pytest.raises(rekindle.UsageError, match="call restore"):
        other.step(3)
    other.close(timeout=60)
    assert steps_on(root) == [1, 2]


def test_a_pin_that_meets_a_removal_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest goes first, and between the look and the pin: a pin that is reported must hold something."""
    manifest, create = save(root, 1) / MANIFEST, disk.create

    def create_late(path: Path, *mode: int) -> int:
        manifest.unlink()
        return create(path, *mode)

    monkeypatch.setattr(disk, "create", create_late)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint of step 1"):
        PosixStore(root).pin(ShardId(1, 0, 1, START))
