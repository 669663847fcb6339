"""Defines Checkpointer, the public class: its options, its methods, and how the rooms below are put together."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, SupportsFloat

import torch

from rekindle.agent.watchdog import silence_floor
from rekindle.common.timeouts import check_timeout
from rekindle.data.bare import accept_loaders
from rekindle.errors import UsageError
from rekindle.faults.guard import Guard
from rekindle.faults.hooks import Hooks
from rekindle.faults.imports import ImportRecord
from rekindle.faults.notices import Notice
from rekindle.faults.torchelastic import introduce, tell_of_uncaught_errors, warn_of_reused_store
from rekindle.format.lineage import ShardId
from rekindle.format.metric import Metric
from rekindle.memory.fault import Fault
from rekindle.memory.rebuild import rebuild
from rekindle.peers.memory import elsewhere_of
from rekindle.restore.choose import check_chosen_step
from rekindle.restore.partial import choose_parts
from rekindle.restore.restore import restore
from rekindle.save.agree import agree_on_partition
from rekindle.save.capture import Capture
from rekindle.save.exit_report import ExitReport
from rekindle.save.fence import Fence
from rekindle.save.metrics import Metrics
from rekindle.save.noting import measured
from rekindle.save.outcome import see_to
from rekindle.save.start import start_saver
from rekindle.save.steps import check_loss, check_step
from rekindle.save.updates import Updates
from rekindle.session.group import this_group
from rekindle.session.inventory import describe_fresh_start
from rekindle.session.node_safe import refuse_wait
from rekindle.session.recovery import RecoveryClock
from rekindle.session.rendezvous import meet
from rekindle.session.session import GIVE_WAY, Session
from rekindle.settings import Overlap, Settings, plain_bool
from rekindle.storage.catalog import MEMORY, STORAGE, Checkpoint, list_checkpoints
from rekindle.storage.pins import unpin_step
from rekindle.storage.roots import root_to_train

__all__ = ["Checkpoint", "Checkpointer", "Metrics"]

log = logging.getLogger("rekindle")


class Checkpointer:
    """Saves training state into memory, sees it carried to storage, and brings it back after a fault.

    Every rank makes one, after ``init_process_group()`` if the job has a process group; making it, ``restore()`` and
    nothing else are collectives. Not thread-safe: use it from the thread that trains. It is a context manager: a clean
    end of the block closes it, an exception lets go of it without waiting for storage.

    root
        Directory that checkpoints are kept in, or a URL as a ``str``: ``s3://``, ``gs://``, ``az://``, ``file://``. The
        same one on all ranks.
    state
        Maps names to modules, optimizers, ``rekindle.Values``, and others with ``state_dict`` and ``load_state_dict``.
    snapshot_every
        "auto": ``step()`` saves into memory at every step where no rank's snapshot is over 16 MiB or on a device; else
        as often as slows training by no more than ``snapshot_budget``, measured from the first snapshot on. The log and
        ``metrics.snapshot_every`` tell the interval. A number: ``step(n)`` saves when n is a multiple of it, and at
        every step with 1, whatever that costs. Or a time such as "30s".
    persist_every
        Snapshots of steps that are a multiple of this go to storage, or one in a time such as "10min"; "auto" chooses
        the time with the least waste, None lets ``persist_seconds`` decide (on several nodes that can't reach each
        other: every 100 steps, so that all send the same ones).
    persist_seconds
        Storage gets the newest snapshot at most so often, and is written to for at most a tenth of the time; 0 sends
        one whenever storage is free. What ``save()`` saves goes at once, and so does the newest step at a fault, a
        notice, ``close()``, and when the last trainer has gone.
    drain_limit
        What a node writes to storage at most: bytes per second, or a text such as "500MB/s".
    peer_every, peer_limit
        On several nodes each keeps copies of what only one other has, of one step after the other; of multiples of this
        number, or of none if it is None. ``peer_limit`` bounds the bytes per second that a node copies.
    patience
        Seconds without a sign after which another node is lost, and the ranks end; 2 or more.
    keep, keep_every
        Durable checkpoints that stay: the newest ``keep``, and every multiple of ``keep_every``. With neither, the
        newest two and one of each power-of-two age in steps, eight at most; with ``keep_every`` alone the newest two.
    keep_best
        ``("loss", "min")`` keeps the best durable checkpoint besides, by what ``step()`` and ``save()`` get as metrics.
    overlap
        True copies what only the optimizers in ``state`` change while training goes on; an update waits for what is
        left. False copies all inside of ``step()``, which returns with the snapshot committed. "auto" is False where no
        rank's snapshot is over 16 MiB or on a device; ``metrics.committed_in_step`` tells.
        "verify" is True, and compares every byte to name what anything else changes meanwhile: for a first try.
    rng
        Save the random generators of Python, NumPy, torch and its devices too.
    allow_pickle
        Pickle values that the format has no type for, instead of refusing them. Loading them must be allowed again.
    allow_missing
        Go on though an optimizer in ``state`` trains parameters that nothing in ``state`` holds. They are not saved.
    strict
        Raise when a save fails, or when the memory store can't be used, instead of warning and falling back.
    memory
        Directory of the memory store; default $REKINDLE_MEMORY, else /dev/shm.
    memory_limit, memory_headroom
        Bytes that the job's snapshots may hold on each node, and bytes that stay free there for others, such as a
        ``DataLoader``'s workers: of /dev/shm a quarter, at least 64 MiB, elsewhere 0. A snapshot needs twice its size,
        or saves go straight to storage; and three times while one is being drained, or the third is done without.
    idle_timeout
        Seconds after the last trainer has gone until the agent leaves, everything being durable.
    fallback_after
        Seconds in which an agent that is gone, or memory that takes no more saves, gets three more chances; then it is
        done without, and tried now and then. Saves that memory doesn't take go straight to storage from the first on.

    Raises UsageError for arguments that make no sense and for parameters that are trained and not saved, BusyError
    when another process trains this rank, UnsupportedValueError when the state holds something that can't be saved.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        snapshot_every: int | str = Settings.snapshot_every,
        snapshot_budget: float = Settings.snapshot_budget,
        persist_every: int | str | None = Settings.persist_every,
        persist_seconds: float = Settings.persist_seconds,
        drain_limit: int | str | None = Settings.drain_limit,
        peer_every: int | Literal["auto"] | None = Settings.peer_every,
        peer_limit: int | str | None = Settings.peer_limit,
        patience: float = Settings.patience,
        keep: int | None = Settings.keep,
        keep_every: int | None = Settings.keep_every,
        keep_best: tuple[str, Literal["min", "max"]] | None = Settings.keep_best,
        overlap: Overlap = Settings.overlap,
        rng: bool = Settings.rng,
        allow_pickle: bool = Settings.allow_pickle,
        allow_missing: bool = Settings.allow_missing,
        strict: bool = Settings.strict,
        memory: str | os.PathLike[str] | None = Settings.memory,
        memory_limit: int | None = Settings.memory_limit,
        memory_headroom: int | None = Settings.memory_headroom,
        idle_timeout: float = Settings.idle_timeout,
        fallback_after: float = Settings.fallback_after,
    ) -> None:
        tell_of_uncaught_errors()
        settings = Settings(
            snapshot_every=snapshot_every,
            snapshot_budget=snapshot_budget,
            persist_every=persist_every,
            persist_seconds=persist_seconds,
            drain_limit=drain_limit,
            peer_every=peer_every,
            peer_limit=peer_limit,
            patience=patience,
            keep=keep,
            keep_every=keep_every,
            keep_best=keep_best,
            overlap=overlap,
            rng=rng,
            allow_pickle=allow_pickle,
            allow_missing=allow_missing,
            strict=strict,
            memory=memory,
            memory_limit=memory_limit,
            memory_headroom=memory_headroom,
            idle_timeout=idle_timeout,
            fallback_after=fallback_after,
        )
        self.root = root_to_train(root)
        self.metrics = Metrics()
        self._peer_every, self._keep_best = settings.peer_every, settings.keep_best
        self._capture = Capture(accept_loaders(state), rng=rng, allow_pickle=allow_pickle)
        self._session = session = Session(self.root, memory)
        self._fence = Fence(self._capture.state)
        self._capture.use_fence(self._fence)
        self._updates = Updates(self._capture.state, self._fence)
        self._base: ShardId | None = None  # the checkpoint that this run continues
        self._closed = self._ended = False
        self._successor = ""  # says that a later Checkpointer has this one's place, once it has
        self._group = this_group()
        size = partial(agree_on_partition, self._group, self._capture, allow_missing=allow_missing)
        session.join(meet(self._group, session, size, settings.room, settings.agreed()))
        try:
            self._clock = RecoveryClock(session)
            introduce(session.job_dir, self.root)
            self._saver = start_saver(self._group, session, self._capture, self._fence, settings, self.metrics)
        except BaseException:  # else whoever keeps the traceback would keep the rank's place
            self._fence.close()
            session.leave()
            raise
        self._exit_report = ExitReport(self._saver, session)
        self._imports = ImportRecord()
        session.on_takeover(self._give_way)
        warn_of_reused_store(self._group.rank)

    # -- restoring ----------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        allow_pickle: bool = False,
        partial: bool | str | Collection[str] = False,
        strict: bool | None = None,
    ) -> int:
        """Load the newest checkpoint that all ranks can read, or that of ``step``. A collective.

        Returns the number of completed steps: 0 when there is nothing to restore. ``restore(step=0)`` starts anew: all
        checkpoints are superseded. Superseded ones are removed from storage once this run has a durable checkpoint
        there, and from memory at its first save.

        ``partial=True`` loads what fits and leaves the rest as it is; a table in the log shows the outcome for each
        part. Names of parts, as in ``partial=["model"]``, leave the other parts as they are. ``strict=False`` is an old
        name of ``partial=True``.

        Raises NotFoundError when ``step`` isn't there, CorruptError when checkpoints exist but none is sound,
        StateMismatchError when the checkpoint doesn't fit the live state, or has nothing of a part to be loaded.
        """
        step = check_chosen_step(step)
        parts = choose_parts(partial, strict, self._capture.state)
        self._check_open()
        if self._saver.newest is not None:
            raise UsageError("restore() comes before the first save of a run")
        session = self._session
        if session.slots is not None and step != 0:
            rebuild(session.job_dir, session.slots, elsewhere_of(session.nodes))
        state, job, store = self._capture.state, session.job, session.store
        done, seen = restore(
            self._group, state, job, store, step, allow_pickle=allow_pickle, parts=parts, nodes=session.nodes
        )
        first, chosen = not session.begun, step is not None
        if done is None:
            session.go_on_from(None, None, chosen=chosen, seen_generation=seen)
        else:
            session.go_on_from(done.checkpoint, done.stored, chosen=chosen, back=done.back, seen_generation=seen)
        if session.slots is not None and first and session.agreed.found:
            session.reserve(self._capture.estimate())
        at, place, seconds, self._base = 0, "", 0.0, None  # an earlier restore() counts no more
        if done is not None:
            at, place, seconds = done.step, done.place, done.seconds
            self._base = ShardId(at, self._group.rank, self._group.world, done.checkpoint.incarnation)
        self._saver.restored = self._saver.reached = at
        self._updates.begin()
        self._clock.restored(at, place)
        self.metrics.restored(at, place, seconds)
        return at

    # -- saving -------------------------------------------------------------------------------------------------

    def step(self, n: int, metrics: Mapping[str, SupportsFloat] | None = None) -> None:
        """Note that ``n`` optimizer updates are complete, and save if the step is due, with ``metrics`` for keep_best.

        Never waits for storage, nor for memory: a step that is due while that is being made is not saved.

        Until the next update, parameters and optimizer state may only be changed inside of ``updating()``.
        """
        metric = measured(metrics, self._keep_best, self._group.rank)
        with self._saver.stepping(n):
            self._step(n, metric)

    def _step(self, n: int, metric: Metric | None) -> None:
        self._saver.conclude()
        self._check_step(n)
        self._begin()
        schedule = self._saver.schedule
        if schedule.due(n, memory=self._saver.memory is not None):
            self._save(n, persist=schedule.persists(n), metric=metric)
        else:
            self._saver.live.note(self._session.shard_id(n, persist=False))
            self._session.check_agent()
        self._imports.note_step(n)
        self._clock.stepped(n)

    def save(
        self,
        n: int,
        wait: Literal["memory", "node", "durable"] | None = None,
        timeout: float = 600.0,
        *,
        pin: bool | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> None:
        """Save step ``n`` now, due or not, and send it to storage. Waits for memory that is being made.

        ``wait="memory"`` returns when it is in memory, where it survives this process; ``wait="node"`` when it survives
        the loss of any one node, which only a job on several nodes can wait for; ``wait="durable"`` when it is on
        storage. Raises NotDurableError when the save failed, or after ``timeout`` seconds; in the latter case the
        checkpoint is still on its way. With ``pin`` it stays there until ``unpin(n)``, whatever ``keep`` says, and this
        waits, as long, until what was pinned before is on storage; None pins with ``wait="durable"``.
        ``metrics``, those of rank 0, tell keep_best how good the step is, which may have been saved before.
        """
        timeout = check_timeout(timeout)
        pin = wait == "durable" if pin is None else pin
        if wait not in (None, "memory", "node", "durable"):
            raise UsageError(f"wait is {wait!r}: must be None, 'memory', 'node' or 'durable'")
        if wait == "node":
            refuse_wait(self._session, self._peer_every)
        metric = measured(metrics, self._keep_best, self._group.rank)
        with self._saver.stepping(n):
            self._saver.conclude()
            self._check_step(n)
            self._begin()
            self._save(n, persist=True, pin=pin, wait=True, other_nodes=wait == "node", metric=metric)
        self._imports.note_step(n)
        self._clock.stepped(n)
        see_to(self._saver, n, self._base, wait=wait, pin=pin, metric=metric, timeout=timeout)

    def unpin(self, n: int) -> None:
        """Let ``keep`` decide on step ``n`` again. One rank is enough. Raises NotFoundError when storage lacks it."""
        unpin_step(self._session.store, n)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Wrap updates that torch's step hooks don't announce: optimizers of other kinds, replayed CUDA graphs.

        Waits until the newest snapshot has what the update will change. From its first use on, what such an optimizer
        owns is copied behind the training's back too, so every update must then be wrapped. A step whose update nobody
        has announced is copied inside of ``step()``. An optimizer's step that is compiled as one graph goes here too.

        Ranks need not call it alike, except inside of ``guard(fence=True)`` where no optimizer in ``state`` announces
        its updates by torch's hooks: there it waits for all ranks.
        """
        with self._fence.by_hand():
            self._saver.wait_before_update(together=not self._fence.hooked)
            yield

    def guard(
        self,
        *,
        watchdog: bool | float | Literal["fast"] = True,
        fence: bool = False,
        gasp_deadline: float = 25.0,
        notices: Sequence[Notice] = (signal.SIGTERM,),
        on_stop: Callable[[Fault], object] | None = None,
        on_clean: Callable[..., object] | None = None,
        on_gasp: Callable[..., object] | None = None,
        on_exit: Callable[[Fault], object] | None = None,
    ) -> Guard:
        """Secure the state of the current step when a rank fails, hangs or is told to go. Context manager, decorator.

        watchdog
            End the job when it makes no progress for 60 s, nor for 3 times the longest of its recent steps and 1 s. A
            number of seconds takes the place of the 60; "fast" leaves the steps alone to tell, for jobs that declare
            their pauses; False switches it off. The most patient rank of a node speaks for all of its ranks.
        fence
            Wait for all ranks before each update, so that all begin it or none: for jobs that take no snapshots. Where
            optimizers have torch's step hooks these wait, else ``updating()`` does.
        gasp_deadline
            Seconds after the process is told of a fault at which it ends, come what may. torchrun gives 30 s.
        notices
            What tells this process to go: signals, files that appear, callables whose answer becomes true.
        on_stop, on_clean, on_gasp, on_exit
            Called after a fault, each in a thread of its own and for a part of the time that is left: at once (for a
            state on devices only if they can't be read, by default to abort NCCL's communicators), before and after a
            step is secured, before the process ends. on_stop and on_exit get the Fault, the others the step, and the
            Fault if they have a parameter ``fault``. on_clean returns False, or what counts as false other than None,
            if the state can't be read.

        An exception of the guarded part is raised again; a rank that ends because of another one's fault has exit code
        75, one that a signal told to go 128 and the signal's number.
        """
        self._check_open()
        return Guard(
            *(self._saver, self._session, self._group),
            fence=fence,
            floor=silence_floor(plain_bool(watchdog)),
            deadline=gasp_deadline,
            notices=notices,
            hooks=Hooks(on_stop, on_clean, on_gasp, on_exit),
        )

    def pause_watchdog(self, what: str) -> AbstractContextManager[None]:
        """Declare a long pause that is no fault: ``with ckpt.pause_watchdog("evaluation"):``."""
        return self._saver.pause(what)

    def report(self, *, loss: float | torch.Tensor) -> None:
        """Raise NonFiniteLossError for a loss that is infinite or not a number, before it gets into the parameters.

        To be called before the update. A tensor on a device is waited for.
        """
        check_loss(loss, self._saver.reached)

    def _save(
        self,
        n: int,
        *,
        persist: bool,
        metric: Metric | None,
        pin: bool = False,
        wait: bool = False,
        other_nodes: bool = False,
    ) -> None:
        self._session.check_agent()
        base = self._base if self._saver.newest is None else None
        places = (STORAGE,) if other_nodes else (MEMORY, STORAGE)
        if base is not None and base.step == n and (not persist or self._saver.find_restored(base) in places):
            return  # it has just been restored, and there is nothing to add
        stamp = replace(self._session.shard_id(n, persist=persist), pinned=pin, metric=metric)
        self._saver.save(stamp, wait=wait)

    def _check_step(self, n: int) -> None:
        self._check_open()
        check_step(n, self._saver.newest, self._base, self._updates)
        if not self._session.begun and self._session.agreed.found:
            raise UsageError(
                f"{self.root} holds checkpoints already: call restore() before the first step, or use a new root"
            )
        self._updates.complete(n)

    def _begin(self) -> None:
        """Begin from nothing, unless restore() was called before."""
        if not self._session.begun:
            if self._session.agreed.deleted and self._group.rank == 0:
                log.warning("%s", describe_fresh_start(self.root))
            self._session.go_on_from(None, None)

    # -- looking ------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Checkpoint]:
        """Returns all complete checkpoints that this node can see, newest first, without superseded ones."""
        self._saver.conclude()
        return list_checkpoints(self._session.job, self._session.store, self._session.local_ranks)

    def latest(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint that this node can see, or None."""
        return next(iter(self.checkpoints()), None)

    # -- ending -------------------------------------------------------------------------------------------------

    def close(self, timeout: float = 600.0) -> None:
        """Wait until the newest save, or what was restored, is durable and older ones are pruned; give memory back.

        Raises NotDurableError after ``timeout`` seconds; ``math.inf`` waits for as long as it takes. Nothing is lost by
        that: the snapshot stays in memory, and the agent goes on carrying it to storage, which a second call waits for.
        Does nothing in a forked child: all belongs to its parent.
        """
        timeout = check_timeout(timeout)
        if self._ended or self._saver.forked:
            return
        if self._successor:
            raise UsageError(self._successor)
        durable: ShardId | None = None
        try:
            self._saver.conclude()
            self._saver.save_skipped(timeout)
            newest = self._saver.newest or self._base
            kept = self._saver.find_restored(newest)
            if newest is not None and not kept:
                self._saver.persist(newest)
                self._saver.wait_durable(newest, timeout)
                log.info("closed: step %d is durable; %s", newest.step, self.metrics.summary())
            durable = newest if not kept or (kept == STORAGE and self._saver.memory is not None) else None
            self._ended = True
            self._clock.ended(newest.step if newest is not None else -1)
        finally:
            self._let_go(durable)

    def _give_way(self) -> str | None:
        """Let go for good, to a later Checkpointer of this root and process. Returns a reason if that can't be now."""
        if self._closed or self._saver.forked:
            return None
        if self._saver.busy:
            return "an earlier Checkpointer of this process is inside of guard() or step() at this root: end that first"
        self._saver.finish_quietly(GIVE_WAY)
        self._let_go(None)
        self._successor = (
            f"this Checkpointer gave way to a later one of this process at {self.root}, which may have failed since: "
            "use that one, or make a new one"
        )
        return None

    def _check_open(self) -> None:
        self._saver.refuse_child()
        if self._closed:
            raise UsageError(self._successor or "the checkpointer is closed")

    def _let_go(self, durable: ShardId | None) -> None:
        if not self._closed:
            self._closed = self._exit_report.given = True
            self._fence.close()
            self._saver.close()
            with self._saver.pause("waiting for the agent"):
                self._session.leave(durable)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not (self._closed or self._saver.forked):
            self._saver.finish_quietly(0.0)
            self._let_go(None)
            self._exit_report.give(error)
