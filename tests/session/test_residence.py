"""Ranks of one node have one memory store: else no agent would find the shards of all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import rekindle
from rekindle.integrations.dcp import RekindleWriter
from tests.integrations.dcp.ranks import ranks


def _save(rank: int, root: Path, memories: list[Path]) -> str:
    state = {"values": rekindle.Values(weights=torch.zeros(10))}
    try:
        ckpt = rekindle.Checkpointer(root, state, memory=memories[rank])
    except rekindle.UsageError as error:
        return str(error)
    ckpt.restore()
    ckpt.save(1, wait="durable", timeout=60)
    ckpt.close(timeout=60)
    return "saved"


def _save_by_dcp(rank: int, root: Path, memories: list[Path]) -> str:
    writer = RekindleWriter(root, memory=memories[rank])
    try:
        dcp.save({"weights": torch.zeros(10)}, storage_writer=writer)
    except dcp.api.CheckpointException as error:
        return str(error)
    writer.close(timeout=60)
    return "saved"


@pytest.mark.parametrize("save", [_save, _save_by_dcp])
def test_ranks_of_one_node_with_two_memory_stores_are_refused_and_told_both(
    save: Callable[..., str], root: Path, memory: Path
) -> None:
    memories = [memory / "one", memory / "other"]
    for told in ranks(2, save, root, memories):
        assert "ranks 0 and 1 run on one node" in told and "give all ranks of a node the same memory=" in told
        assert f"{memories[0]}/rekindle-" in told and f"{memories[1]}/rekindle-" in told


@pytest.mark.parametrize("save", [_save, _save_by_dcp])
def test_one_memory_store_by_two_names_is_one(save: Callable[..., str], root: Path, memory: Path) -> None:
    (memory / "alias").symlink_to(memory)
    assert ranks(2, save, root, [memory, memory / "alias"]) == ["saved"] * 2


@pytest.mark.parametrize("save", [_save, _save_by_dcp])
def test_ranks_with_file_systems_of_their_own_are_nodes_of_their_own(
    save: Callable[..., str], root: Path, small_tmpfs: Callable[[int], Path]
) -> None:
    """As containers on one host have, each with its own /dev/shm."""
    assert ranks(2, save, root, [small_tmpfs(8 << 20), small_tmpfs(8 << 20)]) == ["saved"] * 2
