"""Notes for the record of an incident how a start has ended, where the node's agent knows less than the launcher.

The agent watches ranks inside of ``guard()``. The launcher sees the end of every process.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from rekindle.format.receipt import write_atomic
from rekindle.launch.reports import describe_exit, reported_jobs
from rekindle.memory.fault import Fault
from rekindle.memory.incidents import fault_of, note_gone, open_incident, read_gone, read_start

__all__ = ["note_end"]


def note_end(place: Path, begun: float, rank: int, code: int) -> None:
    """Notes the end of all ranks, of which ``rank`` failed first with this exit code. Never raises.

    ``begun`` is the monotonic time at which they were started: ranks that ended before they had met leave a record of
    the start before, whose end is another one.
    """
    now, what = time.monotonic(), f"rank {rank} {describe_exit(code)}"
    for job in reported_jobs(place):
        record = read_start(job)
        if record is None or record.formed < begun:
            continue
        if fault_of(job, record) is None:
            fault = Fault("signal" if code < 0 else "exit", rank, record.generation, -1, what, noticed=now)
            with suppress(OSError):
                write_atomic(job.paths.fault, json.dumps(fault.to_json()).encode())
        if read_gone(job, record.start, record.formed) is None:
            note_gone(job, now)
        open_incident(job)
