"""Experiments on a device, without one: their list, their limits, what becomes of their figures, and their tables."""

from __future__ import annotations

import ast
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
PAGE = BENCH.parent / "docs" / "benchmarks.md"
FAKES = """
    import os, signal, subprocess, sys, time
    from pathlib import Path

    def measures(report, places, scale=1):
        report.require(True, "a copy was made")
        report.figure("speed", 53.0 * scale, "GB/s", low=50, high=55)
        report.figure("stall", 3.0, "ms", high=2)
        report.raw("samples", [1, 2])
        (Path(places.memory) / "left").write_text("behind")
        (Path(places.disk) / "deep").mkdir()

    def fails(report, places):
        report.require(True, "it began")
        report.figure("before", 1.0)
        raise ValueError("no such luck")

    def dies(report, places):
        report.require(True, "it began")
        report.figure("before", 1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(report, places, note):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report.require(True, "it began")
        report.figure("before", 1.0)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(note).write_text(str(child.pid))
        time.sleep(600)

    def times_out(report, places, proven):
        report.require(proven, "a snapshot went into memory")
        report.figure("first snapshot", 8.883, "s after the first step")

    def proves_nothing(report, places):
        report.raw("samples", [1])

    def has_parts(report, places):
        with report.part("good"):
            report.require(True, "a copy was made")
            report.figure("of the good part", 1.0)
        with report.part("unproven"):
            report.figure("of the unproven part", 2.0)
        with report.part("broken"):
            report.require(True, "it began")
            raise ValueError("no such luck")
        with report.part("another good one"):
            report.require(True, "a copy was made")
            report.figure("of another good part", 3.0)

    def speaks(speaker, word):
        speaker.say(first=word)
        speaker.ready()
        speaker.say(second=os.environ.get("FAKE_WORD"))

    def stops_amid(speaker):
        speaker.say(first="word")
        time.sleep(600)

    def breaks(speaker):
        speaker.say(first="word")
        raise ValueError("broken")
"""


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments that need no device, where the processes of experiments find them too."""
    (tmp_path / "fakes").mkdir()
    (tmp_path / "fakes" / "fake_work.py").write_text(textwrap.dedent(FAKES))
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fakes"))


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Any]:
    from on_gpu.places import Places

    made = [tmp_path / name for name in ("memory", "huge", "disk")]
    for path in made:
        path.mkdir()
    yield Places(str(made[0]), str(made[1]), str(made[2]), "for a test")


def fake(name: str, budget: float = 60.0, **options: Any) -> Any:
    from on_gpu.experiments import Experiment

    subject = f"{name} happens"
    work = f"fake_work:{name}"
    return Experiment(name, "run-1", f"a {name}", subject, "nothing much", "nothing", work, budget, options)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / "gpu.py"), *arguments], capture_output=True, text=True, timeout=150
    )


# -- the list ---------------------------------------------------------------------------------------------------


def test_each_run_ends_within_nine_minutes() -> None:
    from on_gpu.experiments import EXPERIMENTS, RUNS

    for run in RUNS:
        assert sum(e.budget for e in EXPERIMENTS if e.run == run) <= 9 * 60
    assert {e.run for e in EXPERIMENTS} == set(RUNS) and len({e.name for e in EXPERIMENTS}) == len(EXPERIMENTS)


def test_every_experiment_can_be_called() -> None:
    """Their modules are imported where there is no device, and their functions take their options."""
    import inspect

    from on_gpu.cases import find_work
    from on_gpu.experiments import EXPERIMENTS

    for experiment in EXPERIMENTS:
        inspect.signature(find_work(experiment.work)).bind(None, None, **experiment.options)
    for path in (BENCH / "on_gpu").glob("*.py"):
        importlib.import_module(f"on_gpu.{path.stem}")


@pytest.mark.parametrize("folder", ["bench/on_gpu", "tests/gpu"])
def test_names_of_rekindle_are_there_also_where_only_a_device_would_tell(folder: str) -> None:
    missing = []
    for path in (BENCH.parent / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rekindle":
                module = importlib.import_module(str(node.module))
                missing += [f"{path.name}: {a.name}" for a in node.names if not hasattr(module, a.name)]
    assert not missing


def test_the_page_tells_what_is_expected_of_each() -> None:
    from on_gpu.experiments import BEYOND_ONE_DEVICE, EXPERIMENTS

    text = PAGE.read_text()
    for experiment in EXPERIMENTS:
        assert f"| `{experiment.name}` | {experiment.title} | {experiment.expected} | " in text, "bench/gpu.py docs"
    assert all(f"| {name} | {why} |" in text for name, why in BEYOND_ONE_DEVICE.items())


def test_help_and_list_need_no_device() -> None:
    from on_gpu.experiments import EXPERIMENTS

    shown = command("--help").stdout
    assert all(f"\n  {e.name}" in shown for e in EXPERIMENTS)
    listed = command("list")
    assert listed.returncode == 0 and all(f" {e.name} " in listed.stdout for e in EXPERIMENTS)
    shown = command("every-step", "--help").stdout
    assert "131072" in shown and "[default: 4GiB]" in shown and "Restore from storage too" in shown


@pytest.mark.campaign(seconds=7)
def test_without_a_device_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    for arguments in (["bus"], ["all", "run-2"]):
        done = command(*arguments)
        assert done.returncode == 1 and "no CUDA device: " in done.stderr and "Traceback" not in done.stderr


# -- processes --------------------------------------------------------------------------------------------------


def test_figures_and_samples_come_back_and_nothing_is_left(places: Any) -> None:
    from on_gpu.runner import run_one

    outcome = run_one(fake("measures", scale=1.1), places, 60)
    assert (outcome.status, outcome.detail, outcome.raw) == ("done", "", {"samples": [1, 2]})
    speed, stall = outcome.figures
    assert (speed.expected, speed.met, speed.shown) == ("50 to 55 GB/s", False, "58.3 GB/s")
    assert (stall.expected, stall.met) == ("at most 2 ms", False)
    assert run_one(fake("measures"), places, 60).figures[0].met is True
    assert not any(list(Path(path).iterdir()) for path in (places.memory, places.disk))


def test_one_that_fails_or_dies_keeps_its_figures(places: Any) -> None:
    from on_gpu.runner import run_one

    failed = run_one(fake("fails"), places, 60)
    assert failed.status == "failed" and "no such luck" in failed.detail and len(failed.figures) == 1
    died = run_one(fake("dies"), places, 60)
    assert died.status == "failed" and "SIGKILL" in died.detail and len(died.figures) == 1


@pytest.mark.campaign(seconds=20)
def test_one_that_hangs_is_killed_with_all_its_processes(places: Any, tmp_path: Path) -> None:
    from on_gpu.runner import run_one

    note = tmp_path / "child"
    began = time.monotonic()
    outcome = run_one(fake("hangs", note=str(note)), places, 20)
    assert outcome.status == "out of time" and len(outcome.figures) == 1
    assert 20 <= time.monotonic() - began < 120
    child = int(note.read_text())
    until = time.monotonic() + 60
    while not _is_gone(child):
        assert time.monotonic() < until
        time.sleep(0.05)


def _is_gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_others_go_on_and_time_is_shared_out(places: Any) -> None:
    from on_gpu.results import Outcome
    from on_gpu.runner import run_all

    limits, told = [], []

    def run(experiment: Any, places: Any, limit: float) -> Any:
        limits.append(limit)
        return Outcome(experiment.name, "failed")

    experiments = [fake("a", 30), fake("b", 500), fake("c")]
    outcomes = run_all(experiments, places, 100, told.append, run)
    assert outcomes == told and [o.status for o in outcomes] == ["failed"] * 3
    assert limits[0] == 30 and 90 < limits[1] <= 100
    (late,) = run_all(experiments[:1], places, 10, told.append, run)
    assert (late.status, late.detail) == ("left out", "no time left")


def test_a_whole_run_is_written_down_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import click
    import gpu
    from on_gpu.page import into_docs

    monkeypatch.setattr(gpu, "describe_device", lambda: {"device": "a device", "attributes": {}})
    path = tmp_path / "run.json"
    experiments = [fake("fails"), fake("measures")]
    with pytest.raises(click.ClickException, match="not done: fails"):
        gpu.measure(experiments, 5.0, path)
    document = json.loads(path.read_text())
    assert document["machine"]["device"] == "a device" and document["machine"]["cores"] == os.cpu_count()
    assert [o["status"] for o in document["experiments"]] == ["failed", "done"]
    shown = capsys.readouterr().out
    assert "50 to 55 GB/s" in shown and "53 GB/s" in shown and "not as expected: measures: stall" in shown
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    document["experiments"][1]["name"] = "bus"
    path.write_text(json.dumps(document))
    into_docs([path], page)
    assert "speed: 53 GB/s<br>stall: 3 ms (**not as expected**)" in page.read_text()
    assert "a device, " in page.read_text() and "not run yet" in page.read_text()
    document["machine"]["device"] = document["experiments"][1]["name"] = "item"
    path.write_text(json.dumps(document))
    into_docs([path], page)
    found = page.read_text()
    assert found.count("speed: 53 GB/s<br>stall: 3 ms") == 2 and "a device, " in found and "item, " in found
    assert command("docs").returncode == 2, "it would put no figure anywhere"


def test_a_report_cut_off_amid_a_line_is_read(tmp_path: Path) -> None:
    from on_gpu.results import Report, read_report

    path = tmp_path / "report"
    report = Report(path, 100)
    report.require(True, "it began")
    report.figure("kept", 1.0, "s")
    assert report.has_time(50, "no") and not report.has_time(200, "the rest")
    with path.open("a") as file:
        file.write('{"figure": {"what": "cu')
    found = read_report(path)
    assert [(f.what, f.shown) for f in found.figures] == [("kept", "1 s"), ("the rest", "left out: no time left")]
    assert not read_report(tmp_path / "none").figures


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("times_out", {"proven": False}, "did not happen: a snapshot went into memory"),
        ("proves_nothing", {}, "nothing was measured of: proves_nothing happens"),
    ],
)
def test_a_subject_that_did_not_happen_fails_and_its_figure_is_not_printed(
    places: Any, capsys: pytest.CaptureFixture[str], name: str, options: dict[str, Any], reason: str
) -> None:
    import gpu
    from on_gpu.runner import run_one

    outcome = run_one(fake(name, **options), places, 60)
    gpu.show(outcome)
    assert outcome.status == "failed" and reason in outcome.detail and not outcome.figures
    shown = capsys.readouterr().out
    assert f"{name}: failed" in shown and reason in shown and "8.883" not in shown
    if name == "times_out":
        assert run_one(fake(name, proven=True), places, 60).figures[0].value == 8.883


def test_parts_fail_by_name_and_the_others_go_on(places: Any) -> None:
    from on_gpu.runner import run_one

    outcome = run_one(fake("has_parts"), places, 60)
    assert outcome.status == "failed"
    assert [f.what for f in outcome.figures] == ["of the good part", "of another good part"]
    assert "unproven: of the unproven part: refused" in outcome.detail
    assert "broken: ValueError: no such luck" in outcome.detail


# -- cases ------------------------------------------------------------------------------------------------------


def test_a_case_waits_for_its_word() -> None:
    from on_gpu.cases import Case

    with Case("fake_work:speaks", {"word": "a"}, {"FAKE_WORD": "b"}) as case:
        assert case.wait_ready(60) and case.said["first"] == "a" and "second" not in case.said
        case.go()
        assert case.result(60)["second"] == "b"
        assert case.exit_code(60) == 0


def test_a_case_that_stops_is_killed() -> None:
    from on_gpu.cases import Case

    with Case("fake_work:stops_amid") as case:
        assert case.listen(60, until="first") == "hung"
        began = time.monotonic()
        assert case.listen(0.2) == "hung" and 0.2 <= time.monotonic() - began < 60
        seconds = case.kill()
        assert seconds is not None and case.exit_code(0) == -signal.SIGKILL
    assert case.said == {"first": "word"}


def test_a_case_that_breaks_says_why() -> None:
    from on_gpu.cases import Case

    with Case("fake_work:breaks") as case:
        with pytest.raises(RuntimeError, match="ValueError: broken"):
            case.result(60)
        assert case.ending == "died" and case.exit_code(60) == 1


def test_what_a_stuck_device_lets_pass_is_told(tmp_path: Path) -> None:
    from on_gpu.results import Report, read_report
    from on_gpu.stuck import TRIES, _tell

    path = tmp_path / "report"
    report = Report(path)
    fine = dict.fromkeys(TRIES, "0.1 ms")
    _tell(report, "", "item", {**fine, "register": "blocked"})
    _tell(report, "1", "item", {**fine, "query": "blocked"})
    _tell(report, "", ".cpu()", dict.fromkeys(TRIES, "blocked"))
    _tell(report, "", ".cpu()", fine)
    _tell(report, "", "item", {})
    figures = read_report(path).figures
    assert [f.met for f in figures] == [True, False, True, False, None]
    assert "register blocked" in str(figures[0].value) and figures[4].value == "left out: no time left"


def test_outcomes_of_tests_are_read_in_both_orders() -> None:
    from on_gpu.suite import outcomes_in

    one, two = "tests/gpu/test_cuda.py::test_restore[a b]", "tests/gpu/test_cuda.py::test_x"
    assert outcomes_in(f"{one} PASSED [ 50%]\n{two} FAILED   [100%]\nFAILED {two} - no") == {
        one: "PASSED",
        two: "FAILED",
    }
    assert outcomes_in(f"[gw0] [ 50%] PASSED {one} \n[gw1] [100%] SKIPPED {two} ") == {one: "PASSED", two: "SKIPPED"}


# -- places and memory ------------------------------------------------------------------------------------------


def test_places_are_taken_away_again(tmp_path: Path) -> None:
    from on_gpu.places import open_places

    with open_places(tmp_path) as opened:
        paths = [Path(path) for path in (opened.memory, opened.huge, opened.disk) if path]
        for path in paths:
            (path / "file").write_text("x")
        mounted = [path for path in paths if path.is_mount()]
        assert ("mounted" in opened.kind) == (paths[0] in mounted) and str(tmp_path) in opened.disk
    assert not any(path.exists() for path in paths)


def test_memory_is_populated_by_several_threads(memory: Path) -> None:
    from on_gpu.cuda import SharedMemory, populate

    made = SharedMemory(memory, 5 << 20, name="file")
    assert (memory / "file").stat().st_blocks == 0
    try:
        populate(made, 4)
    except OSError as error:
        pytest.skip(f"this kernel can't: {error}")
    assert (memory / "file").stat().st_blocks * 512 == 5 << 20
    made.bytes[-1] = 7
    assert (memory / "file").read_bytes()[-1] == 7
