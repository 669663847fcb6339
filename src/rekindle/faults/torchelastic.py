"""Tells the launcher what it can't see: which rank failed first, of what, and where checkpoints are."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rekindle.common.environ import LAUNCH
from rekindle.errors import BusyError, StateMismatchError, UsageError
from rekindle.faults.late_work import describe_raised
from rekindle.format.names import Root
from rekindle.format.receipt import write_atomic
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir

__all__ = [
    "FRESH_STORE",
    "LAUNCH",
    "REFUSED",
    "SURVIVOR_EXIT",
    "introduce",
    "tell_of_uncaught_errors",
    "tell_launcher",
    "warn_of_reused_store",
]

log = logging.getLogger("rekindle")

FRESH_STORE = "REKINDLE_FRESH_STORE"
"""Environment variable of ranks whose store is torchrun's, but a new one in each start."""

REFUSED = "refused"
"""File in that directory: the class and the text of an error that each further start would meet again."""

SURVIVOR_EXIT = 75
"""Exit code of a rank that ended because of another one's fault, or of a hang: EX_TEMPFAIL, try again."""

_LATER = 2
"""Seconds by which the others' failures are dated later. torchrun takes the earliest for the cause; it counts in whole
seconds, and dates a rank that left no file when it looks."""


def tell_launcher(fault: Fault, rank: int) -> None:
    """Leave a file for torchrun, if that is the launcher: the fault, or the fault of another that ended this rank.

    The file is that of torch's ``elastic.multiprocessing.errors``, which torchrun reads once a rank has failed.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    own = fault.rank == rank
    message = fault.what if own else f"ended because {fault.what}"
    at = fault.at + (0 if own else _LATER)
    _leave(path, message, fault.detail or message if own else message, at, fault.cause)


def _leave(path: str, message: str, stack: str, at: float, cause: str) -> None:
    """Write the file as torch does, or nothing: torchrun ends the job at a file that is torn.

    ``at`` and ``cause`` are read by ``rekindle run`` alone.
    """
    extra: dict[str, Any] = {"py_callstack": stack, "timestamp": str(int(at)), "at": at, "cause": cause}
    with suppress(OSError):
        write_atomic(Path(path), json.dumps({"message": {"message": message, "extraInfo": extra}}).encode())


def introduce(job: JobDir, root: Root) -> None:
    """Tell ``rekindle run``, if that is the launcher, of a root, so that it can say what is saved there.

    The first of its ranks does. Another launcher's may share this node's memory, and not all need have this root.
    """
    place = os.environ.get(LAUNCH)
    if place:
        with suppress(OSError):
            path = Path(place) / f"{job.path.name}.json"
            if not path.exists():
                write_atomic(path, json.dumps([str(root), str(job.path.parents[1])]).encode())


class _Uncaught:
    """Stands in for ``sys.excepthook``, and tells the launcher of the error that ends this process.

    An error that the script catches is none. One that ``guard()`` has told of already is not told again.
    """

    def __init__(self) -> None:
        self._before, self._pid = sys.excepthook, os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and os.getpid() == self._pid:  # and not that of a forked child
            with suppress(Exception):
                _tell_of(error)
        self._before(kind, error, trace)


def _tell_of(error: Exception) -> None:
    if isinstance(error, (BusyError, StateMismatchError, UsageError)):
        ours = next(kind for kind in type(error).__mro__ if kind.__module__ == "rekindle.errors")  # and not a subclass
        refusal = json.dumps([ours.__name__, str(error)])
        write_atomic(Path(os.environ[LAUNCH]) / REFUSED, refusal.encode())
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        message, stack = describe_raised(error, os.environ.get("RANK", "0"))
        _leave(path, message, stack, time.time(), "exception")


def tell_of_uncaught_errors() -> None:
    """Let ``rekindle run``, if that is the launcher, know which error ends this process, should one do so."""
    if LAUNCH in os.environ and not isinstance(sys.excepthook, _Uncaught):
        sys.excepthook = _Uncaught()


def warn_of_reused_store(rank: int) -> None:
    """Warn, on rank 0, where plain torchrun may have restarted workers meet the addresses of dead ones.

    ``rekindle run`` says by itself what is wrong with another rendezvous than its own.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and FRESH_STORE not in os.environ
    if rank == 0 and shared and LAUNCH not in os.environ:
        log.warning(
            "torchrun reuses its store after a restart, and restarted ranks may fail to find each other: launch with "
            "'rekindle run', or give --rdzv-backend rekindle, on several nodes with --rdzv-endpoint HOST:PORT in place "
            "of --master-addr and --master-port"
        )
