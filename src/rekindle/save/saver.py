"""Runs a rank's saves: into memory, straight to storage when memory fails, and back into memory once it works."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from rekindle.common.backoff import Backoff
from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import with_timeout
from rekindle.errors import BusyError, MemoryStoreError, NotDurableError, UsageError
from rekindle.format.lineage import ShardId
from rekindle.memory.slots import NotReadyError
from rekindle.save.capture import Capture
from rekindle.save.fence import Fence
from rekindle.save.gaps import Gaps
from rekindle.save.gate import Gate, NoGate
from rekindle.save.live import Live
from rekindle.save.metrics import Metrics
from rekindle.save.pending import PendingSnapshot
from rekindle.save.schedule import Schedule
from rekindle.save.to_memory import MemorySaver, Pause
from rekindle.save.to_storage import DirectSaver
from rekindle.session.session import Session
from rekindle.settings import Overlap, Settings
from rekindle.storage.catalog import MEMORY, STORAGE

__all__ = ["Saver"]

log = logging.getLogger("rekindle")

_IN_STEP = "each is in memory when its step() returns, whoever dies after that"
_BEHIND = (
    "each is completed after its step() has returned, before the next update: if all ranks die meanwhile, "
    "or one of whose state no other has a copy, the job goes back to the snapshot before"
)

_NOT_SAVED = "is not saved, training goes on"
_LOOK = 3.0
"""Seconds that storage gets to say whether it has what was restored."""


class Saver:
    """Saves the state of one rank, for one start of the job.

    For the thread that trains, except ``wait_before_update``, which any thread that updates may call, and ``gasp``.
    Failures are raised with ``settings.strict``, else they are logged and training goes on.
    """

    def __init__(
        self,
        capture: Capture,
        fence: Fence,
        session: Session,
        settings: Settings,
        schedule: Schedule,
        metrics: Metrics,
        *,
        overlap: Overlap,
        in_step: bool,
    ) -> None:
        """The session has opened memory, or is to do without. ``overlap`` and ``in_step`` are agreed by all ranks.

        They tell when to copy, and whether snapshots are small enough to be committed inside of ``step()``.
        """
        slots = session.slots
        self.session = session
        self.live = Live(capture, slots, fence)
        self.memory = MemorySaver(self.live, slots, overlap, fence) if slots is not None else None
        """None where there is no memory store."""
        self.direct = DirectSaver(self.live, session.store, settings.retention, session.job, lambda: session.starts)
        self._gate: Gate | NoGate = NoGate()
        self._pid = os.getpid()
        self.newest: ShardId | None = None
        """The step that was saved last. It may still be on its way into memory, until ``conclude``."""
        self._before: ShardId | None = None
        """The one saved before it."""
        self.reached = 0
        """Newest completed step, or the one that was restored."""
        self.restored = 0
        self._stepping = False
        self.schedule = schedule
        self._limit = schedule.limit_direct_saves(self.direct.took)
        self._skipped: ShardId | None = None
        """Newest step that was not saved because storage was to be left in peace, or memory was being made.

        None from the next update on, after which the state is no longer that step's.
        """
        self.gaps = Gaps()
        self._reopened = False
        """True if memory was made again since it failed last."""
        self._metrics, self._strict = metrics, settings.strict
        self._tries = Backoff(settings.fallback_after)
        self._retried: PendingSnapshot | None = None
        """The first save retried into memory after a failure."""
        self._promised = in_step and slots is not None
        """True while users have been told that snapshots are committed inside of ``step()``."""
        metrics.committed_in_step = self._promised
        if slots is not None and slots.rank == 0:
            log.info("snapshots: %s", _IN_STEP if in_step else _BEHIND)
        fence.call_before_updates(self.wait_before_update)

    # -- saving -------------------------------------------------------------------------------------------------

    def save(self, stamp: ShardId, *, wait: bool = False) -> None:
        """Save the state as that of ``stamp``. Call ``conclude`` first.

        While memory is being made, the step is left out, or with ``wait`` waits for it.
        """
        if self.newest is not None and self.newest.step == stamp.step:
            self.live.warn_of_changes(stamp.step)
            if stamp.persist:
                self.persist()
            return
        began = time.perf_counter()
        try:
            nbytes = self._write(stamp, self.pause if wait else None)
        except Exception as error:
            self._report_failure(stamp.step, error)
            return
        if nbytes is None:
            return
        self._before, self.newest = self.newest, stamp
        self._metrics.saved(time.perf_counter() - began, nbytes)
        if self._metrics.committed_in_step:  # or it failed, which is for this step() to tell
            self.conclude()

    def _write(self, stamp: ShardId, pause: Pause | None) -> int | None:
        """Returns the bytes saved; None if the step was left out: only storage could take it, and is to be left in
        peace, or memory is being made.
        """
        if self.memory is not None and self._tries.due():
            try:
                return self._write_to_memory(self.memory, stamp, pause)
            except NotReadyError as error:
                if not self._tries.failed:
                    self._leave_out(stamp, error)
                    return None
            except MemoryStoreError as error:
                if self._strict:
                    raise
                self._fall_back(stamp.step, error)
        self._metrics.committed_in_step = False
        if not stamp.persist and not self._limit.due(self.schedule.place_of(stamp.step)):
            self._skip(stamp)
            return None
        self.finish_direct()
        nbytes = self.direct.save(stamp)
        self._limit.saved(self.schedule.place_of(stamp.step))
        self._metrics.direct += 1
        return nbytes

    def _write_to_memory(self, memory: MemorySaver, stamp: ShardId, pause: Pause | None) -> int:
        self.finish_direct()  # it may be writing what a slot holds
        if self._tries.failed and not self._reopened:  # once: it would begin to make memory anew each time
            self._reopen_memory(memory)
            self._reopened = True
        # This object is held until background copies finish, even if the Checkpointer is garbage-collected meanwhile:
        # the session's lock keeps the rank's place.
        nbytes = memory.save(stamp, self, pause)
        self._retried = memory.pending
        self._end_left_out(stamp)
        self._metrics.committed_in_step = memory.in_step
        if self._promised and not memory.in_step:
            self._promised = False
            log.warning(
                "snapshots, of %.1f MB now, are no longer completed inside of step(), from step %d on: %s",
                *(nbytes / 1e6, stamp.step, _BEHIND),
            )
        return nbytes

    def _reopen_memory(self, memory: MemorySaver) -> None:
        """Make again what somebody may have removed. Raises MemoryStoreError."""
        try:
            if self.session.lock is not None and memory.reopen(self.session.lock):
                self._gate.show_again()
                self._metrics.show_again()
        except (BusyError, OSError) as error:
            raise MemoryStoreError(str(error)) from error

    def _fall_back(self, step: int, error: BaseException) -> None:
        """Note that memory failed. It is tried again three times within ``fallback_after``, then now and then."""
        if not self._tries.failed:
            self._metrics.memory_lost += 1
            log.warning(
                "step %d goes straight to storage, and so do those after it%s until memory takes them again, which is "
                "tried now and then: %s",
                *(step, self._limit.describe(), error),
            )
        self._tries.fail()
        self._reopened = False
        self.gaps.break_off()

    def _check_retried(self) -> None:
        """Go back to memory for good if the first save retried into it is complete."""
        retried, self._retried = self._retried, None
        if retried is not None and retried.committed and self._tries.failed:
            self._tries.succeed()
            self._metrics.memory_back += 1
            log.warning("step %d is in memory: memory takes saves again", retried.stamp.step)

    def _leave_out(self, stamp: ShardId, error: NotReadyError) -> None:
        """Leave the step unsaved because memory is being made."""
        self.gaps.leave_out(stamp.step, error)
        self._metrics.left_out += 1
        self._metrics.committed_in_step = False
        self._skip(stamp)

    def _end_left_out(self, stamp: ShardId) -> None:
        """Note that memory has taken ``stamp``, and let go of what was kept of the step left out before it."""
        if self.gaps.end(stamp.step):
            self._skipped = None
            if not isinstance(self._gate, Gate):
                self.live.end_guard()

    def _skip(self, stamp: ShardId) -> None:
        """Leave the step unsaved, but keep what ``save_skipped`` needs."""
        # Other ranks' parts of what is being written may be in memory, which keeps them until this rank's next step.
        if self.memory is not None or self.direct.over:
            self.finish_direct()
        self.live.put_aside(stamp)
        self._skipped = stamp

    def save_skipped(self, timeout: float) -> None:
        """Send the last step to storage if it was skipped. Returns before it is there. For the end of a job.

        Raises NotDurableError when the save before isn't on storage within ``timeout`` seconds.
        """
        stamp, self._skipped = self._skipped, None
        if stamp is None or (self.newest is not None and self.newest.step >= stamp.step):
            return
        try:
            with self.pause("waiting for storage"):
                self.direct.finish(timeout)
                self.direct.save_noted(stamp, whole=False)
        except NotDurableError:
            raise
        except Exception as error:
            self._report_failure(stamp.step, error)
            return
        self._metrics.direct += 1
        self._before, self.newest = self.newest, stamp

    def finish_direct(self) -> None:
        """Wait until storage has the save that it is being sent, and report its failure."""
        if not self.direct.writing:  # a pause teaches the watchdog nothing of the step
            return
        with self.pause("waiting for storage"):
            error = self.direct.finish()
        if error is not None:
            self._limit.failed()
            if self.newest is not None:
                self._report_failure(self.newest.step, error)

    def persist(self, stamp: ShardId | None = None) -> None:
        """Send ``stamp``, or the newest save, to storage, whatever the schedule said of it. Call ``conclude`` first."""
        stamp = stamp or self.newest
        if self.memory is None or stamp is None:
            return
        try:
            self.memory.persist(stamp)
        except Exception as error:
            self._report_failure(stamp.step, error, "is in memory, but not marked for storage; training goes on")

    def gasp(self, stamp: ShardId, *, whole: bool) -> str:
        """Secure the state, which is that of ``stamp``. Returns the place: MEMORY or, where there is no room, STORAGE.

        With ``whole`` all that this rank holds, where another rank doesn't secure its part. For any thread, while
        nothing changes the state. Raises OSError or RekindleError when that can't be done.
        """
        if self.memory is not None:
            try:
                self.memory.gasp(stamp, whole=whole)
                self.newest = stamp
                return MEMORY
            except OSError as error:
                log.warning("step %d goes straight to storage: %s", stamp.step, error)
        self.direct.gasp(stamp, whole=whole)
        self.newest = stamp
        return STORAGE

    # -- the end of a save --------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Wait until the newest save is in memory; report its failure, or send it to storage where memory failed."""
        if self.forked:
            return
        failed = self._finish_memory()
        self._check_retried()
        if failed is None or failed.error is None:
            return
        step = failed.stamp.step
        self._metrics.committed_in_step = False
        if not failed.committed and self.newest is not None and self.newest.step == step:
            self.newest = self._before
        if not isinstance(failed.error, MemoryStoreError) or self._strict:
            outcome = "was committed, but tensors changed before the update" if failed.committed else _NOT_SAVED
            self._report_failure(step, failed.error, outcome)
            return
        self._fall_back(step, failed.error)
        try:
            self.finish_direct()
            self.direct.rescue(failed)
        except Exception as error:
            self._report_failure(step, error)
            return
        self.newest = failed.stamp
        self._metrics.direct += 1

    def _finish_memory(self) -> PendingSnapshot | None:
        """Wait until memory has the newest save. Returns it, once, if it failed."""
        if self.memory is None or self.memory.pending is None:
            return None
        pending, began = self.memory.pending, time.perf_counter()
        failed = self.memory.finish()
        if self._stepping:  # so training is held up
            self._metrics.settled(time.perf_counter() - began)
        self._metrics.concluded(pending.seconds if pending.stamp is self.newest else None)
        return failed

    def _report_failure(self, step: int, error: BaseException, outcome: str = _NOT_SAVED) -> None:
        """Count the failure of a save, and raise or log it."""
        self._metrics.failed += 1
        if self._strict:
            raise error
        log.error("step %d %s: %s: %s", step, outcome, type(error).__name__, describe_error(error))

    def secure(self, timeout: float) -> None:
        """Return when the newest save outlives this process. Raises NotDurableError when storage had to and didn't."""
        self.conclude()
        with self.pause("waiting for storage"):
            error = self.direct.finish(timeout)
        if error is not None:
            raise NotDurableError(f"the newest save did not reach storage: {error}") from error

    def finish_quietly(self, seconds: float) -> None:
        """See the newest save into memory; where there is none, give storage so many seconds. Doesn't raise."""
        try:
            self.conclude()
            self.direct.finish(seconds)
        except NotDurableError:  # it goes on being written
            pass
        except Exception as error:  # with ``strict`` a failed save raises, and who leaves has a reason of its own
            log.warning("the newest save failed: %s", describe_error(error))

    def wait_durable(self, stamp: ShardId, timeout: float) -> None:
        """Return when ``stamp``, the newest save or what was restored, is on storage. Raises NotDurableError."""
        ours = self.newest is not None and stamp.checkpoint == self.newest.checkpoint
        local_ranks = self.session.local_ranks if ours else ()  # what was restored may be by more ranks, or fewer
        with self.pause("waiting for storage"):
            deadline = time.monotonic() + timeout
            error = self.direct.finish(timeout) or self.direct.error_of(stamp)
            try:
                seconds = 0.0 if error is not None else max(0.0, deadline - time.monotonic())
                self.session.wait_durable(stamp, seconds, local_ranks=local_ranks)
            except NotDurableError:
                if error is None:
                    raise
                raise NotDurableError(f"step {stamp.step} did not reach storage: {describe_error(error)}") from error

    def wait_once_durable(self, stamp: ShardId, timeout: float) -> None:
        """Return when ``stamp`` has been on storage, should it have been deleted since. Raises NotDurableError."""
        with self.pause("waiting for storage"):
            self.session.wait_durable(stamp, timeout, once=True)

    def find_restored(self, base: ShardId | None) -> str:
        """Returns STORAGE if that has what was restored, MEMORY if it doesn't say, and the agent will see to that.

        Else "", also once something has been saved.
        """
        if base is None or self.newest is not None:
            return ""
        if self._metrics.restored_from == STORAGE:
            return STORAGE
        store = self.session.store
        with suppress(OSError):
            return STORAGE if with_timeout(_LOOK, store.root, lambda: store.durable(base)) else ""
        found = self.memory.slots.job.snapshots.shard_ids() if self.memory is not None else ()
        return MEMORY if any(one.checkpoint == base.checkpoint and one.persist for one, _ in found) else ""

    # -- around the trainer's work ------------------------------------------------------------------------------

    def wait_before_update(self, *, together: bool = True) -> None:
        """Wait until the newest save has what an update will change. For the thread that updates.

        ``together``: all ranks make this update, and may wait for each other before it.
        """
        if self.forked:
            return
        self._skipped = None  # not every write to a tensor is one that torch counts
        pending = self.memory.pending if self.memory is not None else None
        if pending is not None:
            began = time.perf_counter()
            pending.wait_before_update()
            self._metrics.waited(time.perf_counter() - began)
        making = self._gate.updating(self._newest_in_memory(), together=together)
        if making is not None:
            self.live.begin_update(making)
        elif isinstance(self._gate, Gate):
            self.live.update_again()

    @contextmanager
    def stepping(self, n: int) -> Iterator[None]:
        """Wrap what is done at the end of step ``n``, when the state is neither the old nor the new one."""
        self.refuse_child()
        self._gate.stepping(self._newest_in_memory())
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False
        self.reached = n
        newest = self._newest_in_memory()
        if self.memory is not None:
            self.gaps.note_in_memory(newest)
            self.memory.make_third(self.session.incarnation.id)
        self._gate.stable(n, newest)
        self._metrics.stepped(n)

    def begin_guard(self, gate: Gate) -> None:
        """From now on tell ``gate`` what training does, and keep what ``gasp`` needs."""
        self._gate = gate
        self.live.begin_guard()

    def end_guard(self) -> None:
        """Tell the gate no more."""
        self._gate = NoGate()
        if self._skipped is None:  # else what it needs is still to be kept
            self.live.end_guard()

    @property
    def busy(self) -> bool:
        """True inside of ``guard()``, and at the end of a step."""
        return isinstance(self._gate, Gate) or self._stepping

    def pause(self, what: str) -> AbstractContextManager[None]:
        """Let the watchdog wait meanwhile, if there is one."""
        return self._gate.pause(what)

    def _newest_in_memory(self) -> int:
        """Returns this rank's newest step in memory; -1 if there is none."""
        if self.memory is None:
            return -1
        pending = self.memory.pending
        if pending is not None and pending.committed:
            return pending.stamp.step
        return self._before.step if self._before is not None else -1

    @property
    def forked(self) -> bool:
        """True in a child of the process that trains: nothing of it belongs to the child."""
        return os.getpid() != self._pid

    def refuse_child(self) -> None:
        """Raise UsageError in a forked child, whose saves would take the place of its parent's."""
        if self.forked:
            raise UsageError("this checkpointer belongs to the process that this one was forked from: make a new one")

    def close(self) -> None:
        """Let go of memory and threads. What is being written to storage goes on being written."""
        saved = self.newest.step if self.newest is not None else self.restored
        if self.reached > saved:
            log.warning(
                "step %d was the last, and step %d is the newest that is saved: ckpt.save(%d) right after it "
                "would have kept it",
                *(self.reached, saved, self.reached),
            )
        self.live.close()
        if self.memory is not None:
            self.memory.close()
        self.direct.close()
