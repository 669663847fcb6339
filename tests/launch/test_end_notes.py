"""The launcher's notes on how a start has ended, where nothing else tells of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rekindle.common.process_start import clock_id
from rekindle.launch.end_notes import note_end
from rekindle.memory.incidents import StartRecord, describe_end, incident_files, read_incident, write_start
from rekindle.memory.job_dir import JobDir
from tests.stored import job_in


def test_a_start_that_had_met_gets_a_record_and_one_that_had_not_leaves_the_one_before(
    memory: Path, root: Path, tmp_path: Path
) -> None:
    job: JobDir = job_in(memory, root)
    (tmp_path / "run.json").write_text(json.dumps([str(root), str(memory)]))
    now = time.monotonic()
    record = StartRecord("0" * 16, 2, clock_id(), now - 5, now - 6, now - 4, 3)
    write_start(job, record)
    note_end(tmp_path, now - 1, 1, 3)
    assert describe_end(job) is None, "the launcher has started ranks since, which had not met"
    note_end(tmp_path, now - 7, 1, 3)
    found = describe_end(job)
    assert found is not None and (found.cause, found.rank, found.what) == ("exit", 1, "rank 1 ended with exit code 3")
    assert found.moments["gone"] == found.moments["noticed"] and found.lost is None
    assert [read_incident(path) for path in incident_files(job)] == [found]
    note_end(tmp_path, now - 7, 0, -9)
    assert describe_end(job) == found, "what was noticed first counts"
