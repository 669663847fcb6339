"""Implements DCP's ``StorageWriter``: makes each rank's part of DCP's plan a shard in memory, which the agent
drains."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from typing import Any, NamedTuple, NoReturn

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from rekindle.common.timeouts import check_timeout
from rekindle.errors import UsageError
from rekindle.format.lineage import ShardId
from rekindle.format.names import root_path
from rekindle.integrations.dcp.items import plan_shard
from rekindle.integrations.dcp.messages import Message
from rekindle.integrations.dcp.names import is_place, name_of, place_of, step_of
from rekindle.integrations.dcp.session import WriterSettings, rank_of, session_of
from rekindle.integrations.dcp.stager import RekindleStager
from rekindle.settings import Settings

__all__ = ["RekindleWriter"]


class _Written(NamedTuple):
    """A rank's word to the coordinator with each item."""

    in_memory: bool


class RekindleWriter(StorageWriter, AsyncStager):
    """Saves DCP's state dicts into memory; an agent carries them to ``root``. Also the stager of ``dcp.async_save``.

    Every rank that saves makes one, after ``init_process_group()``. The ranks of its first save, all of the job or
    those of a ``process_group``, make all saves to that root. Not thread-safe, but for what DCP itself does. When
    ``dcp.save`` returns, the checkpoint survives the death of all ranks; where memory has no room, it is on storage.

    root
        Directory, or ``file://`` URL, that checkpoints are kept in. ``ROOT/step-N`` names the root, and the step too.
    keep
        How many checkpoints stay on storage: the newest so many. None: all of them, and each save waits until the one
        before has reached storage, so that none is passed over; with a number only the newest one goes there.
    drain_limit
        What a node writes to storage at most: bytes per second, or a text such as "500MB/s".
    memory
        Directory of the memory store; default $REKINDLE_MEMORY, else /dev/shm.

    ``checkpoint_id`` is a step: a number, or a name that ends in one, alone or below the root (``step-1200``,
    ``ROOT/step-1200``). Without one the number after the newest is taken. Steps must grow.

    Raises UsageError for arguments that make no sense; where there is no process group, BusyError when another process
    saves there. From a save, DCP's CheckpointException holds each rank's error, on all ranks alike: UsageError,
    BusyError, NotFoundError when storage shows less than it had, UnsupportedValueError, OSError when storage had to
    take a shard and didn't, NotDurableError when it didn't take the checkpoint before.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int | None = None,
        drain_limit: int | str | None = None,
        memory: str | os.PathLike[str] | None = None,
    ) -> None:
        given = Settings(keep=keep, drain_limit=drain_limit, memory=memory)
        self._wanted: str | os.PathLike[str] | int | None
        path, self._wanted = place_of(root)
        self._session = session_of(
            path, WriterSettings(keep, given.drain_rate, None if memory is None else str(root_path(memory)))
        )
        self._stager = RekindleStager()
        self._request: Message | None = None
        self._stamp: ShardId | None = None
        self._save_id = secrets.token_hex(16)

    # -- a save, in the order of DCP's calls -----------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Save the step that ``checkpoint_id`` names next."""
        self._wanted, self._save_id = checkpoint_id, secrets.token_hex(16)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepares this rank's request to the coordinator. Raises UsageError, BusyError."""
        wanted, self._wanted = self._wanted, None
        if not kwargs.get("use_collectives", True):
            raise UsageError("use_collectives=False: Rekindle saves one plan of all ranks; leave it out")
        step = None if wanted is None else step_of(wanted, self._session.root)
        self._request = self._session.request(rank_of(kwargs, sys._getframe(1)), step, is_coordinator)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Sends the request along."""
        return dataclasses.replace(plan, storage_data=self._request)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decides what all ranks save, and sends it along. On the coordinator: the others wait for this.

        Raises UsageError where that would not be one checkpoint, NotFoundError, NotDurableError.
        """
        assert self._request is not None
        answers = self._session.decide(self._request, len(plans))
        return [dataclasses.replace(plan, storage_data=one) for plan, one in zip(plans, answers, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Secures this rank's part. Done when this returns."""
        self._stamp = stamp = self._session.shard_id()
        shard, values = plan_shard(plan, planner)
        written = _Written(self._session.write(stamp, shard, values))
        sizes = {(chunk.name, chunk.offsets): chunk.nbytes for chunk in shard.layout.chunks}
        items = [item.index for item in plan.items] or [MetadataIndex("")]  # who has nothing tells where that is, too
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(i, sizes.get((i.fqn, tuple(i.offset or ())), 0), written) for i in items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Finishes the save: all ranks have written their parts. On the coordinator."""
        assert self._stamp is not None
        metadata.storage_meta = StorageMeta(name_of(self._stamp.step, self._session.root), self._save_id)
        self._save_id = secrets.token_hex(16)
        written = {result.storage_data for rank in results for result in rank}
        self._session.finish(self._stamp, all(entry.in_memory for entry in written))

    def storage_meta(self) -> StorageMeta:
        """Describes the next save to planners."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    @property
    def checkpoint_id(self) -> str:
        """Path of the checkpoint that is saved next; that of the root where its step is not given."""
        return name_of(self._wanted, self._session.root)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns True if it can be a root, or ``ROOT/step-N``."""
        return is_place(checkpoint_id)

    # -- the stager of dcp.async_save ------------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies ``state_dict`` into host memory: see RekindleStager."""
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Returns at once: ``stage`` returns when the copy is made."""

    def close(self, timeout: float = 600.0) -> None:
        """Wait until the newest save is on storage, then give the memory back. All writers of this root end with it.

        A job that ends without it loses nothing: the agent carries what memory holds to storage, and leaves some
        minutes later. Raises NotDurableError after ``timeout`` seconds: the agent goes on. Does nothing in a forked
        child: all belongs to its parent.
        """
        timeout = check_timeout(timeout)
        if self._session.forked:
            return
        self._stager.close()
        self._session.close(timeout)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a writer stays in its process: use AsyncCheckpointerType.THREAD, or none; an agent in a process of its "
            "own carries checkpoints to storage"
        )
