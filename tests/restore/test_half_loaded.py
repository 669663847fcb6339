"""A copy that turns out damaged while it is being loaded: the next one is loaded over it, or nothing trains on it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.format.names import receipt_name, shard_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.restore.candidate import half_loaded
from rekindle.restore.restore import restore
from rekindle.session.group import SingleProcess
from rekindle.storage.posix import PosixStore


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(8)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.values = rekindle.Values(x=torch.randn(10), seed=seed)
        self.state = {"model": self.model, "optimizer": self.optimizer, "values": self.values}

    def update(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def digest(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        moments = [value for p in parameters for _, value in sorted(self.optimizer.state[p].items())]
        return [t.detach().clone() for t in [*parameters, *moments, self.values.x]]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Saved:
    """Steps 1 and 2, on storage and, the newest, in memory; and what they held."""

    def __init__(self, root: Path) -> None:
        self.store = PosixStore(root)
        live = JobDir.of(root, memory_base())
        training = Training(0)
        ckpt = rekindle.Checkpointer(root, training.state, rng=False)
        ckpt.restore()
        self.states = {}
        for step in (1, 2):
            training.update()
            ckpt.save(step, wait="durable")
            self.states[step] = training.digest()
        # A memory store without an agent that tidies it.
        self.job = JobDir(live.path.with_name("kept"))
        shutil.copytree(live.path / step_dir(2), self.job.path / step_dir(2))
        ckpt.close()

    def damage(self, place: Path, step: int, tensor: str = "model.7.weight") -> None:
        directory = place / step_dir(step)
        path = directory / receipt_name(0, 1)
        receipt = Receipt.decode(path.read_bytes(), path)
        (at,) = [receipt.header_bytes + c.start for c in receipt.layout.chunks if c.name == tensor]
        with open(directory / shard_name(0, 1), "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    def load(self, training: Training, step: int | None = None):
        return restore(SingleProcess(), training.state, self.job, self.store, step, allow_pickle=False)[0]


@pytest.fixture
def saved(root: Path, memory: Path) -> Saved:
    return Saved(root)


@pytest.fixture(params=["fresh", "live"])
def training(request) -> Training:
    """A new one, and one whose optimizer has state already."""
    made = Training(5)
    if request.param == "live":
        made.update()
    return made


def test_both_sources_give_the_state_exactly(saved, training):
    done = saved.load(training)
    assert (done.step, done.place) == (2, "memory") and same(training.digest(), saved.states[2])
    training.update()
    shutil.rmtree(saved.job.path / step_dir(2))
    done = saved.load(training)
    assert (done.step, done.place) == (2, "storage") and same(training.digest(), saved.states[2])
    assert done.nbytes <= done.read < 1.01 * done.nbytes + 8192


def test_a_damaged_copy_in_memory_is_overwritten_by_that_on_storage(saved, training):
    saved.damage(saved.job.path, 2)
    done = saved.load(training)
    assert (done.step, done.place) == (2, "storage") and same(training.digest(), saved.states[2])
    assert not half_loaded(training.state)


def test_a_newest_step_damaged_everywhere_is_overwritten_by_the_older_one(saved, training):
    saved.damage(saved.job.path, 2)
    saved.damage(saved.store.root, 2)
    assert saved.load(training).step == 1
    assert same(training.digest(), saved.states[1])
    assert not half_loaded(training.state)


def damage_all(saved: Saved) -> None:
    for place in (saved.job.path, saved.store.root):
        for step in (1, 2):
            if (place / step_dir(step)).exists():
                saved.damage(place, step)


def test_nothing_sound_is_an_error_and_the_remains_are_not_trained_on(saved, training):
    damage_all(saved)
    with pytest.raises(rekindle.CorruptError, match="partly overwritten"):
        saved.load(training)
    with pytest.raises(rekindle.UsageError, match="build it anew"):
        saved.load(training, 0)
    assert saved.load(Training(6), 0) is None, "a state that was built anew may start anew"


def test_after_a_failed_restore_a_sound_checkpoint_may_still_be_loaded(saved, training):
    backup = saved.store.root.parent / "backup"
    shutil.copytree(saved.store.root, backup)
    damage_all(saved)
    with pytest.raises(rekindle.CorruptError):
        saved.load(training)
    shutil.rmtree(saved.store.root)
    shutil.copytree(backup, saved.store.root)
    assert saved.load(training).step == 2
    assert same(training.digest(), saved.states[2])
    assert saved.load(training, 0) is None


def test_a_restore_that_fails_before_it_has_written_anything_leaves_starting_anew_open(saved, training):
    before = training.digest() if training.optimizer.state else None
    for place in (saved.job.path, saved.store.root):
        for path in place.rglob("*.safetensors"):
            with open(path, "r+b") as file:
                file.write(b"x")
    with pytest.raises(rekindle.CorruptError, match=r"no checkpoint is sound; restore\(step=0\)"):
        saved.load(training)
    assert saved.load(training, 0) is None
    assert before is None or same(training.digest(), before)


def test_a_state_that_does_not_fit_is_left_as_it_is(saved):
    other = Training(5)
    other.update()
    other.model.register_buffer("surplus", torch.ones(1))
    before = other.digest()
    with pytest.raises(rekindle.StateMismatchError):
        saved.load(other)
    assert same(other.digest(), before) and not half_loaded(other.state)


def test_loading_from_storage_takes_little_memory_beside_the_state(saved):
    training = Training(5)
    training.update()
    shutil.rmtree(saved.job.path / step_dir(2), ignore_errors=True)
    saved.load(training)  # everything has been used once
    training.update()
    evict(saved.store.root / step_dir(2) / shard_name(0, 1))
    Path("/proc/self/clear_refs").write_text("5")
    before = status("RssAnon")
    peak = status("VmHWM")
    saved.load(training)
    assert status("VmHWM") - peak < 30 << 20, "more than buffers of 4 MiB for each thread"
    assert status("RssAnon") - before < 30 << 20
    assert same(training.digest(), saved.states[2])


def evict(path: Path) -> None:
    """Out of the page cache, so that it is read by way of buffers."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(f"{field}:"))
