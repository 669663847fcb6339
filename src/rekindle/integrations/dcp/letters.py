"""Words between the ranks of one save, which travel with DCP's plans: the only way that fails on all ranks alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Letter", "open_box", "take_box"]

_boxes: dict[str, list[Any]] = {}


@dataclass(frozen=True)
class Letter:
    """For a plan's ``storage_data``. Where the plan is unpickled, ``said`` goes into the box of this name, if it is
    open.

    The plan itself can't be relied on: planners may go on with another one than has come, as DCP's own do with
    ``enable_plan_caching``.
    """

    box: str
    said: Any

    def deliver(self) -> None:
        """Put it into this process's own box: what stays in one process is not pickled."""
        if self.box in _boxes:
            _boxes[self.box].append(self.said)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.box, self.said)


def _arrive(box: str, said: Any) -> Letter:
    letter = Letter(box, said)
    letter.deliver()
    return letter


def open_box(name: str) -> None:
    """Keep what comes for a box from now on, and nothing of before."""
    _boxes[name] = []


def take_box(name: str) -> list[Any]:
    """What has come for a box, in that order. What still comes is dropped."""
    return _boxes.pop(name, [])
