"""Writes the report of a hang: the rank that is behind, the stacks of all ranks, the last collective of each."""

from __future__ import annotations

import logging
import re
import time
from contextlib import suppress
from pathlib import Path

from rekindle.errors import RekindleError
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir
from rekindle.storage.open import open_store

__all__ = ["main_stack", "report_name", "report_place", "write_report"]

log = logging.getLogger("rekindle.agent")


_OURS = str(Path(__file__).parents[1])
_IDLE = "concurrent/futures/thread.py"


def report_name(generation: int, step: int, node: str = "") -> str:
    """Returns the name of a hang's report, beside the checkpoints, where it outlives the node.

    Each of several nodes writes one of its own, which bears its name.
    """
    mark = re.sub(r"[^\w.-]", "_", node)
    return f"{_folder(generation, step)}/report{mark and '-'}{mark}.txt"


def report_place(generation: int, step: int, *, several: bool) -> str:
    """Returns the place of a hang's report: a folder for the reports of several nodes."""
    return f"{_folder(generation, step)}/" if several else report_name(generation, step)


def _folder(generation: int, step: int) -> str:
    return f"hang-{generation}-step-{step}"


def main_stack(text: str) -> str:
    """Returns the main thread's part of a text that faulthandler wrote: the thread that takes signals."""
    found = [part for part in text.split("\n\n") if part.startswith("Current thread")]
    return found[0].strip() if found else ""


def _in_order(text: str) -> str:
    """Puts the main thread first, and leaves out threads that wait for work or for news of a fault."""
    parts = [part.strip() for part in text.split("\n\n") if part.strip()]

    def waits(part: str) -> bool:
        top = [line for line in part.splitlines() if line.startswith("  File")][:2]
        return (
            part.startswith("Thread rekindle-")
            or any(_IDLE in line for line in top[:1])
            or any(_OURS in line for line in top)
        )

    kept = [part for part in parts if part.startswith("Current thread") or not waits(part)]
    return "\n\n".join(sorted(kept, key=lambda part: not part.startswith("Current thread")))


def write_report(job: JobDir, fault: Fault, ranks: list[int], node: str = "") -> None:
    """Writes the report on this node's ``ranks``, and before it each one's collectives as ``torchfrtrace`` reads them.

    ``node`` is the node's name, if there are several. Never raises.

    To be called when the ranks have ended, or have had time to write what they know into the job's directory.
    """
    parts = [f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(fault.at))} {fault.what}", fault.detail]
    for rank in ranks:
        parts += ["", f"== rank {rank} ==", _in_order(_text(job.paths.stacks(rank))) or "its stacks are not known"]
    try:
        info = job.read_job()
        if info is None:
            return
        store, report = open_store(info.root), report_name(fault.generation, fault.step, node)
        for rank in ranks:
            with suppress(OSError):  # the report is wanted without it, too
                store.write_extra(
                    f"{_folder(fault.generation, fault.step)}/rank_{rank}",
                    job.paths.flight_record(rank).read_bytes(),
                )
        store.write_extra(report, ("\n".join(parts) + "\n").encode(errors="replace"))
        log.error("the report of the hang is %s/%s", info.root, report)
    except (OSError, RekindleError) as error:
        log.error("the report of the hang could not be written: %s", error)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
