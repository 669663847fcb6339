"""What ``ckpt.guard()`` needs of a Checkpointer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.format.lineage import ShardId
from rekindle.memory.job_dir import JobDir
from rekindle.save.gate import Gate
from rekindle.save.saver import Saves
from rekindle.session.group import ProcessGroup, SingleProcess
from rekindle.session.session import Session
from rekindle.storage.store import Store

__all__ = ["Guarding"]

log = logging.getLogger("rekindle")

_OTHERS = 2.0
"""Seconds that other ranks get to bring their parts of the last step."""
_POLL = 0.005


@dataclass
class Guarding:
    """See ``rekindle.faults.guard.Guarded``."""

    saves: Saves
    store: Store
    session: Session
    group: SingleProcess | ProcessGroup
    fence: bool

    def stamp(self, step: int, persist: bool) -> ShardId:
        return self.session.shard_id(step, persist=persist)

    @property
    def job(self) -> JobDir | None:
        return self.session.job

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def alone(self) -> bool:
        return self.group.world == 1

    @property
    def local_ranks(self) -> Sequence[int]:
        return self.session.local_ranks

    @property
    def generation(self) -> int:
        return self.session.agreed.incarnation.generation

    def begin(self, gate: Gate) -> None:
        self.saves.guard(gate, self._before_update if self.fence else None)
        self.saves.live.note(self.stamp(gate.step, False))
        alone = self.saves.live.alone
        if alone and self.group.world > 1:
            log.warning(
                "rank %d: %d tensors, such as %s, have no replica that is known: if this rank dies, its newest "
                "snapshot is all that is left of them. DistributedDataParallel and rekindle.replica_groups are known",
                *(self.rank, len(alone), alone[0]),
            )

    def end(self) -> None:
        self.saves.guard(None)

    def _before_update(self, step: int) -> None:
        """No rank begins the update before all are about to, and have put down what they were like."""
        self.saves.live.note_update(self.stamp(step, False))
        self.group.barrier()

    def finish(self, step: int) -> None:
        """Once this rank has nothing left that tells of the last step, it could not help those that fail in it.

        It waits a moment for their parts of what they share, if they do, then brings all that it has.
        """
        if self.saves.memory is not None and step > self.saves.restored:
            with self.saves.stepping(step):
                self.saves.settle()
                if self.saves.newest is None or self.saves.newest.step < step:
                    self.saves.save(self.stamp(step, False))
                    self.saves.settle()
                until = time.monotonic() + _OTHERS
                while not self.shared_by_all(step):
                    if time.monotonic() > until:
                        self.saves.gasp(self.stamp(step, False), True)
                        return
                    time.sleep(_POLL)

    def secure(self, step: int, whole: bool) -> None:
        self.saves.gasp(self.stamp(step, True), whole)

    def shared_by_all(self, step: int) -> bool:
        stamp = self.stamp(step, True)
        memory = self.saves.memory
        return not self.saves.live.shared or (memory is not None and memory.complete(stamp)) or self.durable(step)

    def durable(self, step: int) -> bool:
        return self.store.durable(self.stamp(step, True))
