"""The stand-in for torch_nebula, by several ranks that die at any moment: a checkpoint counts whole, or not at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from rekindle.agent.file_drain import FileDrainer
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.lock import Lock
from rekindle.provide import torch_nebula as tn
from tests.faults.harness import wait_for
from tests.files.programs import KILLED
from tests.provide.ranks import run_ranks
from tests.provide.test_torch_nebula import is_ok, same, settle, state


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_commit(rank: int, tag: str) -> None:
    checkpoint = tn.Checkpoint(tag, -2)
    checkpoint.save(f"rank_{rank}.pt", state(rank))
    assert checkpoint.commit()


def one_dies_between(rank: int, root: str) -> None:
    tn.init(root, 0)
    save_and_commit(rank, "first")
    dist.barrier()
    if rank == 1:
        checkpoint = tn.Checkpoint("second", -2)
        checkpoint.save("rank_1.pt", state(1))
        die()
    save_and_commit(rank, "second")
    die()


def test_a_rank_that_is_killed_between_save_and_commit_leaves_the_checkpoint_before(
    store: FilesDir, root: Path, tmp_path: Path, memory: Path, caplog
) -> None:
    assert run_ranks(one_dies_between, tmp_path, [memory] * 2, str(root)) == [KILLED, KILLED]
    tn.init(root, 0)
    latest = tn.get_latest_checkpoint()
    assert latest is not None and latest.tag == "first"
    assert tn.get_checkpoint("second") is None and "not complete: 'second'" in caplog.text
    assert tn.flush_persistence(tag="first") is True
    wait_for((root / "second" / "rank_1.pt").exists)
    assert not is_ok(root, "second")
    # The next start goes on from the first, and gets as far again.
    found = tn.Checkpoint("second", -2)
    for rank in range(2):
        found.save(f"rank_{rank}.pt", state(7))
    assert found.commit() and tn.flush_persistence() is True
    assert is_ok(root, "second") and same(torch.load(root / "second" / "rank_1.pt", weights_only=True), 7)


def commit_and_die(rank: int, root: str, tag: str) -> None:
    tn.init(root, 0)
    save_and_commit(rank, tag)
    dist.barrier()
    die()


def test_ranks_that_are_killed_after_the_commit_lose_nothing(
    drainer: FileDrainer, store: FilesDir, root: Path, tmp_path: Path, memory: Path
) -> None:
    """Nothing has reached storage when they die: the test carries the files, and not an agent."""
    assert run_ranks(commit_and_die, tmp_path, [memory] * 3, str(root), "a") == [KILLED] * 3
    assert not root.exists()
    tn.init(root)
    latest = tn.get_latest_checkpoint()
    assert latest is not None and latest.tag == "a"
    assert all(same(latest.load(f"rank_{rank}.pt"), rank) for rank in range(3))
    settle(drainer)
    assert is_ok(root, "a")
    assert all(same(torch.load(root / "a" / f"rank_{rank}.pt", weights_only=True), rank) for rank in range(3))


def commit_in_turn(rank: int, root: str) -> None:
    os.environ["REKINDLE_FILES_LIMIT"] = "1"
    tn.init(root, 0)
    checkpoint = tn.Checkpoint("a", -2)
    checkpoint.save(f"rank_{rank}.pt", state(rank))
    if rank == 1:
        dist.barrier()
    assert tn.get_checkpoint("a") is None and checkpoint.commit() is True
    if rank == 0:
        dist.barrier()
    dist.barrier()
    assert tn.get_checkpoint("a") is not None


def test_ranks_that_find_memory_full_commit_one_after_the_other(
    store: FilesDir, root: Path, tmp_path: Path, memory: Path
) -> None:
    assert run_ranks(commit_in_turn, tmp_path, [memory] * 2, str(root)) == [0, 0]
    assert is_ok(root, "a") and all((root / "a" / f"rank_{rank}.pt").exists() for rank in range(2))


def count_and_die(rank: int, root: str) -> None:
    tn.init(root, 0)
    checkpoint = tn.Checkpoint("a", 4)
    checkpoint.save(f"x{rank}.pt", state(rank))
    dist.barrier()
    assert tn.list_checkpoints()["a"]["complete"] is False
    dist.barrier()
    checkpoint.save(f"y{rank}.pt", state(rank))
    dist.barrier()
    latest = tn.get_latest_checkpoint()
    assert latest is not None and latest.tag == "a"
    die()


def test_partitions_are_counted_over_all_ranks(store: FilesDir, root: Path, tmp_path: Path, memory: Path) -> None:
    assert run_ranks(count_and_die, tmp_path, [memory] * 2, str(root)) == [KILLED] * 2
    tn.init(root)
    assert tn.flush_persistence() is True
    assert tn.list_checkpoints()["a"]["partitions"] == ["x0.pt", "x1.pt", "y0.pt", "y1.pt"]


def test_a_checkpoint_of_two_nodes_is_complete_when_both_have_carried_theirs(
    store: FilesDir, root: Path, tmp_path: Path, memory: Path
) -> None:
    nodes = [FilesDir.below(path / f"rekindle-{os.getuid()}") for path in (memory / "a", memory / "b")]
    for node in nodes:
        node.path.parent.parent.mkdir(parents=True)
        node.path.parent.mkdir(mode=0o700)
        node.create()
    locks = [Lock(node.paths.agent_lock) for node in nodes]
    assert all(lock.acquire() for lock in locks)  # no agent: the test carries the files
    memories = [memory / "a", memory / "b"]
    assert run_ranks(commit_and_die, tmp_path, memories, str(root), "t") == [KILLED] * 2
    first, second = (FileDrainer(node) for node in nodes)
    settle(first)
    assert (root / "t" / "rank_0.pt").exists() and not is_ok(root, "t")
    assert "rank-1-of-2" in (first.progress.error or "")
    settle(second)
    assert is_ok(root, "t")
    for lock in locks:
        lock.release()


def test_a_checkpoint_whose_other_node_was_lost_does_not_keep_memory_for_ever(
    root: Path, tmp_path: Path, memory: Path, monkeypatch
) -> None:
    monkeypatch.setenv("REKINDLE_FILES_IDLE_TIMEOUT", "0.2")
    node = FilesDir.below(memory / f"rekindle-{os.getuid()}")
    lost = FilesDir.below(memory / "lost" / f"rekindle-{os.getuid()}")
    lost.path.parent.parent.mkdir(parents=True)
    lost.path.parent.mkdir(mode=0o700)
    lost.create()
    lock = Lock(lost.paths.agent_lock)
    assert lock.acquire()
    memories = [memory, memory / "lost"]
    assert run_ranks(commit_patiently, tmp_path, memories, str(root), "t") == [KILLED] * 2
    wait_for(lambda: not node.path.exists())
    assert (root / "t" / "rank_0.pt").exists() and not is_ok(root, "t")
    lock.release()


def commit_patiently(rank: int, root: str, tag: str) -> None:
    os.environ["REKINDLE_FILES_IDLE_TIMEOUT"] = "0.2"
    commit_and_die(rank, root, tag)


def latest_of_all(rank: int, root: str) -> None:
    tn.init(root)
    found = tn.get_latest_checkpoint()
    assert found is not None
    Path(f"{root}-{rank}").write_text(found.tag)


def test_all_ranks_go_on_from_the_same_checkpoint(store: FilesDir, root: Path, tmp_path: Path, memory: Path) -> None:
    tn.init(root, 0)
    for tag in ("a", "b"):
        found = tn.Checkpoint(tag, -2)
        found.save("x", state(1))
        found.commit()
    assert tn.flush_persistence() is True
    # The second node sees storage only, and one of them may see more than the other.
    other = memory / "other"
    other.mkdir()
    assert run_ranks(latest_of_all, tmp_path, [memory, other], str(root)) == [0, 0]
    assert {Path(f"{root}-{rank}").read_text() for rank in range(2)} == {"b"}
