"""A hang's report: who is behind, where every rank's threads stood, which collective each came to last."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path

from rekindle.agent.fault import Fault
from rekindle.errors import RekindleError
from rekindle.snapshot.memory import JobDir

__all__ = ["report_dir", "write_report"]

log = logging.getLogger("rekindle.agent")


def report_dir(root: Path, fault: Fault) -> Path:
    """Where a hang's report goes: beside the checkpoints, where it outlives the node."""
    return root / f"hang-{fault.generation}-step-{fault.step}"


def write_report(job: JobDir, fault: Fault, ranks: list[int]) -> None:
    """Write ``report.txt``, and beside it each rank's collectives as ``torchfrtrace`` reads them. Doesn't raise.

    To be called when the ranks are over, or have had the time to write what they know into the job's directory.
    """
    parts = [f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(fault.at))} {fault.what}", fault.detail]
    for rank in ranks:
        parts += ["", f"== rank {rank} ==", _text(job.stacks(rank)) or "could not write down where it stood"]
    try:
        info = job.read_job()
        if info is None:
            return
        place = report_dir(Path(info.root), fault)
        place.mkdir(parents=True, exist_ok=True)
        (place / "report.txt").write_text("\n".join(parts) + "\n")
        for rank in ranks:
            with suppress(FileNotFoundError):
                (place / f"rank_{rank}").write_bytes(job.flight(rank).read_bytes())
        log.error("the report is %s", place / "report.txt")
    except (OSError, RekindleError) as error:
        log.error("the report could not be written: %s", error)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
