"""The one protocol by which shards become a checkpoint: its order, and what it does where others write too."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rekindle.format.lineage import Incarnation, ShardId
from rekindle.memory.job_dir import JobDir
from rekindle.memory.notes import Notes
from rekindle.memory.slots import Slots
from rekindle.storage.commit import Committer, SupersededError
from rekindle.storage.posix import PosixStore
from rekindle.testing import make_shard
from tests.conftest import commit

FIRST = Incarnation(1, "a" * 16)
SECOND = Incarnation(2, "b" * 16, FIRST.id, 1)


@pytest.fixture
def store(root: Path) -> PosixStore:
    return PosixStore(root)


@pytest.fixture
def job(memory: Path) -> JobDir:
    job = JobDir(memory / "job")
    job.create()
    return job


def put(committer: Committer, step: int, rank: int = 0, world: int = 1, start: Incarnation = FIRST) -> ShardId:
    """The first two steps."""
    receipt, data = make_shard(ShardId(step, rank, world, start), {f"x{rank}": b"%d" % step})
    committer.begin(receipt.stamp)
    committer.write(receipt, memoryview(data))
    return receipt.stamp


def save(committer: Committer, step: int, keep: int = 1) -> bool:
    stamp = put(committer, step)
    durable = committer.commit(stamp, [stamp])
    if durable:
        committer.tidy(stamp, keep, None)
    return durable


def steps(store: PosixStore) -> list[int]:
    return [entry.stamp.step for entry in store.published()]


@contextmanager
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is called of a store and of the notes, in order, each run of the same call once."""
    calls: list[str] = []

    def listen(owner: type, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            calls.append(name)
            return original(*args, **more)

        patch.setattr(owner, name, call)

    with monkeypatch.context() as patch:
        for name in ("published", "write_shard", "trace", "publish", "pin", "prune", "clean_up"):
            listen(PosixStore, name)
        listen(Notes, "write_durable")
        yield calls
    calls[:] = [name for name, _ in itertools.groupby(calls)]


def test_the_order_of_a_commit(store: PosixStore, job: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with heard(monkeypatch) as calls:
        assert save(Committer(store, job), 1)
    write = ["published", "write_shard", "published"]
    durable = ["trace", "publish", "write_durable", "prune", "clean_up"]
    assert calls == [*write, *durable]
    with heard(monkeypatch) as calls:
        assert save(Committer(store, job), 2)
    assert calls == ["published", "trace", "write_shard", "published", *durable], "what stands there is identified too"
    assert steps(store) == [2] and job.notes.durable() == 2


def test_a_checkpoint_pinned_in_memory_meanwhile_is_pinned_before_others_go(
    store: PosixStore, job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = Committer(store, job)
    stamp = put(committer, 1)
    slots = Slots(job, 0, 1, [0])
    commit(slots, *make_shard(ShardId(1, 0, 1, FIRST, pinned=True), {"x0": b"1"}))
    slots.close()
    with heard(monkeypatch) as calls:
        assert committer.commit(stamp, [stamp])
        committer.tidy(stamp, 1, None)
    assert calls[-4:] == ["pin", "write_durable", "prune", "clean_up"]
    assert [entry.pinned for entry in store.published()] == [True]


def test_the_last_writer_makes_it_durable_and_the_others_learn_of_it(store: PosixStore, job: JobDir) -> None:
    one, other = Committer(store, job), Committer(store, None)
    first = put(one, 1, rank=0, world=2)
    assert not one.commit(first, [first]) and not one.commit_if_complete(first)
    assert steps(store) == [] and job.notes.durable() is None
    second = put(other, 1, rank=1, world=2)
    assert other.commit(second, [second]) and steps(store) == [1]
    assert one.commit_if_complete(first) and job.notes.durable() == 1


def test_a_writer_whose_shard_others_have_cleaned_up_is_told_that_it_was_superseded(store: PosixStore) -> None:
    late = Committer(store, None)
    stamp = put(late, 1, world=2)
    assert save(Committer(store, None), 2)
    with pytest.raises(SupersededError, match="step 1 was given up: a checkpoint as new is on storage already"):
        late.commit(stamp, [stamp])


def test_a_shard_that_is_gone_without_a_newer_checkpoint_is_an_error(store: PosixStore, root: Path) -> None:
    committer = Committer(store, None)
    stamp = put(committer, 1, world=2)
    shutil.rmtree(root)
    with pytest.raises(FileNotFoundError, match="what was written of step 1 is gone"):
        committer.commit(stamp, [stamp])


def test_a_writer_without_memory_remembers_what_storage_has_shown(store: PosixStore, root: Path) -> None:
    committer = Committer(store, None)
    assert save(committer, 1)
    root.rename(root.with_name("elsewhere"))
    assert committer.root_deleted(), "on the same file system"
    assert save(committer, 2) and steps(store) == [2]


def test_a_writer_refuses_a_root_that_a_later_start_writes_to(store: PosixStore) -> None:
    late = put(Committer(store, None), 2, start=SECOND)
    assert Committer(store, None).commit(late, [late])
    with pytest.raises(FileExistsError, match="another start of this job, generation 2, writes there"):
        put(Committer(store, None), 3)


def test_storage_that_refuses_to_tidy_is_told_of_once_and_fails_no_save(
    store: PosixStore, job: JobDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        here = threading.get_ident()  # not those of an earlier test's checkpointer, which lost its memory just now
        return [record.getMessage() for record in caplog.records if record.thread == here]

    def refuse(*_: object) -> list[int]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(store.root / "step-0000000001"))

    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "prune", refuse)
        for step in (1, 2, 3):
            assert save(Committer(store, job), step), "as the agent does, with one for each"
    assert steps(store) == [1, 2, 3]
    assert [line.partition(":")[0] for line in told()] == [
        f"surplus checkpoints stay at {store.root} and take up room, until one of the next saves can remove them"
    ]
    assert f"{store.root}/step-0000000001: Permission denied" in told()[0]
    assert save(Committer(store, job), 4) and steps(store) == [4]
    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "clean_up", refuse)
        assert save(Committer(store, job), 5)
    assert len(told()) == 2 and steps(store) == [5], "it is told of again, and what could be removed is"
