"""Counts what saving has cost."""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from rekindle.memory.costs import CostPage, Costs

__all__ = ["Metrics"]


@dataclass
class Metrics:
    """Costs of saving on this rank since it started. Times in seconds, sizes in bytes."""

    saves: int = 0
    failed: int = 0
    left_out: int = 0
    """Steps that were due and have no snapshot, because memory for it was still being made."""
    last_stall: float = 0.0
    """Time for which the newest save held training up: inside of ``step()``, before the update, and where the next
    ``step()`` waited for the rest of it."""
    max_stall: float = 0.0
    settle_seconds: float = 0.0
    """Time for which each ``step()`` waited until the snapshot before was complete, all in all. Training that is faster
    than the copies shows here."""
    committed_in_step: bool = False
    """True if the newest snapshot was in memory, committed, when its ``step()`` returned; before the first save, if it
    is going to be. Else it was completed after that, before the next update, or has been left out."""
    bytes_saved: int = 0
    snapshot_seconds: float = 0.0
    """Time from the begin of each snapshot to its commit, beside training or not, all in all."""
    snapshot_every: int = 1
    """Steps between snapshots, as it is now: those that are lost at most if all ranks die at once."""
    restored_step: int = 0
    restored_from: str = ""
    restore_seconds: float = 0.0
    direct: int = 0
    """Saves that went straight to storage."""
    memory_lost: int = 0
    """Times that memory would take no more saves, and storage got them instead."""
    memory_back: int = 0
    """Times that saves went into memory again after that."""
    agent_lost: int = 0
    """Times that no agent could be had, and this process carried checkpoints to storage itself."""
    agent_back: int = 0
    """Times that an agent did so again after that."""
    stalls: deque[float] = field(default_factory=lambda: deque(maxlen=1000), repr=False)
    """The newest 1,000 stalls."""

    def __post_init__(self) -> None:
        self._node_safe: Callable[[], int] = _no_step
        self._costs = Costs()
        self._page: CostPage | None = None
        self._open = False
        """True while the newest save may still hold training up."""

    @property
    def node_safe_step(self) -> int:
        """Newest step of this start that survives the loss of any one node; -1 for none. Reads a small file."""
        return self._node_safe()

    def read_node_safe(self, read: Callable[[], int]) -> None:
        """From now on have ``read`` tell ``node_safe_step``."""
        self._node_safe = read

    def saved(self, stall: float, nbytes: int) -> None:
        """Count a save whose ``step()`` took ``stall`` seconds."""
        self.saves += 1
        self.bytes_saved += nbytes
        self.concluded(None)  # of a save before that failed since
        self.stalls.append(0.0)
        self.last_stall, self._open = 0.0, True
        self.waited(stall)

    def waited(self, seconds: float) -> None:
        """Add seconds for which the newest save has held training up since."""
        self.last_stall += seconds
        if self.stalls:  # else it was of a save that failed
            self.stalls[-1] = self.last_stall
        self.max_stall = max(self.last_stall, self.max_stall)

    def settled(self, seconds: float) -> None:
        """Add seconds for which a ``step()`` has waited until the newest save was complete."""
        self.settle_seconds += seconds
        self.waited(seconds)

    def concluded(self, seconds: float | None) -> None:
        """Note, at the end of a save or any time after it, that the newest one holds training up no more.

        ``seconds``: time from its begin to its commit; None if memory doesn't have it.
        """
        if self._open:
            self._open = False
            self._costs.stalls.add(self.last_stall)
            self.snapshot_seconds += seconds or 0.0

    def restored(self, step: int, place: str, seconds: float) -> None:
        """Note which step was restored, and from which store."""
        self.restored_step, self.restored_from, self.restore_seconds = step, place, seconds
        self._costs.step = step
        self.show()

    def timed(self, seconds: float) -> None:
        """Count the length of a step."""
        self._costs.step_seconds.add(seconds)

    def stepped(self, n: int) -> None:
        """Note that step ``n`` is complete, and show all that was noted."""
        if n > self._costs.step:  # else it is save(), of a step that was counted or restored
            self._costs.step = n
            self._costs.steps += 1
        self.show()

    def show_on(self, path: Path, generation: int) -> None:
        """From now on show the numbers on a page at ``path``, for other processes. Without memory for it, don't."""
        self._costs.pid, self._costs.generation = os.getpid(), generation
        with suppress(OSError):
            self._page = CostPage(path)
        self.show()

    def show_again(self) -> None:
        """Make the page again, which somebody has removed. Raises OSError when memory is full."""
        if self._page is not None:
            self._page.install()
            self.show()

    def show(self) -> None:
        """Write the numbers to their page, if there is one."""
        if self._page is None:
            return
        costs = self._costs
        costs.saves, costs.snapshot_bytes, costs.snapshot_seconds = self.saves, self.bytes_saved, self.snapshot_seconds
        costs.failed, costs.left_out, costs.direct = self.failed, self.left_out, self.direct
        costs.memory_lost, costs.agent_lost = self.memory_lost, self.agent_lost
        costs.snapshot_every, costs.restored_step = self.snapshot_every, self.restored_step
        costs.restore_seconds = self.restore_seconds
        self._page.write(costs)

    def to_dict(self) -> dict[str, float]:
        """Returns the numbers by name, each with ``rekindle/`` before it, as tools that track experiments take them."""
        numbers = {one.name: getattr(self, one.name) for one in fields(self) if one.type in ("int", "float", "bool")}
        return {f"rekindle/{name}": float(value) for name, value in numbers.items()}

    def agent(self, there: bool) -> None:
        """Count that there is no agent any more, or one again."""
        self.agent_back += there
        self.agent_lost += not there

    def summary(self) -> str:
        """Returns one line for people."""
        size, median = self.bytes_saved / max(self.saves, 1) / 1e6, statistics.median(self.stalls or [0.0]) * 1e3
        stalls = f"stall median {median:.2f} ms, longest {self.max_stall * 1e3:.2f} ms"
        return f"{self.saves} saves of {size:.1f} MB, {self.failed} failed, {stalls}"


def _no_step() -> int:
    return -1
