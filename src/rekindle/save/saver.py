"""A run's saves: which one is the newest, what has become of it, and where to go when memory won't take it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial

from rekindle.common.backoff import Backoff
from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import in_background, with_timeout
from rekindle.errors import BusyError, MemoryStoreError, NotDurableError, UsageError
from rekindle.format.lineage import ShardId
from rekindle.memory.local_state import LocalStateWriter
from rekindle.memory.lock import Lock
from rekindle.memory.slots import Slots
from rekindle.memory.status import STABLE
from rekindle.save.capture import Capture
from rekindle.save.gate import Gate
from rekindle.save.live import Live
from rekindle.save.metrics import Metrics
from rekindle.save.schedule import DirectSaveLimit
from rekindle.save.to_memory import Flight, MemorySaver
from rekindle.save.to_storage import DirectSaver
from rekindle.session.agent_keeper import AgentKeeper
from rekindle.session.finish import wait_durable
from rekindle.settings import Overlap, Settings
from rekindle.storage.catalog import MEMORY, STORAGE
from rekindle.storage.pins import pin_if_there, pin_when_there
from rekindle.storage.store import Store

__all__ = ["Saves"]

log = logging.getLogger("rekindle")

_IN_STEP = "each is in memory when its step() returns, whoever dies after that"
_BEHIND = (
    "each is completed after its step() has returned, before the next update: if all ranks die meanwhile, "
    "the job goes back to the snapshot before"
)

_PIN = 60.0
"""Seconds that storage gets to pin what it has just taken."""
_LOOK = 3.0
"""Seconds that storage gets to say whether it has what was restored."""


class Saves:
    """For the thread that trains, but for ``hold``. With ``strict`` failures are raised, else they are logged."""

    def __init__(
        self,
        capture: Capture,
        store: Store,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        """Memory that fails is tried again three times within ``fallback_after`` seconds, then now and then.

        The saves in between go straight to storage.
        """
        self.live = Live(capture)
        self.memory: MemorySaver | None = None
        """None where there is no memory store."""
        self.direct = DirectSaver(self.live, store, settings.retention)
        self._store = store
        self.lock: Lock | None = None
        """What makes this process the rank's trainer: it stays so while a copy is on its way, whoever forgets us."""
        self.gate: Gate | None = None
        """Who is told what training does, inside of ``guard()``."""
        self._before_update: Callable[[int], object] | None = None
        self._pid = os.getpid()
        self.newest: ShardId | None = None
        """What was saved last. It may still be on its way into memory, until ``settle``."""
        self._before: ShardId | None = None
        self.reached = 0
        """The newest completed step that we were told of, or that was restored."""
        self.restored = 0
        self._stepping = False
        self._limit: DirectSaveLimit | None = None
        """Limits the saves that go straight to storage unasked; None for no limit."""
        self._left_out: ShardId | None = None
        """The newest step that was not saved because it was not its turn."""
        self._how_often = ""
        self._metrics, self._strict = metrics, settings.strict
        self._tries = Backoff(settings.fallback_after)
        self._trial: Flight | None = None
        """What is to show that memory takes saves again."""
        self._promised = False
        """Whether it was said that snapshots are committed inside of ``step()``."""

    def spare(self, seconds: float | None, world: int) -> None:
        """From now on saves that nobody asks for by name go straight to storage at most every so many ``seconds``.

        None changes nothing.
        """
        if seconds is None:
            return
        self._limit = DirectSaveLimit(seconds, world, self.direct.took)
        self._how_often = f", at most every {seconds:g} s,"

    def use_memory(self, slots: Slots, overlap: Overlap) -> None:
        """From now on saves go into memory."""
        self.live.files = partial(LocalStateWriter, slots.job, slots.rank)
        self.memory = MemorySaver(self.live, slots, overlap)

    def save(self, stamp: ShardId) -> None:
        """Save the state as that of ``stamp``. Call ``settle`` first."""
        if self.newest is not None and self.newest.step == stamp.step:
            if stamp.persist:
                self.persist()
            return
        began = time.perf_counter()
        try:
            nbytes = self._write(stamp)
        except Exception as error:
            self._failed(stamp.step, error)
            return
        if nbytes is None:
            return
        self._before, self.newest = self.newest, stamp
        self._metrics.saved(time.perf_counter() - began, nbytes)
        if self._metrics.committed_in_step:  # or it failed, which is for this step() to tell
            self.settle()

    def _write(self, stamp: ShardId) -> int | None:
        """Bytes saved; None where storage would have to take them, and is to be left in peace."""
        if self.memory is not None and self._tries.due():
            try:
                self._finish_direct()  # it may be writing what a slot holds
                if self._tries.failed:
                    self._come_back(self.memory)
                nbytes = self.memory.save(stamp, (self, self.lock))
                self._trial = self.memory.flight
                self._tell_promise(stamp.step, self.memory.in_step, nbytes)
                return nbytes
            except MemoryStoreError as error:
                if self._strict:
                    raise
                self._fall_back(stamp.step, error)
        self._metrics.committed_in_step = False
        if self._limit is not None and not stamp.persist and not self._limit.due(stamp.step):
            self._leave_out(stamp)
            return None
        self._finish_direct()
        nbytes = self.direct.save(stamp)
        if self._limit is not None:
            self._limit.saved(stamp.step)
        self._metrics.direct += 1
        return nbytes

    def _leave_out(self, stamp: ShardId) -> None:
        # Other ranks' parts of what is being written may be in memory, which keeps them until this rank's next step.
        if self.memory is not None or self.direct.over:
            self._finish_direct()
        self.live.put_aside(stamp)
        self._left_out = stamp

    def catch_up(self, timeout: float) -> None:
        """Send the last step to storage, should it have been left out. Returns before it is there.

        For the end of a job. Raises NotDurableError when the one before isn't there within ``timeout`` seconds.
        """
        stamp, self._left_out = self._left_out, None
        if stamp is None or (self.newest is not None and self.newest.step >= stamp.step):
            return
        try:
            with self.pause("waiting for storage"):
                self.direct.finish(timeout)
                self.direct.late(stamp, False)
        except NotDurableError:
            raise
        except Exception as error:
            self._failed(stamp.step, error)
            return
        self._metrics.direct += 1
        self._before, self.newest = self.newest, stamp

    def promise(self, in_step: bool, tell: bool) -> None:
        """Snapshots are going to be committed inside of ``step()``, or behind it; ``tell`` that in the log."""
        self._metrics.committed_in_step = self._promised = in_step
        if tell:
            log.info("snapshots: %s", _IN_STEP if in_step else _BEHIND)

    def _tell_promise(self, step: int, in_step: bool, nbytes: int) -> None:
        """Say it once if the state has outgrown what was told at the start."""
        self._metrics.committed_in_step = in_step
        if self._promised and not in_step:
            self._promised = False
            log.warning("snapshots are of %.1f MB from step %d on, no longer small: %s", nbytes / 1e6, step, _BEHIND)

    def _come_back(self, memory: MemorySaver) -> None:
        """Make what somebody may have removed. Raises MemoryStoreError."""
        try:
            if self.lock is not None and memory.come_back(self.lock) and self.gate is not None:
                self.gate.show_again()
        except (BusyError, OSError) as error:
            raise MemoryStoreError(str(error)) from error

    def _fall_back(self, step: int, error: BaseException) -> None:
        if not self._tries.failed:
            self._metrics.memory_lost += 1
            log.warning(
                "step %d goes straight to storage, and so do those after it%s until memory takes them again, which is "
                "tried now and then: %s",
                *(step, self._how_often, error),
            )
        self._tries.fail()

    def _see_trial(self) -> None:
        """Memory works when a save into it is complete."""
        trial, self._trial = self._trial, None
        if trial is not None and trial.committed and self._tries.failed:
            self._tries.succeed()
            self._metrics.memory_back += 1
            log.warning("step %d is in memory: memory takes saves again", trial.stamp.step)

    def _finish_direct(self) -> None:
        if not self.direct.writing:  # a pause teaches the watchdog nothing of the step
            return
        with self.pause("waiting for storage"):
            error = self.direct.finish()
        if error is not None and self._limit is not None:
            self._limit.failed()
        if error is not None and self.newest is not None:
            self._failed(self.newest.step, error)

    def persist(self, stamp: ShardId | None = None) -> None:
        """Send ``stamp``, or the newest save, to storage, whatever the policy said of it. Call ``settle`` first."""
        stamp = stamp or self.newest
        if self.memory is None or stamp is None:
            return
        try:
            self.memory.persist(stamp)
        except Exception as error:
            self._failed(stamp.step, error)

    def pin(self, stamp: ShardId, there: bool, keeper: AgentKeeper | None, timeout: float) -> None:
        """See to it that ``stamp`` stays on storage: now if it is ``there``, else once it comes. Call ``settle`` first.

        Raises NotDurableError when that can't be done now, or one that was to be pinned before isn't on storage within
        ``timeout`` seconds.
        """
        if there:
            try:
                with self.pause("waiting for storage"):
                    with_timeout(_PIN, self._store.root, lambda: self._store.pin(stamp))
            except OSError as error:
                raise NotDurableError(
                    f"step {stamp.step} is on storage, but not pinned: {describe_error(error)}"
                ) from error
            return
        self._see_pins(stamp, keeper, timeout)
        if self.newest is None or not self.newest.pinned:  # else its receipt says so
            if self.memory is not None and self.newest is not None:
                self.memory.persist(self.newest, pin=True)
            with suppress(OSError, NotDurableError):
                self._finish_direct()
                if with_timeout(_LOOK, self._store.root, partial(pin_if_there, self._store, stamp)):
                    return
        in_background(partial(pin_when_there, self._store, stamp), "rekindle-pin")

    def _see_pins(self, stamp: ShardId, keeper: AgentKeeper | None, timeout: float) -> None:
        """Return when what was to be pinned before ``stamp`` is on storage: memory keeps one such snapshot, not more.

        After the save of ``stamp``, which takes no older one's place, so that its state is safe meanwhile.
        """
        if self.memory is None:
            return
        slots, deadline = self.memory.slots, time.monotonic() + timeout
        for older in slots.to_pin(stamp):
            with self.pause("waiting for storage"):
                try:
                    seconds = max(0.0, deadline - time.monotonic())
                    wait_durable(older, self._store, slots.job, keeper, seconds, once=True)
                except NotDurableError as error:
                    raise NotDurableError(
                        f"step {stamp.step} is saved, but will not stay if later saves come before storage has "
                        f"step {older.step}, which was pinned before: {error}"
                    ) from error
                with suppress(OSError):
                    if not with_timeout(_LOOK, self._store.root, partial(self._store.durable, older)):
                        log.warning(
                            "step %d was to be pinned, and has not come to storage: a newer one has taken its place",
                            older.step,
                        )

    def give_up(self) -> None:
        """Free what memory has of a run that was deleted, before the note of it goes: it would be drained."""
        if self.memory is not None:
            with suppress(MemoryStoreError):  # the first save will say so
                self.memory.slots.give_up()

    def kept(self, base: ShardId | None) -> str:
        """STORAGE if it has what was restored; MEMORY if it doesn't say, and the agent will see to that; "" if neither.

        "" also once something has been saved.
        """
        if base is None or self.newest is not None:
            return ""
        if self._metrics.restored_from == STORAGE:
            return STORAGE
        with suppress(OSError):
            return STORAGE if with_timeout(_LOOK, self._store.root, lambda: self._store.durable(base)) else ""
        stamps = self.memory.slots.job.snapshots.shard_ids() if self.memory is not None else ()
        return MEMORY if any(stamp.checkpoint == base.checkpoint and stamp.persist for stamp, _ in stamps) else ""

    def hold(self) -> None:
        """Wait until the newest save has what an update will change. For the thread that updates."""
        if self.forked:
            return
        if self.memory is not None and self.memory.flight is not None:
            began = time.perf_counter()
            self.memory.hold()
            self._metrics.waited(time.perf_counter() - began)
        if self.gate is not None:
            if self._before_update is not None and self.gate.phase == STABLE:  # the first optimizer of several
                self._before_update(self.gate.step + 1)
            self.gate.updating(self.in_memory())

    @property
    def busy(self) -> bool:
        """Whether this is inside of ``guard()``, or at the end of a step."""
        return self.gate is not None or self._stepping

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that trains: nothing of it belongs to the child."""
        return os.getpid() != self._pid

    def refuse_child(self) -> None:
        """Raise UsageError in a forked child, whose saves would take the place of its parent's."""
        if self.forked:
            raise UsageError("this checkpointer belongs to the process that this one was forked from: make a new one")

    def guard(self, gate: Gate | None, before_update: Callable[[int], object] | None = None) -> None:
        """From now on tell ``gate`` what training does, and keep what ``gasp`` needs; or, with None, no longer.

        ``before_update`` is called with the step that an update is about to make.
        """
        self.gate, self._before_update = gate, before_update
        if gate is not None or self._left_out is None:  # else its end is still to be known
            self.live.guard(gate is not None)

    def pause(self, what: str) -> AbstractContextManager[None]:
        """The watchdog waits meanwhile, if there is one."""
        return self.gate.pause(what) if self.gate is not None else nullcontext()

    def in_memory(self) -> int:
        """The newest step of this rank that is in memory; -1 if none is."""
        flight = self.memory.flight if self.memory is not None else None
        if flight is not None and flight.committed:
            return flight.stamp.step
        return self._before.step if self._before is not None else -1

    @contextmanager
    def stepping(self, n: int) -> Iterator[None]:
        """Around what is done at the end of step ``n``, when the state is neither the old nor the new one."""
        self.refuse_child()
        if self.gate is not None:
            self.gate.stepping(self.in_memory())
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False
        self.reached = n
        if self.gate is not None:
            self.gate.stable(n, self.in_memory())

    def gasp(self, stamp: ShardId, whole: bool) -> None:
        """Secure the state, which is that of ``stamp``: in memory or, where there is no room, on storage.

        With ``whole`` all that this rank holds, where another rank doesn't secure its part.

        For any thread, while nothing changes the state. Raises OSError or RekindleError when that can't be.
        """
        if self.memory is not None:
            try:
                self.memory.gasp(stamp, whole)
                self.newest = stamp
                return
            except OSError as error:
                log.warning("step %d goes straight to storage: %s", stamp.step, error)
        self.direct.gasp(stamp, whole)
        self.newest = stamp

    def settle(self) -> None:
        """See the newest save into memory, and say what went wrong with it."""
        if self.forked:
            return
        flight = self.memory.settle() if self.memory is not None else None
        self._see_trial()
        if flight is None or flight.error is None:
            return
        self._metrics.committed_in_step = False
        if not flight.committed and self.newest is not None and self.newest.step == flight.stamp.step:
            self.newest = self._before
        if isinstance(flight.error, MemoryStoreError) and not self._strict:
            self._fall_back(flight.stamp.step, flight.error)
            try:
                self._finish_direct()
                self.direct.rescue(flight)
                self.newest = flight.stamp
                self._metrics.direct += 1
            except Exception as error:
                self._failed(flight.stamp.step, error)
            return
        self._failed(flight.stamp.step, flight.error, flight.committed)

    def secure(self, timeout: float) -> None:
        """Return when the newest save outlives this process. Raises NotDurableError when storage had to and didn't."""
        self.settle()
        with self.pause("waiting for storage"):
            error = self.direct.finish(timeout)
        if error is not None:
            raise NotDurableError(f"the newest save did not reach storage: {error}") from error

    def see_out(self, seconds: float) -> None:
        """See the newest save into memory; where there is none, give storage so many seconds. Doesn't raise."""
        try:
            self.settle()
            self.direct.finish(seconds)
        except NotDurableError:  # it goes on being written
            pass
        except Exception as error:  # with ``strict`` a failed save raises, and who leaves has a reason of its own
            log.warning("the newest save failed: %s", describe_error(error))

    def see_durable(self, stamp: ShardId, timeout: float, see: Callable[[float], object]) -> None:
        """Return when ``stamp`` is on storage, which ``see`` waits for. Raises NotDurableError."""
        with self.pause("waiting for storage"):
            deadline = time.monotonic() + timeout
            error = self.direct.finish(timeout) or self.direct.error_of(stamp)
            try:
                see(0.0 if error is not None else max(0.0, deadline - time.monotonic()))
            except NotDurableError:
                if error is None:
                    raise
                raise NotDurableError(f"step {stamp.step} did not reach storage: {describe_error(error)}") from error

    def _failed(self, step: int, error: BaseException, saved: bool = False) -> None:
        self._metrics.failed += 1
        if self._strict:
            raise error
        what = "is saved, but by luck" if saved else "is not saved, training goes on"
        log.error("step %d %s: %s: %s", step, what, type(error).__name__, describe_error(error))

    def close(self) -> None:
        """Let go of memory and threads. What is being written to storage goes on being written."""
        saved = self.newest.step if self.newest is not None else self.restored
        if self.reached > saved:
            log.warning(
                "step %d was the last, and step %d is the newest that is saved: ckpt.save(%d) before close() keeps it",
                *(self.reached, saved, self.reached),
            )
        self.live.writer.close()
        if self.memory is not None:
            self.memory.close()
        self.direct.close()
