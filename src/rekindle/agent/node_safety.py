"""Keeps steps safe from the loss of a node: agrees on them with the others, has them copied, notes how far that is."""

from __future__ import annotations

import logging
import math
import threading
from contextlib import suppress
from typing import Any

from rekindle.agent.common_step import NOTHING_TOLD, CommonStep, Own, Told
from rekindle.agent.copier import Aim, Copier
from rekindle.agent.held_steps import HeldSteps
from rekindle.agent.pause import pause_of
from rekindle.format.lineage import ShardId
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Nodes
from rekindle.memory.notes import Common
from rekindle.storage.throttle import drain_interval

__all__ = ["NodeSafety"]

log = logging.getLogger("rekindle.agent")

_LOOK_EVERY = 0.5
"""Seconds after which the own snapshots are looked at though the status pages say nothing new: a rank outside of
``guard()`` has none."""


class NodeSafety:
    """One node's part in keeping a start's steps safe. Used in the event loop, except for ``hear``."""

    def __init__(self, job: JobDir, nodes: Nodes, info: JobInfo) -> None:
        self._job, self._info, self._start, self._pause = job, info, nodes.start, info.persist_seconds
        present = [number for number, node in enumerate(nodes.nodes) if node.port]
        every = info.peer_every
        copies = every is not None and len(present) == len(nodes.nodes) > 1
        self._copier = Copier(job, nodes, info.peer_limit, info.headroom) if copies else None
        common = job.notes.common()
        self._noted = common if common is not None and common.start == nodes.start else None
        noted = self._noted
        former = NOTHING_TOLD if noted is None else Told(0, noted.step, 0, False, noted.safe, noted.drain)
        step = every if isinstance(every, int) else 1
        self._common = CommonStep(nodes.own, present, copies=copies, every=step, former=former)
        self._lock = threading.Lock()
        self._heard: dict[int, Told] = {}
        """Newest words of other nodes that were not taken up yet. Guarded by the lock."""
        self._held = HeldSteps(job.snapshots, nodes.start, nodes.here.ranks)
        self._stamps: dict[int, ShardId] = {}
        """Steps that all ranks of this node have in memory."""
        self._newest, self._looked = -1, -math.inf
        self._marked = -math.inf
        """Time at which a step was last marked for storage."""
        self._cramped = False
        """True once people were told that memory has no room for saves beside the common step."""
        self._named, self._seconds = -math.inf, 0.0
        """Time at which the present round came, and seconds from the one before to it."""

    def start(self) -> None:
        """Begins to copy. Raises RuntimeError if no thread can be had."""
        if self._copier is not None:
            self._copier.start()

    def close(self) -> None:
        """Ends the copies. Never waits."""
        if self._copier is not None:
            self._copier.close()

    @property
    def told(self) -> Told:
        """The word for the next beat."""
        return self._common.told

    def hear(self, number: int, told: Told) -> None:
        """Takes up the word of another node. For any thread."""
        with self._lock:
            self._heard[number] = told

    def tick(self, now: float, newest: int, *, leads: bool, calm: bool, urgent: bool) -> None:
        """Does what is due. To be called at each beat.

        ``newest`` is the newest step in memory as the ranks' pages tell, -1 if they don't; ``leads`` and ``calm`` are
        as for ``CommonStep``. At an ``urgent`` moment nothing is paced.
        """
        self._look(now, newest)
        with self._lock:
            heard, self._heard = self._heard, {}
        before = self._common.told
        self._common.tick(self._facts(), now, heard.values(), leads=leads, calm=calm, due=leads and self._is_due(now))
        told = self._common.told
        if told.drain != before.drain:
            self._marked = now
        if (told.round, told.step) != (before.round, before.step):
            self._seconds = now - self._named if self._named > -math.inf else 0.0
            self._named = now
        if self._note(told) and self._copier is not None:
            self._copier.hurry(on=urgent or told.wanted > told.safe)
            stamp = self._stamps.get(told.step) if self._common.is_open else None
            self._copier.aim(None if stamp is None else Aim(told.round, stamp, self._seconds))

    def status(self) -> dict[str, Any]:
        """Returns what an agent tells of it: ``node_safe``, a step or None, and ``copying``, the copy in hand."""
        progress = self._copier.progress if self._copier is not None else None
        safe = self._common.told.safe
        return {
            "node_safe": None if safe < 0 else safe,
            "copying": None if progress is None else progress._asdict(),
        }

    def _look(self, now: float, newest: int) -> None:
        due = now - self._looked > _LOOK_EVERY or self._common.is_open  # nothing old is told of what others count on
        if newest < 0 or newest != self._newest or due:
            self._newest, self._looked = newest, now
            self._stamps = self._held.look()

    def _facts(self) -> Own:
        """Returns what is known of this node."""
        steps, copier = frozenset(self._stamps), self._copier
        if copier is None:
            return Own(steps, steps)
        told = self._common.told
        wanted = self._job.notes.wanted()  # perhaps of an earlier start
        promised = self._noted.kept if self._noted is not None else -1  # saves may still write over any other one
        return Own(
            steps=steps,
            kept=frozenset(step for step in steps & copier.copied if step <= told.safe or step == promised),
            failed=copier.failed == (told.round, told.step) or (self._is_cramped() and told.wanted != told.step),
            moved=copier.moved,
            wanted=wanted if wanted is not None and wanted in steps else -1,
        )

    def _is_cramped(self) -> bool:
        """Returns True on a node whose memory has no room for saves beside the common step. Warns of it once."""
        found = self._job.notes.is_cramped(self._start)
        if found and not self._cramped:
            log.warning(
                "newer steps are not safe from the loss of a node: memory here has room for two snapshots of a rank, "
                "and a save needs one beside those that all nodes keep: make the file system larger, raise "
                "memory_limit, or lower memory_headroom"
            )
        self._cramped = self._cramped or found
        return found

    def _is_due(self, now: float) -> bool:
        """True if storage should get a step: the last one was marked, and its drain began, long enough ago."""
        if self._pause is None or self._marked <= now < self._marked + self._pause:
            return False
        began, took = self._job.notes.last_drain() or (-math.inf, 0.0)
        return not 0 <= now - max(began, self._marked) < drain_interval(pause_of(self._job, self._info), took)

    def _note(self, told: Told) -> bool:
        """Notes how far it is, for the trainers and the drain. Returns False if memory has no room for that.

        A new start notes nothing before it has named a step: what the former one has noted counts until then.
        """
        kept = told.step if self._common.is_promised else -1
        common = Common(self._start, told.step, told.safe, told.drain, kept)
        if common != self._noted and told.step >= 0:
            with suppress(OSError):
                self._job.notes.write_common(common)
                self._noted = common
        return common == self._noted
