"""Tells the launcher what it can't see: which rank failed first, and where the job keeps its checkpoints."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path

from rekindle.format.names import Root
from rekindle.format.receipt import write_atomic
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir

__all__ = [
    "LAUNCH",
    "REFUSED",
    "SURVIVOR_EXIT",
    "advise_against_restarts",
    "introduce",
    "tell_launcher",
    "warn_of_reused_store",
]

log = logging.getLogger("rekindle")

LAUNCH = "REKINDLE_LAUNCH"
"""Environment variable: the directory in which ``rekindle run`` learns of the job's roots."""

REFUSED = "refused"
"""File in that directory: the reason why the first start should be the last."""

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
    extra = {"py_callstack": fault.detail or message if own else message}
    extra["timestamp"] = str(int(fault.at) + (0 if own else _LATER))
    with suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def introduce(job: JobDir, root: Root) -> None:
    """Tell ``rekindle run``, if that is the launcher, of a root, so that it can say what is saved there."""
    place = os.environ.get(LAUNCH)
    if place:
        with suppress(OSError):
            told = [str(root), str(job.path.parents[1])]
            write_atomic(Path(place) / f"{job.path.name}.json", json.dumps(told).encode())


def advise_against_restarts(why: str) -> None:
    """Tell ``rekindle run``, if that is the launcher, why another start would end as this one does."""
    place = os.environ.get(LAUNCH)
    if place:
        with suppress(OSError):
            write_atomic(Path(place) / REFUSED, why.encode())


def warn_of_reused_store(rank: int) -> None:
    """Warn, on rank 0, where restarted workers may meet the addresses of dead ones: torchrun of torch 2.13 does so."""
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        log.warning(
            "torchrun reuses its store after a restart, and restarted ranks may fail to find each other: launch with "
            "'rekindle run', or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; with several nodes use --rdzv-backend c10d "
            "rather than --master-addr and --master-port"
        )
