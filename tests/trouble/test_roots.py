"""Roots that are shared, deleted, linked, relative, read-only, or of another version: what docs/guide.md says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.agent.drain import Drainer
from rekindle.cli.operations import job_status
from rekindle.format.names import MANIFEST, step_dir
from rekindle.format.receipt import _PREFIX, checksum
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.listing import list_copies_within
from tests import forked
from tests.faults.harness import end_agent, wait_for
from tests.fork_server import run_and_kill
from tests.stored import newest, sound
from tests.trouble.test_fall_back import Alarms
from tests.unreadable import unreadable


def job_of(root: Path, memory: Path, **more: Any) -> tuple[rekindle.Checkpointer, torch.Tensor]:
    weights = torch.zeros(1000)
    more = {"persist_seconds": 0, "keep": 2} | more
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(weights=weights)}, memory=memory, **more)
    return ckpt, weights


def train(root: Path, memory: Path, to: int, **more: Any) -> int:
    """One start of a job. Gives the step that it went on from."""
    ckpt, weights = job_of(root, memory, **more)
    first = ckpt.restore()
    assert torch.all(ckpt._capture.state["values"].weights == first)
    weights = ckpt._capture.state["values"].weights
    for step in range(first + 1, to + 1):
        weights.fill_(step)
        ckpt.step(step)
    ckpt.close(timeout=30)
    return first


def test_an_old_step_that_cant_be_read_is_in_nobodys_way(root: Path, memory: Path) -> None:
    first, weights = job_of(root, memory / "a", keep=3)
    first.restore()
    for step in (1, 2, 3):
        weights.fill_(step)
        first.save(step, wait="durable", timeout=30, pin=False)
    first.close(timeout=30)
    with unreadable(root / step_dir(1) / MANIFEST):
        later, _ = job_of(root, memory / "b", keep=3)
        assert later.restore() == 3
        for step in (4, 5):
            later.save(step, wait="durable", timeout=30, pin=False)
        wait_for(lambda: [entry.step for entry in later.checkpoints()] == [5, 4, 3])  # it is pruned after that
        later.close(timeout=30)
        for command in ("ls", "verify"):
            done = forked.run("rekindle", command, root, "--json", timeout=100)
            assert {entry["step"]: entry["condition"] for entry in json.loads(done.stdout)}[1] == "damaged"
            assert "step-0000000001/checkpoint.json" in done.stderr + done.stdout


def test_nobody_goes_back_behind_a_newer_step_that_cant_be_read(root: Path, memory: Path) -> None:
    first, weights = job_of(root, memory / "a", keep=3)
    first.restore()
    for step in (1, 2):
        weights.fill_(step)
        first.save(step, wait="durable", timeout=30, pin=False)
    first.close(timeout=30)
    with unreadable(root / step_dir(2) / MANIFEST):
        later, _ = job_of(root, memory / "b", keep=3)
        why = r"step 2 is on storage, and can't be read: .*restore\(step=1\) goes on from step 1 on purpose"
        with pytest.raises(rekindle.NotFoundError, match=why):
            later.restore()
        assert later.restore(step=1) == 1
        later.close(timeout=30)
    again, _ = job_of(root, memory / "c", keep=3)
    assert again.restore() == 2
    again.close(timeout=30)


def test_two_jobs_at_one_root_on_different_nodes(root: Path, memory: Path) -> None:
    """Each sees storage, and not the other's memory. The later start has the root."""
    first, weights = job_of(root, memory / "a", keep=9)
    first.restore()
    weights.fill_(1)
    first.save(1, wait="durable", timeout=30)
    assert train(root, memory / "b", 3, keep=9) == 1, "it goes on from what the first one has sent to storage"
    before = sound(root)
    for step in (2, 3, 4, 5):
        first.step(step)
    job = JobDir.of(root, memory_base(memory / "a"))
    assert "end one of the two" in wait_for(job.notes.drain_error, what="an alarm")
    with pytest.raises(rekindle.NotDurableError, match="end one of the two"):
        first.close(timeout=1)
    assert sound(root) == before, "nothing of the later start is touched"


@pytest.mark.parametrize("restores", [True, False])
def test_two_jobs_at_one_root_without_memory(restores: bool, root: Path, memory: Path, alarms: Alarms) -> None:
    """What the earlier start writes would be pruned as abandoned, or as older than the other's: it is told so."""
    first, weights = job_of(root, memory / "a", memory_limit=1)
    first.restore()
    if restores:
        first.save(1, wait="durable", timeout=30)
    later, _ = job_of(root, memory / "b", memory_limit=1)
    assert later.restore() == restores
    later.save(9, wait="durable", timeout=30)
    before = sound(root)
    for step in range(2, 6):
        weights.fill_(step)
        first.step(step)
    with pytest.raises(rekindle.NotDurableError, match=r"another start of this job, generation .* end one of the two"):
        first.save(6, wait="durable", timeout=10)
    with pytest.raises(rekindle.NotDurableError, match="end one of the two"):
        first.close(timeout=1)
    assert first.metrics.failed == 4 and len([line for line in alarms() if "end one of the two" in line]) == 4
    assert sound(root) == before, "nothing of the later start is touched"
    later.save(10, wait="durable", timeout=30)
    later.close()
    assert later.metrics.failed == 0


def test_one_job_with_two_roots(root: Path, memory: Path) -> None:
    other = root.with_name("other")
    a, weights = job_of(root, memory)
    b = rekindle.Checkpointer(
        other, {"values": rekindle.Values(weights=weights)}, memory=memory, snapshot_every=2, persist_seconds=0
    )
    assert a.restore() == b.restore() == 0
    for step in range(1, 7):
        weights.fill_(step)
        a.step(step)
        b.step(step)
    a.close(timeout=30)
    b.close(timeout=30)
    assert newest(root) == newest(other) == 6


def test_a_root_that_becomes_read_only(memory: Path, mounted: Callable[..., Path]) -> None:
    disk = mounted("disk", "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    root = disk / "run"
    ckpt, weights = job_of(root, memory)
    assert ckpt.restore() == 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for step in range(1, 6):
        weights.fill_(step)
        ckpt.step(step)
    job = JobDir.of(root, memory_base(memory))
    assert "mount it writable again" in wait_for(job.notes.drain_error, what="an alarm")
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    ckpt.close(timeout=60)
    assert ckpt.metrics.failed == 0 and newest(root) == 5


def of_a_newer_version(manifest: Path) -> None:
    fields = json.loads(manifest.read_bytes())
    del fields["digest"]
    fields["version"] = "2.0"
    body = json.dumps(fields, separators=(",", ":")).encode()[1:]
    manifest.write_bytes(b'{"digest":"' + checksum(body).encode() + b'",' + body)
    assert _PREFIX.match(manifest.read_bytes())


def test_a_newer_version_of_the_format_is_refused_by_name_and_never_touched(root: Path, memory: Path) -> None:
    assert train(root, memory / "a", 3, keep=9) == 0
    assert train(root, memory / "a", 5, keep=9) == 3
    of_a_newer_version(root / "step-0000000005" / MANIFEST)
    there = {path: path.read_bytes() for path in (root / "step-0000000005").iterdir()}
    ckpt, _ = job_of(root, memory / "b", keep=1)
    with pytest.raises(
        rekindle.VersionError, match=r"step-0000000005.*version '2.0'; this Rekindle reads 1.*update it"
    ):
        ckpt.restore()
    older = newest(root)
    assert 0 < older < 5
    assert ckpt.restore(step=older) == older, "an older one on purpose"
    weights = ckpt._capture.state["values"].weights
    for step in range(older + 1, 9):
        weights.fill_(step)
        ckpt.save(step, wait="durable", timeout=30)
    ckpt.close(timeout=30)
    [kept] = [path for path in root.glob("step-0000000005*") if (path / MANIFEST).read_bytes() in there.values()]
    assert {kept / path.name: data for path, data in there.items()} == {p: p.read_bytes() for p in kept.iterdir()}
    assert newest(root) == 8


def test_a_root_with_nothing_but_a_newer_version_is_no_fresh_start(root: Path, memory: Path) -> None:
    train(root, memory / "a", 1)
    of_a_newer_version(root / "step-0000000001" / MANIFEST)
    ckpt, _ = job_of(root, memory / "b")
    with pytest.raises(rekindle.UsageError, match="call restore"):
        ckpt.step(1)
    with pytest.raises(rekindle.VersionError, match="update it"):
        ckpt.restore()
    ckpt.close()


def test_another_model_is_refused_before_anything_is_overwritten(root: Path, memory: Path) -> None:
    train(root, memory, 3)
    live = {"values": rekindle.Values(weights=torch.ones(7), more=1)}
    model = torch.nn.Linear(3, 3)
    kept = model.weight.detach().clone()
    ckpt = rekindle.Checkpointer(root, {**live, "model": model}, memory=memory, persist_seconds=0)
    with pytest.raises(rekindle.StateMismatchError, match="'model': only in the live state"):
        ckpt.restore()
    assert torch.equal(model.weight, kept)
    with pytest.raises(rekindle.StateMismatchError, match="nothing of 'model' can be loaded"):
        ckpt.restore(partial=True)
    assert live["values"].more == 1
    assert ckpt.restore(partial=["values"]) == 3 and torch.equal(model.weight, kept)
    ckpt.close(timeout=30)


@pytest.mark.parametrize("link", ["the root", "a component"])
def test_a_root_behind_a_link(link: str, tmp_path: Path, memory: Path) -> None:
    """The job is that of where the link leads. One that leads elsewhere leads to another job."""
    one, two, place = tmp_path / "one", tmp_path / "two", tmp_path / "link"
    one.mkdir()
    two.mkdir()
    place.symlink_to(one)
    root = place if link == "the root" else place / "run"
    assert train(root, memory, 3) == 0
    assert train(root.resolve(), memory, 4) == 3, "the same job without the link"
    place.unlink()
    place.symlink_to(two)
    assert train(root, memory, 2) == 0, "a link that leads elsewhere leads to another job"
    place.unlink()
    place.symlink_to(one)
    assert train(root, memory, 5) == 4


def test_a_relative_root_is_that_of_the_directory_at_the_start(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    ckpt, weights = job_of(Path("run"), memory)
    ckpt.restore()
    weights.fill_(1)
    ckpt.step(1)
    monkeypatch.chdir(tmp_path / "two")  # a live job stays where it is
    weights.fill_(2)
    ckpt.step(2)
    ckpt.close(timeout=30)
    assert newest(tmp_path / "one" / "run") == 2 and not os.listdir(tmp_path / "two")
    assert train(Path("run"), memory, 1) == 0, "elsewhere it is another job"
    monkeypatch.chdir(tmp_path / "one")
    assert train(Path("run"), memory, 3) == 2


# -- deleted ---------------------------------------------------------------------------------------------------------


def _train_to_six(root: Path, memory: Path) -> None:
    """Step 4 is on storage, and memory has steps 5 and 6."""
    ckpt, weights = job_of(root, memory, persist_every=1000)
    ckpt.restore()
    for step in range(1, 7):
        weights.fill_(step)
        if step == 4:
            ckpt.save(step, wait="durable", timeout=30)
        else:
            ckpt.step(step)
    ckpt._saver.secure(60)


def killed(root: Path, memory: Path) -> JobDir:
    run_and_kill(_train_to_six, root, memory)
    job = JobDir.of(root, memory_base(memory))
    assert {5, 6} <= {stamp.step for stamp, _ in job.snapshots.shard_ids()}
    return job


def delete(root: Path, job: JobDir) -> None:
    """As a person would, who sees that nothing is written any more."""
    wait_for(lambda: job.notes.durable() == 6, what="the agent to carry what the killed run has left")
    while root.exists():
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.parametrize("how", ["restore", "just train"])
def test_a_run_that_was_deleted_is_begun_anew(
    how: str, root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = killed(root, memory)
    delete(root, job)
    before = job.snapshots.step_dirs()[0]
    shutil.copytree(before, job.copies.path / before.name)  # as a partner keeps another node's snapshots
    ckpt, weights = job_of(root, memory)
    if how == "restore":
        assert ckpt.restore() == 0
    for step in (1, 2):
        weights.fill_(step)
        ckpt.step(step)
        assert {stamp.step for stamp, _ in job.snapshots.shard_ids()} <= {1, 2}, (
            "memory has given up the steps of that run"
        )
        assert not any(job.copies.snapshots.shard_ids())
    ckpt.close(timeout=30)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == [
        f"checkpoints of an earlier run were deleted from {root}: starting anew from step 0; what memory still has of "
        "that run is given up"
    ]
    assert sound(root)[0] == newest(root) == 2 and train(root, memory, 3) == 2


def test_a_deleted_run_is_gone_on_from_on_purpose(root: Path, memory: Path) -> None:
    delete(root, killed(root, memory))
    ckpt, _ = job_of(root, memory)
    assert ckpt.restore(step=6) == 6 and torch.all(ckpt._capture.state["values"].weights == 6)
    ckpt.step(7)
    ckpt.close(timeout=30)
    assert newest(root) == 7


def test_nobody_writes_a_deleted_run_anew_while_it_is_not_trained(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = killed(root, memory)
    delete(root, job)
    status = job_status(job)
    assert status["durable_step"] is None and "was deleted, and memory still has steps [" in str(status["problem"])
    assert "next start gives them up" in status["problem"] and "restore(step=6)" in status["problem"]
    listed, trouble = list_copies_within(root, memory_base(memory), 30.0)
    assert max(one.copy.step for one in listed) == 6 and str(status["problem"]) in str(trouble)
    end_agent(job)
    drainer = Drainer(job)
    assert not drainer.tick() and "was deleted" in str(drainer.progress.given_up)
    assert drainer.pending() is None, "the agent may leave, when its time has come"
    refused = forked.run("rekindle", "stop", root, timeout=100)
    assert refused.returncode == rekindle.NotDurableError.exit_code
    assert "was deleted, and memory still has steps [" in refused.stderr and "stop --discard" in refused.stderr
    assert job.path.exists() and not root.exists()
    done = forked.run("rekindle", "stop", root, "--discard", timeout=100)
    assert done.returncode == 0 and not job.path.exists() and not root.exists()


@pytest.mark.parametrize("more", [{}, {"memory_limit": 1}], ids=["memory", "straight to storage"])
def test_a_root_deleted_while_training_is_made_anew(
    more: dict[str, Any], root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt, weights = job_of(root, memory, persist_every=1, **more)
    ckpt.restore()
    ckpt.save(1, wait="durable", timeout=30)
    step = 1

    def on() -> None:
        nonlocal step
        step += 1
        weights.fill_(step)
        ckpt.step(step)

    while root.exists():
        shutil.rmtree(root, ignore_errors=True)
    wait_for(lambda: (on(), [line for line in caplog.messages if "is made anew" in line])[1])
    ckpt.close(timeout=60)
    assert len([line for line in caplog.messages if "is made anew" in line]) == 1
    assert ckpt.metrics.failed == 0 and newest(root) == step
    assert train(root, memory, step + 1) == step


@pytest.mark.parametrize("more", [{}, {"memory_limit": 1}], ids=["memory", "straight to storage"])
def test_a_root_that_is_made_anew_by_the_last_save_is_told_of_too(
    more: dict[str, Any], root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt, weights = job_of(root, memory, persist_seconds=1000, **more)
    ckpt.restore()
    ckpt.save(1, wait="durable", timeout=30)
    while root.exists():
        shutil.rmtree(root, ignore_errors=True)
    weights.fill_(2)
    ckpt.step(2)
    ckpt.close(timeout=60)
    assert len([line for line in caplog.messages if "is made anew, and step 2" in line]) == 1, caplog.messages
    assert newest(root) == 2


def test_steps_deleted_from_a_root_that_stays_are_a_deleted_run_too(root: Path, memory: Path) -> None:
    job = killed(root, memory)
    wait_for(lambda: job.notes.durable() == 6)
    (root / "notes.txt").write_text("mine")
    while list(root.glob("step-*")):
        for path in root.glob("step-*"):
            shutil.rmtree(path, ignore_errors=True)
    assert train(root, memory, 1) == 0
    assert newest(root) == 1 and (root / "notes.txt").exists()


# -- deleted, and back again -----------------------------------------------------------------------------------------


def _begin_anew(root: Path, memory: Path) -> None:
    """Memory has step 5 of a run that began where another one was moved away; storage has nothing of it."""
    ckpt, weights = job_of(root, memory, persist_every=1000, persist_seconds=1000)
    assert ckpt.restore() == 0
    weights.fill_(5)
    ckpt.step(5)
    ckpt._saver.secure(60)
    end_agent(JobDir.of(root, memory_base(memory)))


@pytest.fixture
def back(root: Path, memory: Path) -> Path:
    """A root whose checkpoints were moved away, so that the job began anew and was killed, and then moved back."""
    job = killed(root, memory)
    wait_for(lambda: job.notes.durable() == 6)
    moved = root.rename(root.with_name("moved"))
    run_and_kill(_begin_anew, root, memory)
    shutil.rmtree(root, ignore_errors=True)
    return moved.rename(root)


def test_a_run_that_is_back_is_not_left_behind_unasked(back: Path, memory: Path) -> None:
    before = sound(back)
    ckpt, _ = job_of(back, memory)
    both = r"restore\(step=6\) goes on from .* restore\(step=5\) goes on from"
    for _ in range(2):
        with pytest.raises(rekindle.NotFoundError, match=both):
            ckpt.restore()
    ckpt.close(timeout=30)
    wait_for(lambda: 5 in sound(back), what="the agent to carry what the killed run has left")
    assert set(before) <= set(sound(back)), "nothing is removed before somebody has chosen"
    with pytest.raises(rekindle.NotFoundError, match=both):
        train(back, memory, 7)


@pytest.mark.parametrize("step", [6, 5])
def test_either_run_is_gone_on_from_on_purpose(step: int, back: Path, memory: Path) -> None:
    ckpt, _ = job_of(back, memory)
    assert ckpt.restore(step=step) == step
    assert torch.all(ckpt._capture.state["values"].weights == step)
    ckpt.close(timeout=30)
    assert train(back, memory, 8) == step, "what was chosen stays chosen"
    assert newest(back) == 8


def test_a_run_that_comes_back_while_the_job_runs_is_not_pruned(root: Path, memory: Path) -> None:
    job = killed(root, memory)
    wait_for(lambda: job.notes.durable() == 6)
    moved = root.rename(root.with_name("moved"))
    ckpt, weights = job_of(root, memory)
    assert ckpt.restore() == 0
    ckpt.save(1, wait="durable", timeout=30, pin=False)
    there = set(sound(moved))
    for path in moved.glob("step-*"):
        path.rename(root / path.name)
    for step in (2, 3):
        weights.fill_(step)
        ckpt.save(step, wait="durable", timeout=30, pin=False)
    ckpt.close(timeout=30)
    assert there <= set(sound(root)) and 3 in sound(root)
