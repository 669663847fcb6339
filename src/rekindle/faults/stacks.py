"""What a rank can tell of a hang: where its threads stand, and which collective it came to last."""

from __future__ import annotations

import json
import sys
import threading
from types import FrameType
from typing import Any

import torch._C

__all__ = ["debugger_of", "last_collectives", "recording", "stacks"]


_PROMPTS = {"interaction": ("pdb", "debugger"), "do_wait_suspend": ("pydevd",), "_do_wait_suspend": ("pydevd",)}
"""Functions in which debuggers wait for somebody to type, and how the names of their modules end: pdb and whatever is
made of it (``breakpoint()``, torch.distributed.breakpoint, ipdb, pudb); pydevd, which serves editors."""


def debugger_of(thread: int) -> str:
    """Name of the debugger at whose prompt a thread stands; empty when there is none. One that merely traces, as
    coverage does too, holds nobody up."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.endswith(_PROMPTS.get(frame.f_code.co_name, ())):
            return module
        frame = frame.f_back
    return ""


def stacks() -> str:
    """Where all other threads stand, in the words of faulthandler, to whom the main thread is the current one.

    Nothing else of Python runs meanwhile. faulthandler's own answer to a signal doesn't wait for that, and has been
    seen to end a process whose threads came and went: the agent asks for it only where this can't be had.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for number, frame in sys._current_frames().items():
        if number != threading.get_ident():
            kind = "Current thread" if number == threading.main_thread().ident else "Thread"
            parts.append(f"{kind} {names.get(number, number)} (most recent call first):\n{_lines(frame)}")
    return "\n\n".join(parts)


def _lines(frame: FrameType | None) -> str:
    """Without the source's text: it may lie on storage that hangs."""
    found = []
    while frame is not None:
        found.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(found)


def recording() -> bytes:
    """All that is recorded, as torch's own ``torchfrtrace`` reads it; empty when nothing is."""
    return bytes(_call("_dump_fr_trace")) if _entries() else b""


def last_collectives() -> list[str]:
    """A line for each process group that has been used: what was asked of it last, and the how manieth that was."""
    last = {entry["process_group"][1] or entry["process_group"][0]: entry for entry in _entries()}
    return [
        f"{group}: {entry['profiling_name']} number {entry['collective_seq_id']}, shapes {entry['input_sizes']}"
        for group, entry in last.items()
    ]


def _entries() -> list[dict[str, Any]]:
    text = _call("_dump_fr_trace_json")
    found: list[dict[str, Any]] = json.loads(text).get("entries", []) if text else []
    return found


def _call(name: str) -> Any:
    # A torch that was built without distributed has neither.
    return getattr(getattr(torch._C, "_distributed_c10d", None), name, bytes)()
