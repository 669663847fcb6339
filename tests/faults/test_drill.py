"""Drills on a job that trains: what they report is what has happened."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from rekindle.cli.drill import drill
from rekindle.cli.operations import status_pages
from rekindle.errors import NotFoundError
from rekindle.memory.job_dir import JobDir
from tests.faults.cluster import Cell, Outcome, run
from tests.faults.harness import wait_for

CAUSES = {"kill": "signal", "term": "notice", "stop": "hang", "hang": "hang", "exception": "exception"}


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[pytest.mark.campaign(seconds=8)] * (f != "kill")) for f in CAUSES]
)
def test_a_drill(fault: str, root: Path, memory: Path, job: JobDir) -> None:
    cell, outcomes = Cell(root, memory, steps=80), list[Outcome]()
    trainer = threading.Thread(target=lambda: outcomes.append(run(cell)))
    trainer.start()
    wait_for(
        lambda: len(status_pages(job)) == 2 and min(p.step for p in status_pages(job).values()) > 5, what="training"
    )
    lines: list[str] = []
    report = drill(job, fault, None, 120, lines.append)
    trainer.join(150)
    assert outcomes, "the job has not come to its end"
    # The launcher may have collected the dead rank before the agent got a processor.
    late = (report.cause, report.what) == ("exit", "rank 1 has ended with an exit code that is not known")
    assert report.cause == CAUSES[fault] or (fault == "kill" and late), report
    assert report.rank == 1 and re.search(r"\brank(s 0,)? 1\b", report.what)
    assert report.noticed is not None and 0 <= report.noticed < 30  # generous: the machine may have other work
    assert report.lost == 0 and report.resumed is not None and report.resumed >= report.step >= 5
    assert report.again is not None and report.again > (report.back or 0) > report.noticed
    record = report.incident
    assert record is not None and (record.cause, record.rank, record.lost) == (report.cause, 1, 0), record
    assert record.outage is not None and record.restored_step == report.resumed, record
    assert len(outcomes[0].codes) == 2 and outcomes[0].codes[1] == [0, 0]
    assert len(lines) >= 4 and lines[1].startswith("waiting 120 s at most") and "such as 'rekindle run'" in lines[1]
    if fault == "hang":
        assert "in inject_fault" in cell.log(1).read_text(), "where the rank stood is not in its log"


def test_nobody_to_strike(job: JobDir) -> None:
    with pytest.raises(NotFoundError, match="no rank trains"):
        drill(job, "kill", None, 1, print)
