"""What the launcher learns of a failure from what the ranks have left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import rekindle
from rekindle.faults.torchelastic import LAUNCH, introduce, tell_launcher
from rekindle.format.names import canonical_root
from rekindle.launch.reports import first_failure, newest_steps, own_error, reached_step, take_refusal, traceback_of
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.status import StatusPage
from tests.stored import remember, save


@pytest.fixture
def job(root: Path, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """A job that has reported its root, and has neither checkpoints nor ranks."""
    job = JobDir.of(canonical_root(root), memory_base(memory))
    job.create()
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setenv(LAUNCH, str(place))
    introduce(job, canonical_root(root))
    return job


def left_by(rank: int, fault: Fault, place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what torch makes of the file that a rank leaves about a fault."""
    path = place / f"{rank}.error"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    tell_launcher(fault, rank)
    message = json.loads(path.read_text())["message"]
    return SimpleNamespace(exitcode=1, message=message, timestamp=int(message["extraInfo"]["timestamp"]))


def failed(code: int, message: Any = "To enable traceback see: ...", at: int = 0) -> Any:
    return SimpleNamespace(exitcode=code, message=message, timestamp=at)


def test_progress_is_the_newest_step_of_a_rank_or_of_memory(job: JobDir, root: Path, tmp_path: Path) -> None:
    place, begun = tmp_path / "place", time.monotonic()
    assert newest_steps(place, begun) == {str(canonical_root(root)): -1} and reached_step(place, begun) is None
    save(root, 3)
    assert list(newest_steps(place, begun).values()) == [3], "memory knows of none"
    remember(job, 4)
    save(root, 5)
    assert list(newest_steps(place, begun).values()) == [4], "storage isn't listed for nothing"
    job.notes.write_durable(5)
    assert list(newest_steps(place, begun).values()) == [5]
    page = StatusPage(job.paths.status_page(1), 1)
    page.step, page.progress = 7, time.monotonic_ns()
    page.write()
    assert list(newest_steps(place, begun).values()) == [7] and reached_step(place, begun) == 7
    later = time.monotonic()
    assert list(newest_steps(place, later).values()) == [5], "that page is of an earlier start"
    assert reached_step(place, later) is None


def test_a_damaged_page_is_passed_over(job: JobDir, tmp_path: Path) -> None:
    job.paths.status_page(0).write_bytes(b"none")
    assert reached_step(tmp_path / "place", 0.0) is None


def first(failures: dict[int, Any]) -> int:
    """Returns the rank that failed first, without an agent's record."""
    return first_failure(Path("no such place"), 0.0, failures)[0]


def test_the_first_failure_is_that_of_torchruns_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one second, in which torchrun would take the lowest rank, the time that Rekindle has noted decides."""
    faults = {
        rank: Fault("exception", rank, 1, 6, f"rank {rank} raised ValueError: bad", "stack", at=at)
        for rank, at in ((0, 1000.7), (1, 1000.2))
    }
    told = {rank: left_by(rank, fault, tmp_path, monkeypatch) for rank, fault in faults.items()}
    assert first(told) == 1 and traceback_of(told[1]) == "stack"
    assert first(told | {2: failed(-9, at=1000)}) == 2
    assert first(told | {2: failed(-9, at=1030)}) == 1, "the launcher has killed 2, which did not end"
    assert first(told | {2: failed(-6, at=1000)}) == 1, "torch ends a rank so whose collective has failed"
    assert first({0: left_by(0, faults[1], tmp_path, monkeypatch), 1: told[1]}) == 1, "0 ended because of 1"


@pytest.mark.parametrize("code", [-9, -11, -6, 3], ids=["killed", "crashed", "aborted", "exited"])
def test_a_rank_that_ends_without_a_word_comes_before_one_that_loses_it(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Fault("exception", 0, 1, 6, "rank 0 raised RuntimeError: [gloo/pair.cc] Connection reset by peer", at=999.95)
    survivor = left_by(0, lost, tmp_path, monkeypatch)
    survivor.exitcode = -15
    assert first({0: survivor, 1: failed(code, at=1000)}) == 1


def test_the_agents_record_of_the_first_failure_comes_before_all_clocks(
    job: JobDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    faults = [Fault("exception", rank, 1, 6, f"rank {rank} raised ValueError: bad", at=1000 + rank) for rank in (0, 1)]
    told = {fault.rank: left_by(fault.rank, fault, tmp_path, monkeypatch) for fault in faults}
    job.paths.fault.write_text(json.dumps(faults[1].to_json()))
    assert first_failure(place, 900.0, told)[0] == 1
    assert first_failure(place, 1002.0, told)[0] == 0, "that record is of an earlier start"
    assert first_failure(place, 900.0, {0: told[0], 2: failed(3, at=1001)})[0] == 0, "that rank is another node's"


@pytest.mark.parametrize("cause", ["hang", "notice", "signal", "exception", "loss"])
def test_only_what_a_script_raises_is_an_error_of_its_own(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = own_error(left_by(0, Fault(cause, 0, 1, 6, "what", at=1.0), tmp_path, monkeypatch))
    assert found == (("what", True) if cause in ("exception", "loss") else (None, False))


def test_an_exit_code_stands_for_an_error_that_nobody_has_told_of() -> None:
    assert own_error(failed(3)) == ("exit code 3", False)
    assert own_error(failed(-9)) == (None, False)
    assert own_error(failed(75)) == (None, False), "which asks for another try"
    by_record = {"message": "ValueError: bad\nmore", "extraInfo": {"py_callstack": "stack", "timestamp": "1"}}
    assert own_error(failed(1, by_record)) == ("ValueError: bad", True)


def test_a_rank_whose_disk_is_full_leaves_no_file_rather_than_a_torn_one(tmp_path: Path) -> None:
    """torchrun itself ends at a file that it can't read."""
    path = tmp_path / "error.json"
    code = (
        "import resource\n"
        "from rekindle.faults.torchelastic import tell_launcher\n"
        "from rekindle.memory.fault import Fault\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "tell_launcher(Fault('exception', 0, 1, 6, 'what', 'a traceback' * 100), 0)\n"
    )
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=100)
    assert ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path)).exitcode == 1
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "refused").write_text(json.dumps(["StateMismatchError", "other shapes"]))
    assert isinstance(take_refusal(tmp_path, {0: failed(-15), 1: failed(1)}), rekindle.StateMismatchError)
    assert take_refusal(tmp_path, {0: failed(1)}) is None


def test_the_refusal_of_a_program_that_a_rank_has_run_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "refused").write_text(json.dumps(["BusyError", "another process trains it"]))
    assert take_refusal(tmp_path, {0: failed(-9), 1: failed(75)}) is None
    assert list(tmp_path.iterdir()) == [], "nor does it end a later start"
