"""Replica groups, made by real ranks over gloo; ranks on different nodes are in UTS namespaces of their own."""

from __future__ import annotations

import ctypes
import json
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

import rekindle
from rekindle.state import replicas
from tests.fork_server import context

_CLONE_NEWUTS = 0x04000000
_Answer = Callable[[int], Any]


def _move_to(node: str) -> bool:
    """Give this process a host name of its own. False where that isn't allowed."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWUTS) != 0:
        return False
    socket.sethostname(node)
    return True


def _rank(place: Path, rank: int, nodes: list[str], answer: _Answer) -> None:
    try:
        moved = not nodes[rank] or _move_to(nodes[rank])
        dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=len(nodes))
        found = answer(rank) if moved else "not allowed"
        dist.barrier()
    except Exception:
        found = traceback.format_exc()
    (place / f"{rank}.json").write_text(json.dumps(found))


def _ask(place: Path, nodes: list[str], answer: _Answer) -> list[Any]:
    """What each rank of a group of processes answers; ``nodes`` names the host of each."""
    ranks = [context.Process(target=_rank, args=(place, rank, nodes, answer)) for rank in range(len(nodes))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    found = [json.loads((place / f"{rank}.json").read_text()) for rank in range(len(nodes))]
    if "not allowed" in found:
        pytest.skip("may not make a UTS namespace")
    return found


def _parts(copies: int, rank: int) -> Any:
    made = rekindle.replica_groups(copies=copies)
    assert dist.get_process_group_ranks(made.host) == list(made.ranks)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=made.group)
    assert total.item() == sum(made.ranks)
    return made.parts


def _in_two(rank: int) -> Any:
    return _parts(2, rank)


def _in_three(rank: int) -> Any:
    return _parts(3, rank)


@pytest.mark.parametrize(
    ("nodes", "answer", "parts"),
    [
        (["", "", "", ""], _in_two, [[0, 1], [2, 3]]),
        (["", "", "", "", ""], _in_two, [[0, 1, 2], [3, 4]]),
        (["", "", "", "", ""], _in_three, [[0, 1], [2, 3], [4]]),
        (["a", "b", "a", "b"], _in_two, [[0, 2], [1, 3]]),
        (["a", "b", "a", "b", "a"], _in_two, [[0, 2, 4], [1, 3]]),
    ],
    ids=["even", "odd", "thirds", "two-nodes", "two-nodes-odd"],
)
def test_each_part_is_whole_and_on_nodes_of_its_own(
    nodes: list[str], answer: _Answer, parts: list[list[int]], tmp_path: Path
) -> None:
    assert _ask(tmp_path, nodes, answer) == [parts] * len(nodes)


def _dense_and_expert(rank: int) -> Any:
    """Two experts' groups, and the dense one of all ranks, which the same ranks are in."""
    dense = rekindle.replica_groups(copies=2)
    experts = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])]
    expert = rekindle.replica_groups(experts[rank // 4], copies=2)
    return dense.ranks, expert.ranks


def test_dense_and_expert_groups_are_split_one_by_one(tmp_path: Path) -> None:
    found = _ask(tmp_path, [""] * 8, _dense_and_expert)
    assert [dense for dense, _ in found] == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    assert [expert for _, expert in found] == [[0, 1]] * 2 + [[2, 3]] * 2 + [[4, 5]] * 2 + [[6, 7]] * 2


def _too_many(rank: int) -> Any:
    with pytest.raises(rekindle.UsageError) as error:
        rekindle.replica_groups(copies=4)
    return str(error.value)


def test_an_error_names_the_ranks(tmp_path: Path) -> None:
    assert set(_ask(tmp_path, [""] * 3, _too_many)) == {"copies is 4: must be 1 to 3 for the group of ranks [0, 1, 2]"}


def _hybrid(rank: int) -> Any:
    """An update of a model that is sharded within the parts, then the bytes of this rank's shards."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=rekindle.replica_groups(copies=2).mesh("cpu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.full((2, 8), float(rank))).pow(2).sum().backward()
    optimizer.step()
    return [parameter.to_local().tolist() for parameter in model.parameters()]


def test_a_mesh_for_fully_shard_holds_a_copy_in_each_part(tmp_path: Path) -> None:
    found = _ask(tmp_path, ["a", "b", "a", "b"], _hybrid)
    assert found[0] == found[1] and found[2] == found[3], "part (0, 2) on node a, part (1, 3) on node b"
    assert found[0] != found[2]


def _uneven(rank: int) -> Any:
    with pytest.raises(rekindle.UsageError) as error:
        rekindle.replica_groups(copies=2).mesh("cpu")
    return str(error.value)


def test_no_mesh_of_uneven_parts(tmp_path: Path) -> None:
    assert set(_ask(tmp_path, [""] * 3, _uneven)) == {"no mesh can have parts of different sizes: [[0, 1], [2]]"}


def _costs(rank: int) -> Any:
    """For 1, 2 and 4 copies: bytes of optimizer state, and bytes of parameters sent within the part, at an update."""
    from torch._C._distributed_c10d import _dump_fr_trace_json

    found = []
    for copies in (1, 2, 4):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
        part = rekindle.replica_groups(copies=copies)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=part.group, lr=1e-3)
        model(torch.ones(2, 64)).sum().backward()
        before = len(json.loads(_dump_fr_trace_json())["entries"])
        optimizer.step()
        entries = json.loads(_dump_fr_trace_json())["entries"][before:]
        sent = sum(torch.Size(shape).numel() * 4 for entry in entries for shape in entry["input_sizes"])
        state = sum(value.nbytes for kept in optimizer.optim.state.values() for value in kept.values() if value.dim())
        found.append((state, sent if len(part.ranks) > 1 else 0))
    return found


def test_memory_and_traffic_are_as_the_guide_says(tmp_path: Path) -> None:
    """d = 4 ranks, n copies, s bytes of state, p bytes of parameters: n s / d bytes kept, p sent among d / n ranks."""
    parameters = 8 * 64 * 64 * 4
    state = 2 * parameters
    for seen in _ask(tmp_path, [""] * 4, _costs):
        assert seen == [[copies * state // 4, parameters if copies < 4 else 0] for copies in (1, 2, 4)]


class _NoHash(type):
    """A type of types that can be compared, and so have no hash."""

    def __eq__(cls, other: object) -> bool:
        return cls is other


def test_wrappers_are_found_beside_objects_of_any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper:
        pass

    class Derived(Wrapper):
        pass

    monkeypatch.setattr(replicas, "DistributedDataParallel", Wrapper)
    there = [Wrapper(), Derived(), _NoHash("Odd", (), {})()]
    assert set(map(id, replicas._wrappers())) == set(map(id, there[:2]))
