"""Secures a rank's state when guarded training ends, by a fault or well."""

from __future__ import annotations

import logging
import time

from rekindle.save.saver import Saver
from rekindle.session.session import Session

__all__ = ["StateSecurer"]

log = logging.getLogger("rekindle")

_OTHERS = 2.0
"""Seconds that other ranks get to commit their parts of the last step."""
_POLL = 0.005


class StateSecurer:
    """Secures what one rank holds. ``secure`` may be called in any thread, while nothing changes the state."""

    def __init__(self, saver: Saver, session: Session) -> None:
        self._saver, self._session = saver, session

    def secure(self, step: int, *, whole: bool) -> str:
        """Bring the state, which is that of ``step``, into memory, or to storage where there is no memory.

        With ``whole`` all that this rank holds, else its part of what several ranks hold. Returns MEMORY or STORAGE.
        """
        return self._saver.gasp(self._session.shard_id(step), whole=whole)

    def holds_restored(self, step: int) -> bool:
        """True if the state is still what was restored, of which memory has the parts of all ranks of this node.

        A snapshot of the same step takes the place of such a part, and helps nobody unless all ranks make theirs.
        """
        memory, start = self._saver.memory, self._session.incarnation
        if memory is None or not start.parent or step != start.parent_step:
            return False
        found = memory.slots.complete_checkpoints()
        return any((key.incarnation.id, key.step) == (start.parent, step) for key in found)

    def secure_newest_save(self, timeout: float) -> int | None:
        """Wait for what is on its way into memory, when the state itself can't be read any more. Returns its step.

        None if it isn't in memory after ``timeout`` seconds.
        """
        memory = self._saver.memory
        return memory.wait_for_newest(timeout) if memory is not None else None

    def ask_storage(self, step: int) -> None:
        """Have the agent carry ``step``, which is in memory, to storage. Raises OSError, MemoryStoreError."""
        if self._saver.memory is not None:
            self._saver.memory.ask_storage(self._session.shard_id(step))

    def secure_last(self, step: int) -> None:
        """Save the step at which guarded training has ended well, all of it where other ranks don't save their parts.

        A rank that has ended has nothing left that tells of its last step, and could not help others that fail in it.
        Without memory the step goes to storage or, while that is to be left in peace, is put aside for ``close()``.
        """
        saver = self._saver
        if step <= saver.restored:
            return
        with saver.stepping(step):
            saver.conclude()
            if saver.newest is None or saver.newest.step < step:
                saver.save(self._session.shard_id(step, persist=False), wait=True)
                saver.conclude()
            until = time.monotonic() + _OTHERS
            while saver.memory is not None and not self.is_shared_by_all(step):
                if time.monotonic() > until:
                    saver.gasp(self._session.shard_id(step, persist=False), whole=True)
                    return
                time.sleep(_POLL)

    def is_shared_by_all(self, step: int) -> bool:
        """True if all ranks of this node have secured their parts of ``step``, or share none of what they hold."""
        if not self._saver.live.shared:
            return True
        memory = self._saver.memory
        return (memory is not None and memory.is_complete(self._session.shard_id(step))) or self.is_durable(step)

    def is_durable(self, step: int) -> bool:
        """True if ``step`` is on storage."""
        return self._session.store.durable(self._session.shard_id(step))

    def is_brought(self, step: int) -> bool:
        """True if storage has all that this node can bring of ``step``, or of a later step."""
        job, start = self._session.job, self._session.incarnation.id
        return job is not None and job.notes.is_brought(step, start)
