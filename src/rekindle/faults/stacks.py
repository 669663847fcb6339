"""Records where a rank stands at a hang: the stacks of its threads, and the newest collective of each group."""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import IO, Any

import torch._C

from rekindle.format.receipt import write_atomic
from rekindle.memory.job_dir import JobDir

__all__ = ["HangRecord", "debugger_of", "describe_stacks"]


_PROMPTS = {"interaction": ("pdb", "debugger"), "do_wait_suspend": ("pydevd",), "_do_wait_suspend": ("pydevd",)}
"""Functions in which debuggers wait for somebody to type, and how the names of their modules end: pdb and whatever is
made of it (``breakpoint()``, torch.distributed.breakpoint, ipdb, pudb); pydevd, which serves editors."""


def debugger_of(thread: int) -> str:
    """Returns the name of the debugger at whose prompt a thread stands; empty when there is none.

    One that merely traces, as coverage does too, holds nobody up.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.endswith(_PROMPTS.get(frame.f_code.co_name, ())):
            return module
        frame = frame.f_back
    return ""


def describe_stacks() -> str:
    """Returns the stacks of all other threads, in faulthandler's words, to whom the main thread is the current one.

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
    """Format a stack without the source's text: it may lie on storage that hangs."""
    found = []
    while frame is not None:
        found.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(found)


def _flight_recording() -> bytes:
    """Returns all that torch's flight recorder has, as ``torchfrtrace`` reads it; empty when that is nothing."""
    return bytes(_call("_dump_fr_trace")) if _entries() else b""


def _describe_last_collectives() -> list[str]:
    """Returns a line for each process group that has been used: its newest collective, and its sequence number."""
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


class HangRecord:
    """Writes files from which the agent makes its report of a hang. Files that can't be written are done without."""

    def __init__(self, job: JobDir, rank: int) -> None:
        self.signal = 0
        """The agent sends it to have faulthandler write the stacks, when this process can't; 0 if there is none."""
        self._file: IO[str] | None = None
        self._recording = job.paths.flight_record(rank)
        with suppress(OSError):
            self._recording.unlink(missing_ok=True)
            self._file = open(job.paths.stacks(rank), "w")  # noqa: SIM115  until close()
            if hasattr(signal, "SIGRTMIN"):
                number = int(signal.SIGRTMIN) + 7
                faulthandler.register(number, self._file, all_threads=True)
                self.signal = number

    def write_stacks(self, text: str) -> None:
        """Write down what ``describe_stacks`` has returned."""
        if self._file is not None:
            with suppress(OSError):
                self._file.write(text)
                self._file.flush()

    def write_collectives(self) -> None:
        """Write down the newest collectives, and all that torch's flight recorder has."""
        if self._file is None:
            return
        with suppress(Exception):  # a broken process group may raise anything
            self._file.write("".join(f"\n\nlast of {line}" for line in _describe_last_collectives()) + "\n")
            self._file.flush()
            recording = _flight_recording()
            if recording:
                write_atomic(self._recording, recording)

    def close(self) -> None:
        """Close the files; the signal is no longer answered."""
        if self.signal:
            faulthandler.unregister(self.signal)
        if self._file is not None:
            self._file.close()
