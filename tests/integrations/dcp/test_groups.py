"""Ranks that save by threes, in pairs or alone, and a rank that fails halfway: what is loaded is of one save."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner

from rekindle.errors import CorruptError, UsageError
from rekindle.format.layout import Chunk, Layout
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import receipt_name, shard_name, step_dir
from rekindle.format.receipt import Receipt, checksum
from rekindle.integrations.dcp import RekindleReader, RekindleWriter
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.catalog import find_copies
from rekindle.storage.posix import PosixStore
from tests.integrations.dcp.ranks import ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Failing(DefaultSavePlanner):
    """Fails in one of its methods, if it is to."""

    def __init__(self, stage: str | None, caching: bool = False) -> None:
        super().__init__(enable_plan_caching=caching)
        self._stage = stage

    def finish_plan(self, new_plan: Any) -> Any:
        if self._stage == "finish_plan":
            raise RuntimeError("no plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        if self._stage == "resolve_data":
            raise RuntimeError("no data")
        return super().resolve_data(write_item)


def state(rank: int, value: float) -> dict[str, Any]:
    """What each rank has by itself, so that every shard has something in it, and what all have."""
    return {f"own{rank}": torch.full((50,), value), "all": torch.full((7,), value), "n": value}


def loaded(root: Path, world: int, **more: Any) -> set[float]:
    """All values that the checkpoint has in it: of one save, they are one."""
    found: dict[str, Any] = {f"own{rank}": torch.zeros(50) for rank in range(world)}
    found |= {"all": torch.zeros(7), "n": 0.0}
    dcp.load(found, storage_reader=RekindleReader(root), **more)
    return {value for tensor in found.values() for value in torch.as_tensor(tensor).flatten().tolist()}


def failures(work: Any) -> dict[int, BaseException]:
    """By rank, how a save has failed."""
    try:
        work()
    except CheckpointException as error:
        return {rank: pair[0] for rank, pair in error.failures.items()}
    return {}


# -- a rank that fails for once --------------------------------------------------------------------------------------


def transient(rank: int, root: Path, count: int, stage: str, when: set[int], caching: bool) -> list[set[float]]:
    """So many saves, of which rank 1's planner fails in some: what is loaded after each of them."""
    seen = []
    for value in range(1, count + 1):
        planner = Failing(stage if rank == 1 and value in when else None, caching)
        save = lambda p=planner, v=value: dcp.save(  # noqa: E731
            state(rank, float(v)), storage_writer=RekindleWriter(root), planner=p
        )
        assert list(failures(save)) == ([1] if value in when else [])
        seen.append(loaded(root, 3) if value != 1 or 1 not in when else set())
    RekindleWriter(root).close()
    return seen


def named(rank: int, root: Path, world: int) -> list[set[float]]:
    """A step that has failed is asked for again, and then the next one."""
    seen, writer = [], RekindleWriter(root)
    for number, (step, stage) in enumerate([(10, None), (20, "finish_plan"), (20, None), (21, None)]):
        planner = Failing(stage if rank == 1 else None)
        failed = failures(
            lambda n=number, s=step, p=planner: dcp.save(
                state(rank, float(n)), checkpoint_id=s, storage_writer=writer, planner=p
            )
        )
        assert bool(failed) == (number in (1, 2)), failed
        if number == 2:
            assert "steps must grow" in str(next(iter(failed.values())))
        seen.append(loaded(root, world))
    return seen


def in_the_background(rank: int, root: Path, world: int) -> list[set[float]]:
    """The very first save fails on rank 1, which all ranks are told; the next one is good."""
    writer = RekindleWriter(root)
    future = dcp.async_save(
        state(rank, 1.0), storage_writer=writer, planner=Failing("finish_plan" if rank == 1 else None)
    )
    error = future.exception(30.0)
    assert isinstance(error, CheckpointException) and list(error.failures) == [1]
    dcp.async_save(state(rank, 2.0), storage_writer=writer).result(30.0)
    return [loaded(root, world)]


# -- some of the ranks -----------------------------------------------------------------------------------------------


def some(rank: int, root: Path, group: Any, members: list[int]) -> list[set[float]]:
    """Two saves of some ranks of the job, as a replica group of HSDP does it. The others take no part."""
    if rank not in members:
        return []
    own, seen = members.index(rank), []
    for value in (1.0, 2.0):
        dcp.save(state(own, value), storage_writer=RekindleWriter(root), process_group=group)
        seen.append(loaded(root, len(members), process_group=group))
    return seen


def nothing_and_nowhere(rank: int, root: Path) -> bool:
    """Rank 1 has nothing to save, and no memory: neither store could show the whole while it is on its way."""
    writer = RekindleWriter(root, memory="/dev/null/none" if rank == 1 else None)
    dcp.save({} if rank == 1 else {f"own{rank}": torch.ones(3)}, storage_writer=writer)
    return PosixStore(root).find(1) is not None


def each_alone(rank: int, root: Path) -> tuple[set[float], set[str]]:
    """Each rank to a root of its own; then all of them to one, which only one of them can have."""
    own = root.with_name(f"alone-{rank}")
    dcp.save(state(0, float(rank)), storage_writer=RekindleWriter(own), no_dist=True)
    seen = loaded(own, 1, no_dist=True)
    failed = failures(lambda: dcp.save(state(0, 1.0), storage_writer=RekindleWriter(root), no_dist=True))
    return seen, {type(error).__name__ for error in failed.values()}


def refused(rank: int, root: Path, other: Path) -> list[tuple[set[str], str]]:
    """What can't be one checkpoint: all ranks are told, and soon."""
    writer, said = RekindleWriter(root), []
    for which, more in (
        (writer, {"checkpoint_id": f"step-{10 + rank}"}),
        (writer, {"checkpoint_id": "step-30" if rank else "final"}),
        (RekindleWriter(root if rank else other), {}),
        (RekindleWriter(root.with_name("kept"), keep=1 + rank), {}),
    ):
        began = time.monotonic()
        failed = failures(lambda w=which, m=more: dcp.save(state(rank, 1.0), storage_writer=w, **m))
        assert failed and time.monotonic() - began < 60.0
        said.append(({type(error).__name__ for error in failed.values()}, str(next(iter(failed.values())))))
    return said


def together(rank: int, place: Path) -> dict[str, Any]:
    """All cases in one job of three ranks, which would take seconds to start for each."""
    import torch.distributed as dist

    world = dist.get_world_size()
    pair, last = dist.new_group([1, 2]), dist.new_group([2])
    found: dict[str, Any] = {
        "first": transient(rank, place / "first", 5, "finish_plan", {1, 3}, False),
        "data": transient(rank, place / "data", 3, "resolve_data", {2}, False),
        "caching": transient(rank, place / "caching", 3, "resolve_data", {2}, True),
        "named": named(rank, place / "named", world),
        "background": in_the_background(rank, place / "background", world),
        "pair": some(rank, place / "pair", pair, [1, 2]),
        "last": some(rank, place / "last", last, [2]),
    }
    found["nowhere"] = nothing_and_nowhere(rank, place / "nowhere")
    dist.barrier()
    found["alone"] = each_alone(rank, place / "alone")
    dist.barrier()
    found["refused"] = refused(rank, place / "refused", place / "other")
    crowd = failures(lambda: dcp.save(state(rank, 3.0), storage_writer=RekindleWriter(place / "pair")))
    found["crowd"] = {type(error).__name__ for error in crowd.values()}
    return found


@pytest.mark.campaign(seconds=10)
def test_what_is_loaded_is_of_one_save_whoever_saves_and_whoever_fails(memory: Path, tmp_path: Path) -> None:
    results = ranks(3, together, tmp_path)
    for found in results:
        assert found["first"] == [set(), {2.0}, {2.0}, {4.0}, {5.0}]
        assert found["data"] == found["caching"] == [{1.0}, {1.0}, {3.0}]
        assert found["named"] == [{0.0}, {0.0}, {0.0}, {3.0}] and found["background"] == [{2.0}]
        assert found["nowhere"]
        assert "UsageError" in found["crowd"] <= {"UsageError", "BusyError"}
        differing, nameless, apart, kept = found["refused"]
        assert differing[0] == {"UsageError"} and "rank 0 saves step 10, and rank 1 step 11" in differing[1]
        assert nameless[0] == {"UsageError"} and "'final' names no step" in nameless[1]
        assert apart[0] == {"UsageError"} and "have sent no request for a save to" in apart[1]
        assert kept[0] == {"UsageError"} and "keep is 2 on rank 1 and 1 on rank 0" in kept[1]
    assert [found["pair"] for found in results] == [[], [{1.0}, {2.0}], [{1.0}, {2.0}]]
    assert results[2]["last"] == [{1.0}, {2.0}]
    assert [found["alone"][0] for found in results] == [{0.0}, {1.0}, {2.0}]
    assert sorted(map(sorted, (found["alone"][1] for found in results))) == [[], ["BusyError"], ["BusyError"]]
    on_storage = [entry.stamp.step for entry in PosixStore(tmp_path / "first").published()]
    assert on_storage == [2, 4, 5], "the number of a save that has failed is not used again"


def test_a_rank_is_that_of_the_save_and_not_of_the_moment_when_a_writer_was_made(memory: Path, root: Path) -> None:
    job, writer = JobDir.of(root, memory_base(memory)), RekindleWriter(root)
    assert list(job.trainers()) == [0], "without a process group there is no other rank"
    writer.set_up_storage_writer(False, rank=1)
    assert list(job.trainers()) == [1]
    writer.set_up_storage_writer(True, rank=0)
    dcp.save(state(0, 1.0), storage_writer=writer)
    with pytest.raises(UsageError, match="has saved there as rank 0"):
        writer.set_up_storage_writer(False, rank=1)


# -- shards of two saves ---------------------------------------------------------------------------------------------


def shard(step: int, rank: int, save: str) -> tuple[Receipt, bytes]:
    stamp = ShardId(step, rank, 2, Incarnation(1, "a" * 16), save=save)
    layout = Layout.build([Chunk("x", "uint8", (8,), (4 * rank,), (4,))])
    data = bytes([rank] * 4)
    static = Receipt.static_part(layout, {"x": {"$tensor": "x"}})
    raw = Receipt.encode(stamp, static, [checksum(data)], b"[]")
    return Receipt.decode(raw, "made by hand"), layout.header + data


def test_shards_of_two_saves_are_not_published(root: Path) -> None:
    store = PosixStore(root)
    for rank, save in enumerate(("b" * 16, "c" * 16)):
        receipt, data = shard(3, rank, save)
        store.write_shard(receipt, memoryview(data), lambda nbytes: None)
    with pytest.raises(CorruptError, match=r"rank 1's shard belongs to another save"):
        store.publish(receipt.stamp)


def test_shards_of_two_saves_in_memory_are_no_checkpoint(memory: Path, root: Path) -> None:
    job = JobDir.of(root, memory_base(memory))
    job.create()
    for step, saves in ((2, ("", "")), (3, ("b" * 16, "b" * 16)), (4, ("b" * 16, "c" * 16)), (5, ("", "c" * 16))):
        (job.path / step_dir(step)).mkdir()
        for rank, save in enumerate(saves):
            receipt, data = shard(step, rank, save)
            (job.path / step_dir(step) / shard_name(rank, 2)).write_bytes(data)
            (job.path / step_dir(step) / receipt_name(rank, 2)).write_bytes(receipt.raw)
    whole = [copy.step for copy in find_copies(job, None) if len(copy.ranks) == 2]
    assert whole == [3, 2], "those of before have no save to tell by"
    found = {"x": torch.zeros(8, dtype=torch.uint8)}
    dcp.load(found, storage_reader=RekindleReader(root))
    assert found["x"].tolist() == [0] * 4 + [1] * 4
