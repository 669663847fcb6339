"""Records the newest start of a job on this node and the ones before it, ``starts.json``: what a claim goes by.

A start is recorded before it claims. So a node never forgets a claim that was made for it, whenever its processes end.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import partial
from typing import Any

from rekindle.errors import FormatError
from rekindle.format.claim import Claim, Past, Starts
from rekindle.format.fields import check_texts, loads
from rekindle.format.lineage import check_id
from rekindle.format.receipt import read_file, write_atomic
from rekindle.memory.job_dir import JobDir

__all__ = ["forget_starts", "read_starts", "write_starts"]

_MOST = 200
"""Earlier starts that are remembered. There are several only where storage was away at each of them."""


def read_starts(job: JobDir) -> Starts | None:
    """Returns the record; None where there is none, as after a good end, or where it is damaged.

    Raises OSError where it can't be read at the moment: who drains must not go on as if there were no claim.
    """
    try:
        value = loads(read_file(job.paths.starts))
        past = tuple(_past_from_json(one) for one in value["past"])
        return Starts(Claim.from_json(value["own"]), past, bool(value["settled"]))
    except (FileNotFoundError, FormatError, ValueError, TypeError, KeyError):
        return None


def write_starts(job: JobDir, starts: Starts) -> None:
    """Replaces the record, also whenever somebody removes it while this process trains.

    Raises OSError when memory is gone, or has no page for a first record.
    """
    job.keep_beside(job.paths.starts, partial(write_starts, starts=starts))
    past = [asdict(one) for one in starts.past[-_MOST:]]
    value = {"own": asdict(starts.own), "past": past, "settled": starts.settled}
    data = json.dumps(value).encode()
    try:
        write_atomic(job.paths.starts, data)
    except OSError:  # full memory: by the record of an earlier start, this node would be refused as left behind
        with open(job.paths.starts, "r+b", buffering=0) as file:
            file.write(data.ljust(os.fstat(file.fileno()).st_size))


def forget_starts(job: JobDir) -> None:
    """Removes the record. Raises OSError."""
    job.keep_beside(job.paths.starts, None)
    job.paths.starts.unlink(missing_ok=True)


def _past_from_json(value: Any) -> Past:
    launch, at = check_texts([value["launch"], value["at"]])
    return Past(check_id(value["start"]), launch, at)
