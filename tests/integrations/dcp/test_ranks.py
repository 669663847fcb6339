"""Several ranks that save and load through DCP: every way to shard, on as many ranks, more or fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.format.names import step_dir
from rekindle.format.receipt import Receipt
from tests.integrations.dcp.ranks import attempt, ranks

ROWS, COLUMNS = 13, 7


def whole(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sharded_state(world: int, fill: bool) -> dict[str, Any]:
    """The same global tensors whatever the number of ranks, cut in every way that DCP knows."""
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2)) if world % 2 == 0 else init_device_mesh("cpu", (1, world))

    def cut(seed: int, shape: tuple[int, ...], mesh: Any, *placements: Any) -> torch.Tensor:
        tensor = whole(seed, *shape) if fill else torch.zeros(shape)
        return distribute_tensor(tensor, mesh, placements)

    def old_style(seed: int) -> torch.Tensor:
        tensor = whole(seed, ROWS, COLUMNS) if fill else torch.zeros(ROWS, COLUMNS)
        rank, size = torch.distributed.get_rank(), -(-ROWS // world)
        first, last = min(rank * size, ROWS), min((rank + 1) * size, ROWS)
        shards = []
        if first < last:
            shards.append(LocalShard.from_tensor_and_offsets(tensor[first:last].clone(), [first, 0], rank))
        return init_from_local_shards(shards, ROWS, COLUMNS)

    return {
        "rows": cut(1, (ROWS, COLUMNS), line, Shard(0)),
        "columns": cut(2, (ROWS, COLUMNS), line, Shard(1)),
        "few": cut(3, (2, COLUMNS), line, Shard(0)),  # some ranks have nothing of it
        "copies": cut(4, (ROWS, COLUMNS), line, Replicate()),
        "grid": cut(5, (ROWS, COLUMNS), grid, Shard(0), Shard(1)),
        "hybrid": cut(6, (ROWS, COLUMNS), grid, Replicate(), Shard(0)),
        "twice": cut(7, (ROWS, COLUMNS), grid, Shard(0), Shard(0)),
        "low": cut(8, (ROWS, COLUMNS), line, Shard(0)),
        "old": old_style(9),
        "plain": whole(10, 5) if fill else torch.zeros(5),
        "turned": whole(11, 3, 4).t() if fill else torch.zeros(4, 3),
        "deep": {"list": [{"scalar": torch.tensor(3.0 if fill else 0.0)}, {"name": "a" if fill else ""}]},
        "step": 5 if fill else 0,
    }


def same_shards(a: Any, b: Any) -> bool:
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor

    if isinstance(a, DTensor):
        return torch.equal(a.to_local(), b.to_local())
    if isinstance(a, ShardedTensor):
        pairs = zip(a.local_shards(), b.local_shards(), strict=True)
        return all(torch.equal(x.tensor, y.tensor) for x, y in pairs)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(same_shards(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return all(map(same_shards, a, b))
    return bool(a == b)


def save_sharded(rank: int, root: Path, how: str) -> bool:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from rekindle.integrations.dcp import RekindleReader, RekindleWriter

    world = dist.get_world_size()
    state, writer = sharded_state(world, True), RekindleWriter(root)
    if how == "async":
        group = dist.new_group(backend="gloo")
        future = dcp.async_save(state, storage_writer=writer, process_group=group)
        dist.all_reduce(torch.ones(3))  # training goes on
        state["rows"].to_local().zero_(), state["plain"].zero_()
        for shard in state["old"].local_shards():
            shard.tensor.zero_()
        future.result()
        state = sharded_state(world, True)
    else:
        dcp.save(state, storage_writer=writer)
    loaded = sharded_state(world, False)
    dcp.load(loaded, storage_reader=RekindleReader(root))
    dist.barrier()
    if how == "durable":
        writer.close()
    return same_shards(loaded, state)


def load_sharded(rank: int, root: Path) -> bool:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from rekindle.integrations.dcp import RekindleReader

    loaded = sharded_state(dist.get_world_size(), False)
    dcp.load(loaded, storage_reader=RekindleReader(root))
    return same_shards(loaded, sharded_state(dist.get_world_size(), True))


def load_with_torch(rank: int, directory: Path) -> bool:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    tensors = ("rows", "columns", "copies", "grid", "hybrid", "plain", "turned", "old")
    loaded, expected = (sharded_state(dist.get_world_size(), fill) for fill in (False, True))
    loaded = {name: loaded[name] for name in tensors}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(directory)))
    return same_shards(loaded, {name: expected[name] for name in tensors})


def test_four_ranks_save_and_two_and_three_load(memory: Path, root: Path) -> None:
    assert all(ranks(4, save_sharded, root, "durable"))
    held = [Receipt.decode(path.read_bytes(), path) for path in sorted((root / step_dir(1)).glob("shard-*.json"))]
    for name, nbytes in (("copies", ROWS * COLUMNS * 4), ("hybrid", ROWS * COLUMNS * 4), ("plain", 20)):
        parts = [chunk.nbytes for receipt in held for chunk in receipt.layout.chunks if chunk.name == name]
        assert sum(parts) == nbytes, "what replicas have alike is saved once"
    assert all(ranks(2, load_sharded, root))
    assert all(ranks(3, load_with_torch, root / step_dir(1)))


def test_two_ranks_save_in_the_background_and_three_load_from_memory(memory: Path, root: Path) -> None:
    assert all(ranks(2, save_sharded, root, "async"))
    assert all(ranks(3, load_sharded, root))


def save_stage(rank: int, root: Path) -> None:
    """As a stage of a pipeline: what it has, no other rank has; the last one has nothing."""
    import torch.distributed.checkpoint as dcp

    from rekindle.integrations.dcp import RekindleWriter

    writer = RekindleWriter(root)
    state = {f"stage{rank}": {"w": whole(rank, 4), "n": rank}} if rank < 2 else {}
    dcp.save(state, storage_writer=writer)
    writer.close()


def load_stages(rank: int, root: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    from rekindle.integrations.dcp import RekindleReader

    state = {f"stage{stage}": {"w": torch.zeros(4), "n": -1} for stage in (1, 0)}
    dcp.load(state, storage_reader=RekindleReader(root))
    return {"n": [state["stage0"]["n"], state["stage1"]["n"]], "w": [float(state[f"stage{i}"]["w"][0]) for i in (0, 1)]}


def test_ranks_that_have_different_things(memory: Path, root: Path) -> None:
    ranks(3, save_stage, root)
    (found,) = ranks(1, load_stages, root)
    assert found == {"n": [0, 1], "w": [float(whole(0, 4)[0]), float(whole(1, 4)[0])]}


# -- large tensors: only what is needed is read ----------------------------------------------------------------------


def columns_of_rows(rank: int, root: Path) -> tuple[bool, int]:
    """Saved by rows, loaded by columns and by other rows; how much of it this rank has read."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from rekindle.format import reader
    from rekindle.integrations.dcp import RekindleReader, RekindleWriter

    mesh, tensor = init_device_mesh("cpu", (2,)), whole(1, 5000, 2500)
    dcp.save({"x": distribute_tensor(tensor, mesh, [Shard(0)])}, storage_writer=RekindleWriter(root))
    dist.barrier()
    by_columns = {"x": torch.distributed.tensor.zeros(5000, 2500, device_mesh=mesh, placements=[Shard(1)])}
    dcp.load(by_columns, storage_reader=RekindleReader(root))
    right = torch.equal(by_columns["x"].to_local(), tensor.chunk(2, dim=1)[rank])
    counted: list[int] = []
    close = reader.ShardReader.close
    reader.ShardReader.close = lambda self: (counted.append(self.nbytes), close(self))  # type: ignore[assignment]
    by_rows = {"x": torch.distributed.tensor.zeros(5000, 2500, device_mesh=mesh, placements=[Shard(0)])}
    dcp.load(by_rows, storage_reader=RekindleReader(root))
    right = right and torch.equal(by_rows["x"].to_local(), tensor.chunk(2, dim=0)[rank])
    return right, sum(counted)


def other_rows(rank: int, root: Path) -> bool:
    """Rows that begin and end in the middle of blocks; then the whole, from all shards."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    from rekindle.integrations.dcp import RekindleReader

    tensor = whole(1, 5000, 2500)
    thirds = {"x": zeros(5000, 2500, device_mesh=init_device_mesh("cpu", (3,)), placements=[Shard(0)])}
    dcp.load(thirds, storage_reader=RekindleReader(root))
    alone = {"x": torch.zeros(5000, 2500)}
    if rank == 0:
        dcp.load(alone, storage_reader=RekindleReader(root), no_dist=True)
    right = torch.equal(thirds["x"].to_local(), tensor.chunk(3)[rank])
    return right and (rank > 0 or torch.equal(alone["x"], tensor))


def test_large_tensors_are_read_by_parts(memory: Path, root: Path) -> None:
    for right, nbytes in ranks(2, columns_of_rows, root):
        assert right and nbytes == 2500 * 2500 * 4, "its own half, and nothing of the other rank's"
    assert all(ranks(3, other_rows, root))


# -- FSDP2: PyTorch's own comparison of state dicts --------------------------------------------------------------------


def build(world: int, seed: int, shard: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))
    if shard:
        mesh = init_device_mesh("cpu", (world,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(whole(step, 4, 7)).square().sum().backward()
        optimizer.step()


def check_state_dicts(whole_one: Any, sharded: Any) -> None:
    """As torch's own tests compare a sharded model and optimizer with one that is not."""
    import unittest

    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

    class Verify(VerifyStateDictMixin, unittest.TestCase):
        pass

    model_state, optimizer_state = get_state_dict(*sharded)
    check = Verify()
    check._verify_msd(whole_one[0].state_dict(), model_state)
    check._verify_osd(*whole_one, whole_one[1].state_dict(), optimizer_state)


def fsdp_save(rank: int, root: Path) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from rekindle.integrations.dcp import RekindleWriter

    model, optimizer = build(dist.get_world_size(), 1, True)
    train(model, optimizer, range(3))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.async_save(states, storage_writer=RekindleWriter(root)).result()


def fsdp_load(rank: int, root: Path) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from rekindle.integrations.dcp import RekindleReader

    alone = build(1, 1, False)
    train(*alone, range(3))
    sharded = build(dist.get_world_size(), 2, True)
    states = dict(zip(("model", "optimizer"), get_state_dict(*sharded), strict=True))
    dcp.load(states, storage_reader=RekindleReader(root))
    set_state_dict(*sharded, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    check_state_dicts(alone, sharded)
    for both in (alone, sharded):
        train(*both, range(3, 5))
    check_state_dicts(alone, sharded)


@pytest.mark.parametrize("world", [2, 3])
def test_a_model_of_fsdp2_and_its_optimizer_go_on(memory: Path, root: Path, world: int) -> None:
    ranks(2, fsdp_save, root)
    ranks(world, fsdp_load, root)


# -- the contract of StorageWriter and StorageReader -------------------------------------------------------------------

STAGES = ["set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"]
LOADING = ["read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data"]


def contract(rank: int, root: Path) -> dict[str, list[str]]:
    """The order of DCP's calls, and what becomes of an error in each of them."""
    import torch.distributed.checkpoint as dcp

    from rekindle.integrations.dcp import RekindleReader, RekindleWriter

    calls: dict[str, list[str]] = {"save": [], "load": []}
    failing: list[tuple[str, int]] = []

    def watched(kind: type, stages: list[str], log: list[str]) -> type:
        def wrap(stage: str) -> Any:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                log.append(stage)
                if (stage, rank) in failing:
                    raise ValueError(f"{stage} on rank {rank}")
                return getattr(kind, stage)(self, *args, **kwargs)

            return call

        return type("Watched", (kind,), {stage: wrap(stage) for stage in ["reset", *stages]})

    writer = watched(RekindleWriter, STAGES, calls["save"])(root)
    reader = watched(RekindleReader, LOADING, calls["load"])(root)
    dcp.save(sharded_state(2, True), checkpoint_id="step-1", storage_writer=writer)
    dcp.load(sharded_state(2, False), checkpoint_id="step-1", storage_reader=reader)
    orders = {name: list(calls[name]) for name in calls}
    for number, stage in enumerate(STAGES + LOADING[1:]):
        on_coordinator = stage in ("prepare_global_plan", "finish")
        for culprit in (0,) if on_coordinator else (0, 1):
            failing[:] = [(stage, culprit)]
            # When DCP comes to finish, all ranks have committed: the checkpoint is there, whoever fails to hear of it.
            blank = sharded_state(2, stage == "finish")
            try:
                if number < len(STAGES):
                    dcp.save(blank, checkpoint_id=f"step-{2 * number + culprit + 10}", storage_writer=writer)
                else:
                    dcp.load(blank, checkpoint_id="step-1", storage_reader=reader)
            except dcp.CheckpointException as error:
                assert list(error.failures) == [culprit] and stage in str(error.failures[culprit][0])
            else:
                raise AssertionError(f"{stage} on rank {culprit} went unnoticed")
    failing.clear()
    loaded = sharded_state(2, False)
    dcp.load(loaded, storage_reader=RekindleReader(root))
    assert same_shards(loaded, sharded_state(2, True)), "of the saves that failed nothing is seen"
    dcp.save(sharded_state(2, True), storage_writer=writer)
    return orders


def test_calls_come_in_order_and_errors_come_out(memory: Path, root: Path) -> None:
    first, second = ranks(2, contract, root)
    assert first == {"save": ["reset", *STAGES], "load": ["reset", *LOADING]}
    on_all = [stage for stage in STAGES if stage not in ("prepare_global_plan", "finish")]
    assert second["save"] == ["reset", *on_all]


def test_a_rank_that_dies_in_its_save_leaves_the_checkpoint_before(memory: Path, root: Path) -> None:
    assert all(ranks(2, save_sharded, root, "durable"))
    results, codes = attempt(2, die_in_save, root)
    assert codes[1] == -9 and results[1] is None
    assert all(ranks(2, load_sharded, root))


def die_in_save(rank: int, root: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from rekindle.common import failpoints
    from rekindle.integrations.dcp import RekindleWriter

    failpoints.arm("save.copied" if rank == 1 else "")
    dcp.save(sharded_state(2, False), storage_writer=RekindleWriter(root))
