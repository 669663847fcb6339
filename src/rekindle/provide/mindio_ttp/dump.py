"""Dumps a checkpoint after a fault: the ranks agree on a step and on its writers, write it, and one gives it its name.

Each rank tells what it holds. The first that knows enough decides for all. A rank that dies or fails while it writes is
left out, and the others begin anew, as long as they hold all shards.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from rekindle.provide.mindio_ttp.board import Board
from rekindle.provide.mindio_ttp.callbacks import Callbacks
from rekindle.provide.mindio_ttp.replicas import Group, choose, groups_from_json

__all__ = ["STOP_FIRST", "Dump", "Result"]

log = logging.getLogger("rekindle")

STOP_FIRST = "TTP_STOP_CLEAN_BEFORE_DUMP"
"""Environment variable: 1 calls the callbacks ``stop`` and ``clean`` of the ranks that write before they do."""
_OTHERS = 8.0
"""Seconds in which the others should have told what they hold: an update that is under way gets 5 s to end."""
_QUIET = 1.0
"""Seconds for the thread that trains to stand still. It may draw random numbers until then."""
_POLL = 0.01
T = TypeVar("T")


def _poll(look: Callable[[], T | None], until: float) -> T | None:
    """Calls ``look`` until it returns something, which is returned, or until the time has come: then None."""
    while (found := look()) is None and time.monotonic() < until:
        time.sleep(_POLL)
    return found


@dataclass(frozen=True)
class Result:
    """The outcome of a dump."""

    step: int
    """The step that has its name now; 0 if there is none."""
    error: str = ""


@dataclass
class Dump:
    """One rank's part in a dump. ``run`` does all, once."""

    board: Board
    rank: int
    world: int
    callbacks: Callbacks
    step: int | None
    """The step that this rank's state is of; None if it can't be read."""
    set_generators: Callable[[int], object]
    """Sets the random generators to what they were at a step's end."""
    stands_still: threading.Event
    """Set once the thread that trains does."""
    on_devices: Callable[[], AbstractContextManager[object]]
    """Wraps calls that use devices beside what is queued there."""
    until: float
    """Time at which the ranks give up, by the monotonic clock."""
    _writing: threading.Thread | None = None
    """Thread in which the program writes this rank's part, once it does."""

    def run(self, dead: Collection[int]) -> Result:
        """Returns what came of the dump. ``dead``: ranks that are known to have ended. Doesn't raise for a failure."""
        began = time.monotonic()
        try:
            result = self._run(dead)
        except Exception as error:
            result = Result(0, f"{type(error).__name__}: {error}")
        took = time.monotonic() - began
        if result.error:
            log.error(
                "rank %d: no checkpoint was dumped (%.1f s): %s. The next start goes on from the newest checkpoint "
                "that the program has saved before",
                *(self.rank, took, result.error),
            )
        else:
            log.warning("rank %d: step %d is dumped and has its name, after %.1f s", self.rank, result.step, took)
        return result

    def _run(self, dead: Collection[int]) -> Result:
        readable = self.step if self.callbacks.has("save_ckpt") else None
        self.board.tell(f"state-{self.rank}", {"step": readable})
        self._await_states(dead)
        without: set[int] = set()
        for attempt in count(1):
            plan = self._agree(attempt, without)
            if "error" in plan:
                return Result(0, plan["error"])
            without |= set(plan["without"])
            groups = [(kind, list(ranks)) for kind, ranks in plan["groups"]]
            mine = [{"type": kind, "ranks": ranks} for kind, ranks in groups if self.rank in ranks]
            if mine:
                work = threading.Thread(
                    target=self._write_part,
                    args=(attempt, plan["step"], mine, self._writing),
                    name="rekindle-ttp-save",
                    daemon=True,
                )
                work.start()
                self._writing = work
            writers = sorted({rank for _, ranks in groups for rank in ranks})
            failed = self._await_parts(attempt, writers)
            if not failed:
                return self._give_name(plan["step"], writers)
            log.warning("rank %d: rank(s) %s did not write their parts of step %d", self.rank, failed, plan["step"])
            without |= set(failed)
        raise AssertionError

    def _await_states(self, dead: Collection[int]) -> None:
        """Returns once every rank that lives has told what it holds, or should have."""
        others = set(range(self.world)) - set(dead)

        def told(rank: int) -> bool:
            return self.board.read(f"state-{rank}") is not None or not self.board.alive(rank)

        _poll(lambda: all(map(told, others)) or None, min(self.until, time.monotonic() + _OTHERS))

    def _agree(self, attempt: int, without: Collection[int]) -> Any:
        """Returns the plan of an attempt: that of the rank which was the first to make one."""
        plan = self.board.read(f"plan-{attempt}")
        if plan is None:
            self.board.claim(f"plan-{attempt}", self._plan(without))
            plan = self.board.read(f"plan-{attempt}")
        return plan

    def _plan(self, without: Collection[int]) -> dict[str, Any]:
        groups: set[Group] = set()
        steps: dict[int, int] = {}
        for rank in range(self.world):
            groups.update(groups_from_json(self.board.read(f"groups-{rank}") or ()))
            state = self.board.read(f"state-{rank}")
            if state is not None and state["step"] is not None and rank not in without and self.board.alive(rank):
                steps[rank] = state["step"]
        choice = choose(groups, self.world, steps)
        if isinstance(choice, str):
            return {"error": choice}
        return {"step": choice.step, "groups": choice.groups, "without": sorted(without)}

    # -- writing ------------------------------------------------------------------------------------------------

    def _write_part(self, attempt: int, step: int, info: list[dict[str, Any]], before: threading.Thread | None) -> None:
        """Has the program write what this rank holds, in this thread, and tells what came of it.

        An earlier attempt may write the same file: ``before`` gets half of the time to end. A dead rank may keep it.
        """
        error = ""
        if before is not None:
            before.join(max(0.0, self.until - time.monotonic()) / 2)
        try:
            with self.on_devices():
                self._write(step, info)
        except BaseException as failure:  # SystemExit too: the others have to know
            log.exception("rank %d: step %d is not saved", self.rank, step)
            error = f"{type(failure).__name__}: {failure}"
        self.board.tell(f"part-{attempt}-{self.rank}", {"error": error})

    def _write(self, step: int, info: list[dict[str, Any]]) -> None:
        callbacks = self.callbacks
        if os.environ.get(STOP_FIRST) == "1":
            callbacks.call("stop", callbacks.args)
            if callbacks.call("clean", False, callbacks.args) == 1:
                raise RuntimeError("the callback clean has failed, by its answer 1")
        self.stands_still.wait(min(_QUIET, max(0.0, self.until - time.monotonic())))
        self.set_generators(step)
        callbacks.call("save_ckpt", step, info, callbacks.args)

    def _await_parts(self, attempt: int, writers: list[int]) -> list[int]:
        """Returns the ranks that won't write their parts, or [] once all have. Raises TimeoutError."""
        parts: dict[int, Any] = {}

        def failed() -> list[int] | None:
            gone = [rank for rank in writers if not self.board.alive(rank)]  # before the look for what it left
            parts.update((rank, self.board.read(f"part-{attempt}-{rank}")) for rank in writers)
            found = [rank for rank, part in parts.items() if (part["error"] if part is not None else rank in gone)]
            return found if found or all(parts.values()) else None

        if (found := _poll(failed, self.until)) is not None:
            return found
        late = [rank for rank, part in parts.items() if part is None]
        raise TimeoutError(
            f"rank(s) {late} had not written their parts in time: TTP_NORMAL_ACTION_TIME_LIMIT gives them more"
        )

    # -- the name -----------------------------------------------------------------------------------------------

    def _give_name(self, step: int, writers: list[int]) -> Result:
        """Returns once one rank has called ``rename``. Raises TimeoutError."""

        def named() -> Result | None:
            claimed = self.board.read("rename")
            if claimed is None and self._is_first(writers) and self.board.claim("rename", {"rank": self.rank}):
                self.board.tell("end", self._rename(step))
            lost = claimed is not None and not self.board.alive(claimed["rank"])  # before the look for what it left
            if (end := self.board.read("end")) is not None:
                return Result(end["step"], end["error"])
            return Result(0, f"rank {claimed['rank']} died while it gave step {step} its name") if lost else None

        if (result := _poll(named, self.until)) is not None:
            return result
        raise TimeoutError(f"all parts of step {step} are written, but it was not given its name in time")

    def _is_first(self, writers: list[int]) -> bool:
        """True if this rank is the first of those that live, of the writers if there are any."""
        living: list[int] = [rank for rank in (*writers, *range(self.world)) if self.board.alive(rank)]
        return living[0] == self.rank

    def _rename(self, step: int) -> dict[str, Any]:
        try:
            self.callbacks.call("rename", step, self.callbacks.args, ctx=False)
        except Exception as error:
            log.exception("rank %d: step %d is saved, but has not got its name", self.rank, step)
            return {"step": 0, "error": f"step {step} has not got its name: {type(error).__name__}: {error}"}
        return {"step": step, "error": ""}
