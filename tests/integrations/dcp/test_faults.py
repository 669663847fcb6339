"""What goes wrong in a save is raised, what is wrong with a checkpoint is found; earlier ones stay as they are."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from rekindle.common.failpoints import POINTS
from rekindle.errors import BusyError, CorruptError, NotDurableError, NotFoundError
from rekindle.format.layout import Chunk, Layout
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import MANIFEST, MANIFEST_KIND, receipt_name, shard_name, step_dir
from rekindle.format.receipt import Receipt, checksum, encode_document
from rekindle.integrations.dcp import RekindleReader, RekindleWriter
from rekindle.integrations.dcp import session as runs
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.catalog import MEMORY, find_copies
from rekindle.storage.posix import PosixStore
from tests.faults.harness import take_away, wait_for
from tests.integrations.dcp.ranks import attempt, flip, ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

MIB = 1 << 20


def state(value: float, mib: int = 4) -> dict[str, Any]:
    return {"x": torch.full((mib * MIB // 4,), value), "n": value}


def loaded(root: Path, mib: int = 4, **more: Any) -> float:
    """The value that the newest checkpoint, or the one asked for, holds in all of its elements."""
    found = state(0.0, mib)
    dcp.load(found, storage_reader=RekindleReader(root), **more)
    assert bool((found["x"] == found["n"]).all())
    return float(found["n"])


def save(root: Path, value: float, mib: int = 4, **more: Any) -> RekindleWriter:
    writer = RekindleWriter(root, **more)
    dcp.save(state(value, mib), storage_writer=writer)
    return writer


def error_of(work: Callable[[], object]) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        work()
    return caught.value.failures[0][0]


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Whatever writes a longer file fails, in memory and on storage; processes that run already don't mind."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def in_memory(root: Path, memory: Path, step: int = 1, rank: int = 0, world: int = 1) -> Path:
    return JobDir.of(root, memory_base(memory)).path / step_dir(step) / shard_name(rank, world)


# -- no room --------------------------------------------------------------------------------------------------------


def test_without_room_in_memory_a_save_is_on_storage_when_it_returns(root: Path, small_tmpfs: Any) -> None:
    memory = small_tmpfs(6 * MIB)
    save(root, 1.0, 8, memory=memory)
    assert PosixStore(root).find(1) is not None
    assert loaded(root, 8) == 1.0
    save(root, 2.0, 1, memory=memory).close()  # what fits goes into memory
    assert loaded(root, 1) == 2.0


def test_without_room_anywhere_a_save_fails_and_what_was_saved_stays(memory: Path, root: Path) -> None:
    writer = save(root, 1.0)
    wait_for(JobDir.of(root, memory_base(memory)).agent)  # else it would be started with too little room, too
    with files_of_at_most(2 * MIB):
        error = error_of(lambda: save(root, 2.0, 8))  # more than the memory that is ready
        future = dcp.async_save(state(3.0, 8), storage_writer=writer)
        assert isinstance(future.exception(), CheckpointException)
    assert isinstance(error, OSError)
    assert loaded(root) == 1.0
    save(root, 4.0)
    assert loaded(root) == 4.0 and loaded(root, checkpoint_id=1) == 1.0


def one_rank_without_room(rank: int, root: Path) -> list[str]:
    writer = save(root, 1.0)
    wait_for(JobDir.of(root, memory_base()).agent)
    with files_of_at_most(MIB if rank == 1 else 1 << 40):
        try:
            dcp.save({"a": torch.ones(2 * MIB), "b": torch.ones(2 * MIB)}, storage_writer=writer)
        except CheckpointException as error:
            failed = {which: type(pair[0]).__name__ for which, pair in error.failures.items()}
    assert loaded(root) == 1.0
    save(root, 2.0)
    assert loaded(root) == 2.0
    RekindleWriter(root).close()
    return [f"{which} {name}" for which, name in failed.items()]


def test_one_rank_without_room_fails_the_save_of_all(memory: Path, root: Path) -> None:
    assert ranks(2, one_rank_without_room, root) == [["1 OSError"]] * 2
    assert [entry.stamp.step for entry in PosixStore(root).published()] == [1, 3]


def too_much_for_two(rank: int, root: Path, memory: Path) -> float:
    writer = RekindleWriter(root, memory=memory)
    dcp.save({"a": torch.ones(MIB), "b": torch.ones(MIB), "n": 1.0}, storage_writer=writer)
    target = {"a": torch.zeros(MIB), "b": torch.zeros(MIB), "n": 0.0}
    dcp.load(target, storage_reader=RekindleReader(root, memory=memory))
    assert target["a"].all() and target["b"].all()
    writer.close()
    return float(target["n"])


def test_where_memory_has_room_for_one_rank_only_storage_has_all_when_a_save_returns(
    root: Path, small_tmpfs: Any
) -> None:
    assert ranks(2, too_much_for_two, root, small_tmpfs(6 * MIB)) == [1.0, 1.0]


def test_when_memory_is_taken_away_storage_takes_over(memory: Path, root: Path) -> None:
    writer = save(root, 1.0)
    wait_for((root / step_dir(1)).exists)
    take_away(memory / f"rekindle-{os.getuid()}")
    dcp.save(state(2.0), storage_writer=writer)
    assert PosixStore(root).find(2) is not None and loaded(root) == 2.0


def test_storage_that_takes_nothing_is_told_of_at_the_next_save(
    memory: Path, small_tmpfs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = small_tmpfs(2 * MIB) / "run"
    save(root, 1.0)
    assert loaded(root) == 1.0, "from memory"
    wait_for(JobDir.of(root, memory_base(memory)).notes.drain_error)
    monkeypatch.setattr("rekindle.integrations.dcp.session._PATIENCE", 1.0)
    error = error_of(lambda: save(root, 2.0))
    assert isinstance(error, NotDurableError) and "No space left" in str(error)


# -- death ----------------------------------------------------------------------------------------------------------


def die_in_the_second_save(rank: int, root: Path, point: str) -> None:
    from rekindle.common import failpoints

    save(root, 1.0)
    failpoints.arm(point)
    save(root, 2.0, keep=None)


@pytest.mark.parametrize("point", POINTS["save"])
def test_a_save_that_is_killed_leaves_the_one_before(memory: Path, root: Path, point: str) -> None:
    _, codes = attempt(1, die_in_the_second_save, root, point)
    assert codes == [-signal.SIGKILL]
    assert loaded(root) == (2.0 if point == "save.committed" else 1.0)
    save(root, 3.0).close()
    assert loaded(root) == 3.0 and loaded(root, checkpoint_id=1) == 1.0


def test_an_agent_that_is_killed_is_replaced(memory: Path, root: Path) -> None:
    writer = save(root, 1.0)
    job = JobDir.of(root, memory_base(memory))
    wait_for(job.agent)
    for value in (2.0, 3.0):
        agent = job.agent()
        if agent:
            os.kill(agent, signal.SIGKILL)
            wait_for(lambda agent=agent: job.agent() != agent)
        dcp.save(state(value), storage_writer=writer)
    writer.close()
    assert [entry.stamp.step for entry in PosixStore(root).published()] == [1, 2, 3]


def second_run(rank: int, root: Path) -> str:
    try:
        dcp.save(state(2.0), storage_writer=RekindleWriter(root))
    except CheckpointException as error:
        return f"{error.failures[0][0]!r}"
    return "two runs save to one root"


def test_a_second_run_of_the_same_root_is_refused(memory: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root, 1.0)
    (said,) = ranks(1, second_run, root)
    assert "BusyError" in said and f"process {os.getpid()}" in said
    forget = runs._sessions.pop(root)
    monkeypatch.setattr("rekindle.session.session._SOON", 0.0)
    monkeypatch.setattr("rekindle.session.session._DYING", 0.2)
    with pytest.raises(BusyError, match=f"process {os.getpid()}"):
        RekindleWriter(root)  # as in another process of one rank: it is told before the first save
    runs._sessions[root] = forget


def load_beside(rank: int, root: Path) -> float:
    return loaded(root)


def test_another_process_loads_while_this_one_saves(memory: Path, root: Path) -> None:
    save(root, 1.0)
    assert ranks(2, load_beside, root) == [1.0, 1.0]
    save(root, 2.0)
    assert loaded(root) == 2.0


# -- damage ---------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_memory_is_found_and_storage_read_instead(
    memory: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(root, 1.0, 40)
    wait_for((root / step_dir(1)).exists)
    flip(in_memory(root, memory), 30 * MIB)
    assert loaded(root, 40) == 1.0
    assert "read from storage instead" in caplog.text and "'x'" in caplog.text


def test_a_flipped_bit_in_all_copies_is_an_error(memory: Path, root: Path) -> None:
    save(root, 1.0)
    save(root, 2.0)
    wait_for((root / step_dir(2)).exists)
    flip(in_memory(root, memory, 2), 2 * MIB)
    flip(root / step_dir(2) / shard_name(0, 1), 3 * MIB)
    error = error_of(lambda: loaded(root))
    assert isinstance(error, CorruptError)
    assert "tensor 'x' of step 2 differs from its checksum" in str(error)
    assert loaded(root, checkpoint_id="step-1") == 1.0


@pytest.mark.parametrize("file", ["receipt", "shard"])
def test_a_shard_that_is_missing_or_short_is_found_before_anything_is_read(memory: Path, root: Path, file: str) -> None:
    ranks(2, save_and_close, root)
    name = receipt_name(1, 2) if file == "receipt" else shard_name(1, 2)
    path = root / step_dir(2) / name
    whole = path.read_bytes()

    def check(words: str) -> None:
        target = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
        error = error_of(lambda: dcp.load(target, storage_reader=RekindleReader(root)))
        assert isinstance(error, CorruptError) and words in str(error) and name in str(error)
        assert "older checkpoints, to be asked for by checkpoint_id: [1]" in str(error)
        assert not target["a"].any() and not target["b"].any()

    path.unlink()
    check("No such file" if file == "receipt" else "is missing")
    path.write_bytes(whole[:-1])
    check("is not the receipt" if file == "receipt" else "bytes, should have")
    path.write_bytes(whole)
    dcp.load({"a": torch.zeros(1000)}, storage_reader=RekindleReader(root))
    wait_for(lambda: not JobDir.of(root, memory_base(memory)).path.exists())  # with its note of what is on storage
    (root / step_dir(2) / MANIFEST).unlink()
    target = {"n": 0}
    dcp.load(target, storage_reader=RekindleReader(root))
    assert target["n"] == 1, "without a manifest it is no checkpoint"


def save_and_close(rank: int, root: Path) -> None:
    writer = RekindleWriter(root)
    for value in (1, 2):
        both = {"a": torch.full((1000,), float(value)), "b": torch.full((1000,), float(value)), "n": value}
        dcp.save(both, storage_writer=writer)
    writer.close()


def test_a_shard_of_another_checkpoint_is_not_taken_for_its_own(memory: Path, root: Path) -> None:
    ranks(2, save_and_close, root)
    for name in (receipt_name(1, 2), shard_name(1, 2)):
        shutil.copy(root / step_dir(1) / name, root / step_dir(2) / name)
    error = error_of(lambda: dcp.load({"n": 0}, storage_reader=RekindleReader(root)))
    assert isinstance(error, CorruptError) and "is not the receipt that the manifest names" in str(error)


def test_ranks_that_have_not_all_committed_have_no_checkpoint(memory: Path, root: Path) -> None:
    """As when all ranks die while they save: memory has one of two parts."""
    attempt(2, die_while_the_other_commits, root)
    assert {copy.step for copy in find_copies(JobDir.of(root, memory_base(memory)), None) if copy.place == MEMORY} >= {
        2
    }
    assert ranks(1, load_n, root) == [1]
    error = error_of(lambda: dcp.load({"n": 0}, checkpoint_id=2, storage_reader=RekindleReader(root)))
    assert isinstance(error, NotFoundError) and "ranks [1] of 2 are missing" in str(error)


def die_while_the_other_commits(rank: int, root: Path) -> None:
    from rekindle.common import failpoints

    writer = RekindleWriter(root)
    dcp.save({"n": 1, "a": torch.ones(3), "b": torch.ones(3)}, storage_writer=writer)
    failpoints.arm("save.copied" if rank == 1 else "save.committed")
    dcp.save({"n": 2, "a": torch.ones(3), "b": torch.ones(3)}, storage_writer=writer)


def load_n(rank: int, root: Path) -> int:
    target = {"n": 0}
    dcp.load(target, storage_reader=RekindleReader(root))
    return target["n"]


def test_a_part_of_a_tensor_that_no_shard_has_is_named(memory: Path, root: Path) -> None:
    """Sound files that agree with each other, which the store would not publish: of x the rows 4 to 6 are nowhere."""
    boxes = [Chunk("x", "uint8", (8, 2), (0, 0), (4, 2)), Chunk("x", "uint8", (8, 2), (6, 0), (2, 2))]
    stamp = ShardId(3, 0, 1, Incarnation(1, "a" * 16))
    layout = Layout.build(boxes)
    data = bytes(range(12))
    static = Receipt.static_part(layout, {"x": {"$tensor": "x"}})
    sums = [checksum(data[a:b]) for a, b in layout.blocks]
    receipt = Receipt.decode(Receipt.encode(stamp, static, sums, b"[]"), "made by hand")
    store = PosixStore(root)
    store.write_shard(receipt, memoryview(layout.header + data), lambda nbytes: None)
    with pytest.raises(CorruptError, match=r"x\[4:6, 0:2\] is in no shard"):
        store.publish(stamp)
    entry = {"file": shard_name(0, 1), "bytes": receipt.file_bytes, "receipt": receipt_name(0, 1)}
    body = json.dumps({"saved_at": "", "shards": [{**entry, "receipt_checksum": checksum(receipt.raw)}]})[1:-1]
    (store._partial(stamp) / MANIFEST).write_bytes(encode_document(stamp, MANIFEST_KIND, body.encode()))
    store.clean_up()
    error = error_of(lambda: dcp.load({"x": torch.zeros(8, 2)}, storage_reader=RekindleReader(root)))
    assert isinstance(error, CorruptError) and "x[4:6, 0:2] is in no shard" in str(error)


def test_nothing_to_load(memory: Path, root: Path) -> None:
    error = error_of(lambda: loaded(root))
    assert isinstance(error, NotFoundError) and "no checkpoint" in str(error)
    described = RekindleReader(root).read_metadata()
    with pytest.raises(NotFoundError):
        _ = described.state_dict_metadata
