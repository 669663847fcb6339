"""Implements DCP's ``StorageReader``: reads what DCP's planners ask for from memory or storage, each block verified."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from rekindle.errors import CorruptError, RekindleError
from rekindle.integrations.dcp.checkpoint import DcpCheckpoint, find
from rekindle.integrations.dcp.fill import Read, fill
from rekindle.integrations.dcp.names import is_place, name_of, place_of, step_of
from rekindle.integrations.dcp.session import note_loaded, rank_of, saves_to
from rekindle.memory.job_dir import JobDir, memory_base

__all__ = ["RekindleReader"]


class RekindleReader(StorageReader):
    """Loads DCP's state dicts from what a RekindleWriter, or a Checkpointer, has saved under ``root``.

    Any number of ranks, or a process alone, may read what any number has saved. Each reads the blocks that it needs, in
    this node's memory if the whole checkpoint is there, else on storage, and compares all of them with their checksums;
    a damaged copy in memory is replaced by that on storage. Not thread-safe.

    root
        Directory, or ``file://`` URL. ``ROOT/step-N`` names the root and the step.
    memory
        Directory of the memory store; default $REKINDLE_MEMORY, else /dev/shm.

    ``checkpoint_id`` names a step as for RekindleWriter; without one, the newest checkpoint is loaded that is whole.
    DCP's CheckpointException holds each rank's error: NotFoundError when there is no such checkpoint, CorruptError when
    a shard, or a part of a tensor, is missing or damaged. The state dict may then be partly overwritten.

    Values that are not tensors are unpickled by DCP, as with its own storage: load only what you trust.
    """

    def __init__(self, root: str | os.PathLike[str], *, memory: str | os.PathLike[str] | None = None) -> None:
        self._root, self._step = place_of(root)
        self._wanted: str | os.PathLike[str] | int | None = self._step
        self._job = JobDir.of(self._root, memory_base(memory))
        self._checkpoint: DcpCheckpoint | None = None
        self._rank = 0
        self._load_id = secrets.token_hex(16)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Load the step that ``checkpoint_id`` names, from now on."""
        self._wanted, self._load_id = checkpoint_id, secrets.token_hex(16)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Finds the checkpoint and describes it. An error is raised by the first look at the result.

        DCP takes an error from here for a sign to look for metadata of single ranks, and reports it as an
        AssertionError.
        """
        self._checkpoint = None
        try:
            self._step = None if self._wanted is None else step_of(self._wanted, self._root)
            self._checkpoint = find(self._root, self._job, self._step, own=saves_to(self._root))
        except (OSError, RekindleError) as error:
            return _Unreadable(error)
        metadata = self._checkpoint.metadata()
        save = self._checkpoint.shards[0].receipt.stamp.save or None
        path = name_of(self._checkpoint.key[0], self._root)
        metadata.storage_meta = StorageMeta(checkpoint_id=path, save_id=save, load_id=self._load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises the error that ``read_metadata`` has met."""
        if isinstance(metadata, _Unreadable):
            raise metadata.error
        self._rank = rank_of(kwargs, sys._getframe(1))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Notes which checkpoint this rank has found."""
        assert self._checkpoint is not None
        return dataclasses.replace(plan, storage_data=self._checkpoint.key)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Makes sure that all ranks have found the same checkpoint. Raises CorruptError."""
        found = {plan.storage_data for plan in plans}
        if len(found) > 1:
            seen = sorted({f"step {key[0]} of generation {key[1].generation}" for key in found if key is not None})
            raise CorruptError(
                f"the ranks see different checkpoints of {self._root} as the newest one: {', '.join(seen)}; name the "
                "step by checkpoint_id"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills what the plan asks for. Done when this returns."""
        checkpoint = self._checkpoint
        assert checkpoint is not None
        by_shard: dict[int, list[Read]] = {}
        for item in (item for item in plan.items if item.type == LoadItemType.TENSOR):
            stored = checkpoint.stored(item.storage_index)
            own = self._rank % len(checkpoint.shards)
            holder = own if own in stored.places else min(stored.places)
            chunk = stored.places[holder]
            by_shard.setdefault(holder, []).append(Read(item, chunk, planner.resolve_tensor(item).detach()))
        with torch.no_grad():
            for holder, reads in sorted(by_shard.items()):
                fill(checkpoint.shards[holder], reads)
        for read in (read for reads in by_shard.values() for read in reads):
            planner.commit_tensor(read.item, read.target)
        for item in (item for item in plan.items if item.type == LoadItemType.BYTE_IO):
            planner.load_bytes(item, checkpoint.value(item.storage_index.fqn, self._rank))
        note_loaded(self._root, checkpoint.key, named=self._step is not None)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def checkpoint_id(self) -> str:
        """Path of the checkpoint that is asked for; that of the root, where it is the newest one."""
        return name_of(self._wanted, self._root)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns True if it can be a root, or ``ROOT/step-N``."""
        return is_place(checkpoint_id)


class _Unreadable(Metadata):
    """Metadata that can't be had: raises the error when it is looked at."""

    def __init__(self, error: Exception) -> None:
        super().__init__({})
        self.error = error

    @property
    def state_dict_metadata(self) -> Any:
        raise self.error

    @state_dict_metadata.setter
    def state_dict_metadata(self, value: Any) -> None:
        pass
