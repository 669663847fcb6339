"""Ranks that restore the same bytes from storage: each byte is read by one of them, and all of them have it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import receipt_name, shard_name, step_dir
from rekindle.format.reader import ShardReader
from rekindle.format.receipt import Receipt
from rekindle.memory.nodes import Node, Nodes
from rekindle.peers.snapshots import snapshot_handlers
from rekindle.peers.wire import Link
from rekindle.restore.broadcast import BlockRequest, broadcast_common, readers_together
from rekindle.save.capture import Capture
from rekindle.save.copy import ShardWriter
from rekindle.session.group import this_group
from rekindle.storage.posix import PosixStore
from tests.fork_server import context
from tests.integrations.dcp.ranks import ranks
from tests.peers.peer import Memory, far_job, files_at, put, serving

WIDTH = 1 << 20  # elements: 4 MiB a tensor
FIRST = Incarnation(1, "a" * 16)


def build(seed: int, rank: int) -> dict[str, Any]:
    """Tensors that all ranks have alike, of several dtypes and layouts, and one of the rank's own."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(1000 * (rank + 1) + seed)
    model = torch.nn.Module()
    for number in range(6):
        model.register_parameter(f"w{number}", torch.nn.Parameter(torch.randn(WIDTH + number, generator=generator)))
    model.register_buffer("big", torch.randn(5 << 20, generator=generator))  # 20 MiB: two blocks
    model.register_buffer("turned", torch.randn(300, 500, generator=generator).t())
    model.register_buffer("zeros", torch.zeros(3, 100_000) + seed)
    model.register_buffer("more_zeros", torch.zeros(100_000, 3) + seed)
    model.register_buffer("scalar", torch.tensor(seed + 0.5, dtype=torch.float64))
    model.register_buffer("own", torch.randn(300_000, generator=own))
    return {"model": model}


def save(store: PosixStore, step: int, world: int) -> None:
    for rank in range(world):
        plan, values = Capture(build(step, rank), rng=False).prepare()
        data = bytearray(plan.layout.file_bytes)
        import mmap

        slot = mmap.mmap(-1, len(data))
        writer = ShardWriter()
        _, sums = writer.write(plan, slot, None, step)
        writer.close()
        receipt = Receipt.decode(Receipt.encode(ShardId(step, rank, world, FIRST), plan.static, sums, values), "test")
        store.write_shard(receipt, memoryview(slot), lambda nbytes: None)
    assert store.publish(receipt.stamp)


def restore_in_rank(root: Path, rank: int, world: int, shards: int, pipe: Any) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    from rekindle.restore.restore import restore
    from rekindle.session.group import ProcessGroup

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}.rendezvous", rank=rank, world_size=world)
    try:
        state = build(99, rank)
        done, _ = restore(ProcessGroup(timedelta(seconds=30)), state, None, PosixStore(root), None, allow_pickle=False)
        wanted = build(done.step, rank % shards)["model"].state_dict()
        same = all(
            torch.equal(
                tensor.contiguous().view(-1).view(torch.uint8), wanted[key].contiguous().view(-1).view(torch.uint8)
            )
            for key, tensor in state["model"].state_dict().items()
        )
        pipe.send((done.step, same, done.read, done.nbytes))
    except Exception as error:
        pipe.send((type(error).__name__, str(error), 0, 0))
    os._exit(0)


def restore_all(root: Path, world: int, shards: int) -> list[tuple[Any, Any, int, int]]:
    """Step, whether the state is exactly that step's, bytes read and bytes of the shard: of each rank."""
    Path(f"{root}.rendezvous").unlink(missing_ok=True)
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(False)
        processes.append(context.Process(target=restore_in_rank, args=(root, rank, world, shards, theirs)))
        processes[-1].start()
        pipes.append(ours)
    deadline = time.monotonic() + 60
    try:
        for pipe in pipes:
            assert pipe.poll(max(0.0, deadline - time.monotonic())), "a rank hangs"
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def damage(root: Path, step: int, rank: int, world: int, tensor: str, length: int | None = None) -> None:
    directory = root / step_dir(step)
    path = directory / receipt_name(rank, world)
    receipt = Receipt.decode(path.read_bytes(), path)
    (at,) = [receipt.header_bytes + c.start for c in receipt.layout.chunks if c.name == tensor]
    with open(directory / shard_name(rank, world), "r+b") as file:
        file.seek(at + 1000)
        byte = file.read(1)[0]
        file.seek(at + 1000)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def store(root: Path) -> PosixStore:
    return PosixStore(root)


@pytest.mark.parametrize(("world", "shards"), [(2, 2), (3, 3), (3, 2), (3, 1)])
def test_each_byte_is_read_once_and_every_rank_has_its_own_state(store, world, shards):
    save(store, 1, shards)
    came = restore_all(store.root, world, shards)
    assert [(step, same) for step, same, _, _ in came] == [(1, True)] * world
    whole = came[0][3]
    own = 4 * 300_000 if shards > 1 else 0
    once = whole + world * (own + (256 << 10))  # headers, and pages that blocks share
    assert sum(read for _, _, read, _ in came) < once, came
    assert max(read for _, _, read, _ in came) < 0.75 * whole, "one rank reads most of it"


DAMAGES = [(rank, tensor) for rank in (0, 1) for tensor in ("model.w0", "model.w5", "model.big", "model.own")]
FEW = [(0, "model.big"), (1, "model.w0"), (1, "model.own")]
"""A tensor of two blocks, one of a single block, and one that only this rank has."""


@pytest.mark.parametrize(
    ("rank", "tensor"), [pytest.param(*d, marks=[pytest.mark.campaign] * (d not in FEW)) for d in DAMAGES]
)
def test_a_rank_with_a_damaged_copy_takes_all_ranks_to_the_older_step(store, rank, tensor):
    save(store, 1, 2)
    save(store, 2, 2)
    damage(store.root, 2, rank, 2, tensor)
    came = restore_all(store.root, 2, 2)
    # What the rank was to send and has damaged, the other one reads from its own copy. What the rank was to receive it
    # got from the other one's sound copy, so then even its own damaged file does no harm.
    assert all(same is True for _, same, _, _ in came), came
    assert len({step for step, _, _, _ in came}) == 1
    if tensor == "model.own":
        assert came[0][0] == 1


def _meet_in_parts(rank: int) -> list[Any]:
    """Ranks 1 and 2 are a node, and rank 1 is in a group more than rank 2, as with pipelines and tied embeddings."""
    torch.distributed.new_group([0, 1])
    nodes = Nodes("b" * 16, 1, bytes(32), 0, [Node("a", "", 0, [0]), Node("b", "", 0, [1, 2])])
    met = []
    for _ in range(2):  # as with two candidates
        with readers_together(this_group(), [False, True, True], nodes) as part:
            met.append(part and part.gather(rank))
    return met


def test_the_ranks_of_a_node_meet_though_they_are_in_different_numbers_of_groups():
    assert ranks(3, _meet_in_parts) == [[None, None], [[1, 2], [1, 2]], [[1, 2], [1, 2]]]


def test_nothing_sound_is_an_error_on_all_ranks_and_none_hangs(store):
    save(store, 1, 2)
    damage(store.root, 1, 1, 2, "model.own")
    came = restore_all(store.root, 2, 2)
    assert [kind for kind, _, _, _ in came] == ["CorruptError"] * 2
    assert all("partly overwritten" in text for _, text, _, _ in came)


def test_a_file_cut_short_is_no_reason_to_hang(store):
    save(store, 1, 2)
    save(store, 2, 2)
    path = store.root / step_dir(2) / shard_name(1, 2)
    os.truncate(path, path.stat().st_size - 5000)
    assert [(step, same) for step, same, _, _ in restore_all(store.root, 2, 2)] == [(1, True)] * 2


def _read_from_a_node_that_goes(rank: int, port: int) -> tuple[int, int]:
    """Blocks that came, and that did not."""
    with files_at(port).shard(0, 1) as shard:
        request = BlockRequest(ShardReader(shard), Memory(shard), list(range(len(shard.receipt.layout.blocks))))
        wanted = len(request.left)
        broadcast_common(this_group(), [request])
        return wanted - len(request.left), len(request.left)


def test_a_node_that_goes_meanwhile_is_waited_for_once(memory: Path) -> None:
    """Whoever reads from a host that has lost power waits for it at each read."""
    job, reads = far_job(memory), []
    put(job, 7, {f"t{number:02}": bytes([number]) * (4 << 20) for number in range(24)})
    handlers = snapshot_handlers(job)

    def read(link: Link, message: dict[str, Any]) -> dict[str, Any] | None:
        reads.append(message)
        if len(reads) > 4:
            raise OSError("gone")
        return handlers["read"](link, message)

    with serving(handlers | {"read": read}) as port:
        came = ranks(2, _read_from_a_node_that_goes, port)
    assert len(reads) < 20, "what was under way ends"
    assert all(0 < blocks < 24 and blocks + left == 24 for blocks, left in came), came
