"""Carries messages between the ranks of one save, along with DCP's plans.

It is the only way that fails on all ranks alike: a rank that sends nothing is an error on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Message", "open_box", "take_box"]

_boxes: dict[str, list[Any]] = {}


@dataclass(frozen=True)
class Message:
    """A message for a plan's ``storage_data``. Where the plan is unpickled, it goes into the box of this name, if open.

    The plan itself can't be relied on: planners may go on with another one than has come, as DCP's own do with
    ``enable_plan_caching``.
    """

    box: str
    content: Any

    def deliver(self) -> None:
        """Put it into this process's own box: what stays in one process is not pickled."""
        if self.box in _boxes:
            _boxes[self.box].append(self.content)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.box, self.content)


def _receive(box: str, content: Any) -> Message:
    message = Message(box, content)
    message.deliver()
    return message


def open_box(name: str) -> None:
    """Keep what comes for a box from now on, and nothing of before."""
    _boxes[name] = []


def take_box(name: str) -> list[Any]:
    """Return what has come for a box, in that order. What still comes is dropped."""
    return _boxes.pop(name, [])
