"""Records of incidents: their durations, their line of JSON, and what is made of the files that a start left."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.common.process_start import clock_id, process_started
from rekindle.errors import FormatError
from rekindle.format.receipt import write_atomic
from rekindle.memory import incidents
from rekindle.memory.fault import Fault
from rekindle.memory.incident import LONGEST_LINE, MOMENTS, Incident
from rekindle.memory.incidents import StartRecord, describe_end, incident_files, note_gone, open_incident
from rekindle.memory.job_dir import JobDir
from rekindle.memory.prices import Prices, write_prices
from rekindle.memory.status import DONE, SECURED, STABLE, StatusPage
from tests.stored import job_in

ID = "0123456789abcdef"


def some(**changes: object) -> Incident:
    """An incident of which all is known: a part takes as many seconds as it has a place in the order."""
    at, moments = 100.0, {"fault": 100.0}
    for number, name in enumerate(MOMENTS, 1):
        at += number
        moments[name] = at
    found = Incident(
        start=ID,
        generation=3,
        host="node 1/a",
        at=1.7e9,
        cause="signal",
        what="rank 1 was killed by SIGKILL",
        rank=1,
        step=7,
        began_at=0,
        seconds=50.0,
        trained=40.0,
        moments=moments,
        restored_step=5,
        place="memory",
        warm=True,
        starts=1,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


@pytest.fixture
def job(memory: Path, root: Path) -> JobDir:
    return job_in(memory, root)


def test_the_parts_add_up_to_the_outage() -> None:
    one = some()
    assert list(one.parts().values()) == [1, 2, 3, 4, 5, 6, 7] and one.outage == 28 and one.lost == 2


def test_a_part_that_is_not_known_is_in_the_next_one() -> None:
    moments = {name: at for name, at in some().moments.items() if name not in ("fault", "secured", "gone")}
    parts = some(moments=moments).parts()
    assert parts == {
        **{"noticed": None, "secured": None, "gone": None},
        **{"started": 9, "formed": 5, "restored": 6, "first_step": 7},
    }


def test_an_end_that_is_seen_late_takes_nothing_from_the_start() -> None:
    moments = {"noticed": 1.0, "gone": 4.0, "started": 3.0, "formed": 6.0}
    parts = some(moments=moments).parts()
    assert (parts["gone"], parts["started"], parts["formed"]) == (3, 0, 2)


def test_a_record_is_one_line_that_reads_back_the_same() -> None:
    one = some(what="words\n" * 1000, host="h" * 300)
    line = one.encode()
    assert line.count(b"\n") == 1 and line.endswith(b"\n") and len(line) < LONGEST_LINE
    assert Incident.decode(line) == replace(one, what=one.what[:512], host="h" * 64)
    assert Incident.decode(some().encode()) == some()
    assert some().name == f"0000000003-{ID}-node_1_a.jsonl"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        some().encode()[:300],
        b"[1, 2]",
        b"null",
        b'{"a": 1}',
        b"\xff\xfe",
        b"[" * 5000,
        json.dumps({**some().to_json(), "version": 2}).encode(),
        json.dumps({**some().to_json(), "moments": [1]}).encode(),
        json.dumps({**some().to_json(), "moments": {"noticed": "x"}}).encode(),
        json.dumps({**some().to_json(), "start": "../../etc/passwd"}).encode(),
        json.dumps({**some().to_json(), "warm": 2}).encode(),
        json.dumps({**some().to_json(), "prices": {"step": 1.0}}).encode(),
        json.dumps({**some().to_json(), "prices": {"step": -1.0, "snapshot": 0.0}}).encode(),
        json.dumps({**some().to_json(), "prices": [1]}).encode(),
        json.dumps({**some().to_json(), "what": "x" * LONGEST_LINE}).encode(),
    ],
)
def test_a_torn_or_foreign_line_is_refused(line: bytes) -> None:
    with pytest.raises(FormatError, match="no record of an incident"):
        Incident.decode(line)


def test_prices_are_read_back_and_lines_of_older_versions_have_none() -> None:
    priced = some(prices=Prices(0.5, 0.1, drain=2.0).to_json())
    assert Incident.decode(priced.encode()) == priced
    old = {name: value for name, value in priced.to_json().items() if name != "prices"}
    assert Incident.decode(json.dumps(old).encode()) == some()


def test_a_start_that_ended_leaves_its_prices_and_no_other_ones(job: JobDir) -> None:
    begin(job)
    leave_page(job, 0, step=10)
    notice(job)
    prices = Prices(0.5, 0.1, 5.0)
    write_prices(job, ID, prices)
    found = describe_end(job)
    assert found is not None and found.prices == prices.to_json()
    write_prices(job, "f" * 16, prices)
    found = describe_end(job)
    assert found is not None and found.prices == {}


def begin(job: JobDir, generation: int = 2, step: int = 3) -> StartRecord:
    now = time.monotonic()
    record = StartRecord(ID, generation, clock_id(), now - 5, now - 8, now - 4, step)
    incidents.write_start(job, record)
    return record


def leave_page(job: JobDir, rank: int, step: int, phase: int = STABLE, stage: int = 0, generation: int = 2) -> None:
    page = StatusPage(job.paths.status_page(rank), generation)
    page.step, page.phase, page.stage = step, phase, stage
    page.write()


def notice(job: JobDir, cause: str = "signal", generation: int = 2, **more: float) -> Fault:
    fault = Fault(cause, 1, generation, 9, "rank 1 was killed by SIGKILL", **more)  # type: ignore[arg-type]
    write_atomic(job.paths.fault, json.dumps(fault.to_json()).encode())
    return fault


def test_the_end_of_a_start_is_told_by_what_it_left(job: JobDir) -> None:
    record = begin(job)
    leave_page(job, 0, step=10, stage=SECURED)
    leave_page(job, 1, step=9)
    fault = notice(job)
    note_gone(job, fault.noticed + 0.5, fault.noticed)
    found = describe_end(job)
    assert found is not None
    assert (found.cause, found.rank, found.step, found.began_at, found.start) == ("signal", 1, 9, 3, ID)
    assert found.moments["noticed"] == fault.noticed and found.moments["gone"] == fault.noticed + 0.5
    assert "secured" in found.moments and "fault" not in found.moments  # nobody knows when it died
    assert record.started is not None and record.restored is not None
    assert found.seconds == fault.noticed - record.started and found.trained == fault.noticed - record.restored


def test_an_agent_that_is_late_changes_nothing_of_what_the_launcher_saw(job: JobDir) -> None:
    begin(job)
    leave_page(job, 0, step=9)
    gone = time.monotonic()
    note_gone(job, gone, gone)
    fault = notice(job, noticed=gone + 0.5)
    found = describe_end(job)
    assert found is not None and found.moments == {"noticed": gone, "gone": gone}
    incidents.write_start(job, StartRecord("1" * 16, 3, clock_id(), gone + 0.6, gone + 0.1))
    note_gone(job, gone + 1, fault.noticed)
    assert incidents.read_gone(job, ID) == gone and incidents.read_gone(job, "1" * 16) is None


def test_a_hang_began_with_the_last_progress(job: JobDir) -> None:
    begin(job)
    leave_page(job, 0, step=9)
    now = time.monotonic()
    notice(job, "hang", noticed=now, began=now - 2)
    found = describe_end(job)
    assert found is not None and found.parts()["noticed"] == pytest.approx(2)


def test_what_an_earlier_start_left_tells_nothing_of_this_one(job: JobDir) -> None:
    leave_page(job, 0, step=4)
    notice(job)
    now = time.monotonic()
    incidents.write_start(job, StartRecord(ID, 2, clock_id(), now + 1, now))
    assert describe_end(job) is None
    incidents.write_start(job, StartRecord(ID, 2, "another-host 0", now - 5, now - 5))
    assert describe_end(job) is None, "times of another host's clock, or of an earlier boot"


def test_a_start_that_left_no_word_of_a_fault_may_have_ended_well(job: JobDir) -> None:
    begin(job)
    assert describe_end(job) is None
    leave_page(job, 0, step=9, phase=DONE)
    assert describe_end(job) is None
    leave_page(job, 1, step=8)  # it died inside of guard(), and its agent with it
    found = describe_end(job)
    assert found is not None and (found.cause, found.rank, found.step) == ("unknown", 1, 8)


def test_the_agent_opens_a_record_once(job: JobDir) -> None:
    begin(job)
    notice(job)
    open_incident(job)
    (path,) = incident_files(job)
    path.write_bytes(b"what the next start made of it")
    open_incident(job)
    assert path.read_bytes() == b"what the next start made of it"


def test_memory_keeps_a_bounded_number(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incidents, "_MOST", 3)
    for generation in range(1, 7):
        incidents.write_incident(job, some(generation=generation))
    assert [path.name[:10] for path in incident_files(job)] == ["0000000004", "0000000005", "0000000006"]


def test_a_process_knows_when_it_was_started() -> None:
    started = process_started()
    assert started is not None and started < time.monotonic()
