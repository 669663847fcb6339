"""Copies the common step from the memory of the node that this one keeps copies for, so that it outlives that node."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

from rekindle.agent.held_steps import HeldSteps
from rekindle.common.priority import lower_priority
from rekindle.errors import FormatError, RekindleError
from rekindle.format.layout import Chunk
from rekindle.format.lineage import ShardId
from rekindle.format.receipt import Receipt
from rekindle.format.shard import OpenShard
from rekindle.memory.copies import CopySlots
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.memory.nodes import Node, Nodes, describe_node
from rekindle.peers.copying import copy_shard
from rekindle.peers.files import PeerFiles
from rekindle.peers.links import Links
from rekindle.peers.local_states import describe
from rekindle.peers.wire import Credentials, call, connect
from rekindle.peers.witnesses import Witnesses
from rekindle.storage.throttle import Budget

__all__ = ["AGENT_AWAY", "Aim", "Copier", "Progress"]

log = logging.getLogger("rekindle.agent")

_SHARE = 0.8
"""Part of the time between two common steps that a copy takes, if the network lets it."""
_AT_ONCE = 4 << 20
"""Bytes of a copy that is not paced: they take 35 ms at 1 Gb/s."""
_SLOW = 20.0
"""Seconds after which a copy that is cut off was too slow for those that wait for it: they wait for 30 s at least."""
_PIECE = 1 << 20
"""Bytes that are waited for in one go under a limit: the wait for a whole block would be taken for a stall."""
_LEAST, _MOST = 1 / 16, 1 / 2
"""Parts of the speed that the last copy found: a copy that is paced may take the one whatever the time, and never takes
more than the other. Training has the rest of a network that it shares."""
_ASK_EVERY = 0.1
"""Seconds between two questions for a shard that the source has not committed yet."""
_LIST_EVERY = 0.5
"""Seconds of such questions after which the source is asked what it has: it may have skipped the step."""
AGENT_AWAY = 10.0
"""Seconds in which an agent of the source that was killed must be followed by another one, which has the same shards.
Nothing is won by an earlier end: no step is node-safe without it, and one that is given up is kept for a while."""
_PATIENCE = 3.0
"""Seconds in which the source must connect, answer, and send more. The copier of a new start waits for that of the one
before, and launchers wait as long for a node that is silent."""
_READING = 8
"""Connections that are kept beyond one for each rank of the source: for threads that read, and to further nodes."""
_TAKE_OVER_EVERY = 5.0
"""Seconds until the next try to take over the copies of before, if one has failed."""
_WARN_AFTER = 2
"""Common steps in a row that could not be copied after which a warning is due."""


class Aim(NamedTuple):
    """The step to be copied."""

    round: int
    """Number of its naming. What has failed may succeed in a later one."""
    stamp: ShardId
    """Stamp of a shard of it on this node."""
    seconds: float
    """Time from the common step before to this one; 0.0 if that is unknown."""

    @property
    def name(self) -> tuple[int, int]:
        """Round and step, which tell it from all others."""
        return self.round, self.stamp.step


class Progress(NamedTuple):
    """Bytes of a copy in hand."""

    step: int
    done: int
    total: int


class _AbandonedError(Exception):
    """Another step is aimed at, or the copier is to end."""


class Copier:
    """Copies step after step of the source's ranks, in a thread of its own. A failure is logged, and tried again."""

    def __init__(self, job: JobDir, nodes: Nodes, limit: int | None, headroom: int) -> None:
        """``limit`` is the most bytes per second; None for as many as keep up. ``headroom`` is that of ``Slots``."""
        self._job, self._nodes = job, nodes
        self._source = nodes.nodes[nodes.source]
        self._limit, self._headroom = limit, headroom
        self._held = HeldSteps(job.copies.snapshots, nodes.start, self._source.ranks)
        self._witnesses = Witnesses(job, nodes)
        self._links = Links(_READING + len(self._source.ranks))
        """Kept from step to step: a new connection may have to wait, amid a flood of them."""
        self._budget = Budget()
        self._speed: float | None = None
        """Bytes per second of the last copy that was not small, without its waits; None before."""
        self._began = 0.0
        """Time at which the copy in hand began."""
        self._changed = threading.Condition()
        self._aim: Aim | None = None
        self._over = False
        self._failures = 0
        """Number of failures since a step was last copied."""
        self.copied = frozenset(self._held.look())
        """Steps of the start of which all shards of the source's ranks are copied. Those of a former agent are known at
        once: it may have told others of them."""
        self.failed = (-1, -1)
        """Round and step that can't be copied."""
        self.moved = time.monotonic()
        """Time of the last byte."""
        self.progress: Progress | None = None
        """The copy in hand."""
        self._thread = threading.Thread(target=self._run, name="rekindle-copier", daemon=True)

    def start(self) -> None:
        """Begins to copy. Raises RuntimeError if no thread can be had."""
        self._thread.start()

    def close(self) -> None:
        """Has the thread end: at once, unless it waits for another node."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._budget.lift()

    def aim(self, aim: Aim | None) -> None:
        """Names the step to copy, in place of any other; None for none. For any thread, at any moment."""
        with self._changed:
            if (aim and aim.name) != (self._aim and self._aim.name):
                self._aim = aim
                self._changed.notify()

    def hurry(self, *, on: bool) -> None:
        """Lifts the limit while somebody waits, or the source may go soon."""
        self._budget.lift(on=on or self._over)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_priority()
        with closing(self._links), ExitStack() as stack:
            slots = self._open(stack)
            while slots is not None and (aim := self._next()) is not None:
                try:
                    self._copy_from_agents(slots, aim)
                    self._succeed(aim)
                except _AbandonedError:
                    self._note_end(aim)
                except Exception as error:  # memory and network have many ways to fail, and training goes on
                    self._fail(aim, error)
                finally:
                    self.copied, self.progress = frozenset(self._held.look()), None

    def _open(self, stack: ExitStack) -> CopySlots | None:
        """Takes over the copies that are there. Returns None if the copier is to end.

        They have one owner: the copier of an earlier start may still wait for a node that is gone.
        """
        world = sum(len(node.ranks) for node in self._nodes.nodes)
        while not self._over:
            try:
                self._job.copies.path.mkdir(mode=0o700, exist_ok=True)
                lock = Lock(self._job.copies.paths.agent_lock)
                if not lock.acquire(_ASK_EVERY):
                    continue
                stack.callback(lock.release)
                slots = CopySlots(self._job, self._source.ranks, world, self._headroom)
                stack.callback(slots.close)
                slots.adopt()
                return slots
            except (OSError, RekindleError) as error:
                stack.close()
                self._fail(None, error)
                with self._changed:
                    self._changed.wait_for(lambda: self._over, _TAKE_OVER_EVERY)
        return None

    def _next(self) -> Aim | None:
        """Waits for a step that is not copied yet, and has not failed. Returns None at the end."""

        def due() -> bool:
            aim = self._aim
            return aim is not None and aim.name != self.failed and aim.stamp.step not in self.copied

        with self._changed:
            self._changed.wait_for(lambda: self._over or due())
            return None if self._over else self._aim

    def _copy_from_agents(self, slots: CopySlots, aim: Aim) -> None:
        """Copies a step: once more from the next agent of the source if one is killed meanwhile."""
        until = None
        while True:
            try:
                self._copy(slots, aim)
                return
            except ConnectionError:
                until = until or time.monotonic() + AGENT_AWAY
                if time.monotonic() > until:
                    raise
            self._pause(aim)

    def _copy(self, slots: CopySlots, aim: Aim) -> None:
        slots.tidy(self._source.ranks)  # there may be room for this one only then
        with ExitStack() as stack:
            todo: list[tuple[OpenShard, list[Chunk]]] = []
            for rank in self._source.ranks:
                if not slots.has(aim.stamp.checkpoint, [rank]):
                    # Pinned until it is copied.
                    shard = stack.enter_context(self._await_shard(aim, self._source, rank))
                    todo.append((shard, self._witnesses.unique_chunks(shard.receipt, partial(self._ask, aim))))
            total = sum(chunk.nbytes for _, chunks in todo for chunk in chunks)
            self._budget.limit = self._limit or _pace(total, aim.seconds, self._speed)
            self.progress = Progress(aim.stamp.step, 0, total)
            self.copied &= {self._job.notes.safe_step(self._nodes.start)}  # others may be written over from here on
            self._began, seconds = time.monotonic(), 0.0
            for shard, chunks in todo:
                seconds += copy_shard(shard, chunks, slots, lambda nbytes: self._take(aim, nbytes))
                shard.close()  # its connections serve the next one
                self._check(aim)
            if total > _AT_ONCE:
                self._speed = total / max(seconds, 1e-3)
        slots.tidy(self._source.ranks)

    def _take(self, aim: Aim, nbytes: int) -> None:
        """Waits until so many bytes may be copied, and counts them."""
        for at in range(0, nbytes, _PIECE):
            piece = min(_PIECE, nbytes - at)
            self._check(aim)
            self._budget.take(piece)
            self._check(aim)
            self.moved = time.monotonic()
            if self.progress is not None:
                self.progress = self.progress._replace(done=self.progress.done + piece)

    def _check(self, aim: Aim) -> None:
        now = self._aim
        if self._over or now is None or now.name != aim.name:
            raise _AbandonedError

    def _succeed(self, aim: Aim) -> None:
        if aim.stamp.step not in self._held.look():
            raise FormatError(f"the copy of step {aim.stamp.step} was removed")
        if self._failures >= _WARN_AFTER:
            log.info("steps are safe from the loss of %s again", describe_node(self._source.name, self._source.ranks))
        self._failures = 0

    def _note_end(self, aim: Aim) -> None:
        """Counts a copy that was cut off as a failure: its step was given up, as one that takes too long is."""
        slow = time.monotonic() - self._began >= _SLOW  # else another node may have failed
        if slow and not self._over and self.progress is not None:
            _, done, total = self.progress
            limit = f", at {self._limit:,} bytes/s at most (peer_limit)" if self._limit else ""
            why = f"step {aim.stamp.step} was given up when {done:,} of {total:,} bytes had come{limit}"
            self._fail(None, TimeoutError(why))

    def _fail(self, aim: Aim | None, error: Exception) -> None:
        self._failures += 1
        if self._failures == _WARN_AFTER:
            log.warning(
                "newer steps are not safe from the loss of %s, whose copies are tried again: %s",
                *(describe_node(self._source.name, self._source.ranks), describe(error) or repr(error)),
            )
        if aim is not None:
            self.failed = aim.name

    # -- asking the source ----------------------------------------------------------------------------------------

    @contextmanager
    def _await_shard(self, aim: Aim, node: Node, rank: int) -> Iterator[OpenShard]:
        """Opens a rank's shard of the step, once its node has it. Raises OSError when it never will."""
        files = PeerFiles.of(self._nodes, node, aim.stamp.checkpoint, _PATIENCE, _PATIENCE, self._links)
        list_at = time.monotonic() + _LIST_EVERY
        while True:
            try:
                shard = files.shard(rank, aim.stamp.world)
                break
            except FileNotFoundError:
                if time.monotonic() > list_at:
                    list_at += _LIST_EVERY
                    if self._has_skipped(aim, node, rank):
                        raise
            self._pause(aim)
        with shard:
            found = shard.receipt.stamp
            if (found.checkpoint, found.rank, found.world) != (aim.stamp.checkpoint, rank, aim.stamp.world):
                raise FormatError(f"{shard.path}: is not the shard that was asked for")
            yield shard

    def _pause(self, aim: Aim) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._aim is None or self._aim.name != aim.name, _ASK_EVERY)
        self._check(aim)

    def _has_skipped(self, aim: Aim, node: Node, rank: int) -> bool:
        """True if a node has a later step of its rank, and not the one that is asked for."""
        wanted = aim.stamp
        link = connect(node.host, node.port, Credentials.of(self._nodes), _PATIENCE, node.name)
        try:
            listed: Any = call(link, {"verb": "list"}, _PATIENCE).get("shards")
        finally:
            link.close()
        stamps = [ShardId.from_json(value) for value in listed] if type(listed) is list else []
        steps = {stamp.step for stamp in stamps if (stamp.rank, stamp.incarnation) == (rank, wanted.incarnation)}
        return wanted.step not in steps and max(steps, default=-1) > wanted.step

    def _ask(self, aim: Aim, rank: int) -> Receipt | None:
        """Returns the receipt of a rank of a further node: an ``Ask``."""
        try:
            with self._await_shard(aim, self._nodes.node_of(rank), rank) as shard:
                return shard.receipt
        except (OSError, RekindleError):
            return None  # more is copied


def _pace(total: int, seconds: float, speed: float | None) -> int | None:
    """Returns the bytes per second by which a copy ends just before the next one is due; None for no limit.

    ``speed`` is that without one.
    """
    if total <= _AT_ONCE or seconds <= 0 or speed is None:
        return None
    return int(min(max(total / (_SHARE * seconds), _LEAST * speed), _MOST * speed))
