"""A checkpoint object that is used again, in rounds: each round is complete by its own partitions, on all ranks."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rekindle.agent.file_drain import FileDrainer
from rekindle.memory.files_dir import FilesDir
from rekindle.provide import torch_nebula as tn
from rekindle.provide.torch_nebula import checkpoint as checkpoints
from tests.provide.nebula import is_ok, same, settle, state
from tests.provide.ranks import run_ranks


def is_complete() -> bool:
    return bool(tn.list_checkpoints()["a"]["complete"])


def test_each_round_counts_its_own_partitions(drainer: FileDrainer, root: Path) -> None:
    tn.init(root, 0)
    checkpoint = tn.Checkpoint("a", 2)
    for seed in (1, 2, 3):
        checkpoint.save("x", state(seed))
        assert not is_complete()
        settle(drainer)
        assert not is_ok(root, "a")
        checkpoint.save("y", state(seed))
        assert is_complete()
        settle(drainer)
        assert is_ok(root, "a")
        assert all(same(torch.load(root / "a" / name, weights_only=True), seed) for name in "xy")


def test_partitions_have_other_names_in_the_next_round(drainer: FileDrainer, root: Path) -> None:
    tn.init(root, 0)
    checkpoint = tn.Checkpoint("a", 2)
    for seed in (1, 2):
        checkpoint.save(f"x{seed}", state(seed))
        assert not is_complete()
        checkpoint.save(f"y{seed}", state(seed))
        assert is_complete()


def count_in_rounds(rank: int, root: str) -> None:
    tn.init(root, 0)
    checkpoint = tn.Checkpoint("a", 2)
    for seed in (1, 2, 3):
        dist.barrier()
        if rank == seed % 2:  # in each round another one goes first
            checkpoint.save(f"x{rank}", state(seed))
            assert not is_complete()
        dist.barrier()
        if rank != seed % 2:
            checkpoint.save(f"x{rank}", state(seed))
        dist.barrier()
        assert is_complete()
        for number in range(2):
            assert same(checkpoint.load(f"x{number}"), seed)
        dist.barrier()


def test_ranks_count_the_partitions_of_each_round(store: FilesDir, root: Path, tmp_path: Path, memory: Path) -> None:
    assert run_ranks(count_in_rounds, tmp_path, [memory] * 2, str(root)) == [0, 0]


def one_saves_all(rank: int, root: str) -> None:
    """In turn, so that a rank takes no part in the first round and is the only one in the second."""
    tn.init(root, 0)
    checkpoint = tn.Checkpoint("a", 2)
    for seed in range(4):
        dist.barrier()
        if rank == seed % 2:
            checkpoint.save("x", state(seed))
            assert not is_complete()
            checkpoint.save("y", state(seed))
            assert is_complete()
        dist.barrier()
        assert is_complete() and same(checkpoint.load("x"), seed) and same(checkpoint.load("y"), seed)


def test_a_rank_may_take_no_part_in_a_round(store: FilesDir, root: Path, tmp_path: Path, memory: Path) -> None:
    assert run_ranks(one_saves_all, tmp_path, [memory] * 2, str(root)) == [0, 0]


def one_is_ahead(rank: int, root: str, files: int) -> None:
    tn.init(root, 0)
    checkpoint = tn.Checkpoint("a", files)

    def save(seed: int) -> None:
        checkpoint.save(f"x{rank}", state(seed))
        if files == -2:
            assert checkpoint.commit()

    if rank == 0:
        save(1)
        save(2)
    dist.barrier()
    if rank == 1:
        save(1)
    dist.barrier()
    # Of the first round there is one partition, and of the second the other.
    assert not is_complete() and tn.get_checkpoint("a") is None
    dist.barrier()
    if rank == 1:
        save(2)
    dist.barrier()
    assert is_complete() and all(same(checkpoint.load(f"x{number}"), 2) for number in range(2))
    assert tn.flush_persistence() and is_ok(Path(root), "a")
    dist.barrier()


def test_a_rank_that_is_a_round_ahead_completes_none_with_the_others_older_partition(
    store: FilesDir, root: Path, tmp_path: Path, memory: Path
) -> None:
    assert run_ranks(one_is_ahead, tmp_path, [memory] * 2, str(root), 2) == [0, 0]


def test_a_rank_that_commits_a_round_ahead_completes_none_with_the_others_older_partition(
    store: FilesDir, root: Path, tmp_path: Path, memory: Path
) -> None:
    assert run_ranks(one_is_ahead, tmp_path, [memory] * 2, str(root), -2) == [0, 0]


def latest_is_the_same(rank: int, root: str) -> None:
    tn.init(root, 0)
    real, told = checkpoints.agree, Path(root + f"-{rank}")
    found = []
    for seed in range(3):
        if rank == 0:  # it is slow just after it has drawn the version

            def slow(key: str, value: str) -> str:
                agreed = real(key, value)
                time.sleep(1.0)
                return agreed

            checkpoints.agree = slow
        else:
            time.sleep(0.3)
        checkpoint = tn.Checkpoint(f"s{seed}", -2)
        checkpoint.save(f"x{rank}", state(seed))
        checkpoints.agree = real
        assert checkpoint.commit()
        latest = tn.get_latest_checkpoint()
        found.append(latest.tag if latest is not None else "")
        dist.barrier()
    told.write_text(json.dumps(found))


def test_no_rank_sees_a_checkpoint_begun_before_it_asks_for_the_newest_anew(
    store: FilesDir, root: Path, tmp_path: Path, memory: Path
) -> None:
    assert run_ranks(latest_is_the_same, tmp_path, [memory] * 2, str(root)) == [0, 0]
    first, second = (json.loads(Path(f"{root}-{rank}").read_text()) for rank in range(2))
    assert first == second


def one_fails_once(rank: int, root: str, at: str) -> None:
    tn.init(root, 0)
    checkpoint, real = tn.Checkpoint("a", 2), tn.Checkpoint._put

    def fail(writing: Any, name: str, *rest: Any) -> None:
        if name == at or not at:
            raise OSError("storage refuses")
        real(checkpoint, writing, name, *rest)

    for seed, first in ((1, 0), (2, 0), (3, 1), (4, 0)):
        for number in (first, 1 - first):
            if (rank, number, seed) == (1, 1, 1):
                checkpoint._put = fail  # type: ignore[method-assign]
                with pytest.raises(OSError, match="refuses"):
                    checkpoint.save("x1", state(seed))  # and the program goes on
                checkpoint._put = functools.partial(real, checkpoint)  # type: ignore[method-assign]
            elif rank == number:
                checkpoint.save(f"x{rank}", state(seed))
            dist.barrier()
            assert is_complete() == (seed > 1 and number != first)
            dist.barrier()
        if seed > 1:
            assert all(same(checkpoint.load(f"x{number}"), seed) for number in range(2))
        dist.barrier()


@pytest.mark.parametrize("at", ["x1", ""])
def test_a_rank_whose_save_failed_takes_part_in_the_round_that_the_others_are_in(
    at: str, store: FilesDir, root: Path, tmp_path: Path, memory: Path
) -> None:
    assert run_ranks(one_fails_once, tmp_path, [memory] * 2, str(root), at) == [0, 0]
