"""``rekindle incidents``: the table, the JSON, totals and goodput."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import rekindle
from rekindle.cli.goodput import add_up
from rekindle.cli.main import main
from rekindle.memory.incidents import incident_files, write_incident
from rekindle.storage.incidents import store_incident
from rekindle.storage.posix import PosixStore
from tests.memory.test_incident import ID, some
from tests.stored import job_in, save


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["incidents", *map(str, arguments)])


def ended(**changes: object) -> Any:
    return some(cause="end", what="the job has ended well", moments={"noticed": 1.0}, **changes)


def test_goodput_is_kept_steps_time_over_all_time() -> None:
    # 50 s of a start, of which 40 trained 7 steps; 2 of them lost, and the one under way; 10 s until the next start.
    totals = add_up([some(), ended(generation=4, start="f" * 16, began_at=5, step=10, seconds=30.0, trained=25.0)])
    assert totals.productive == pytest.approx(40 * 5 / 8 + 25) and totals.wall == pytest.approx(50 + 10 + 30)
    assert totals.goodput == pytest.approx(50 / 90) and totals.lost == 2 and totals.incidents == 1
    assert totals.median_outage == totals.longest_outage == 28 and totals.unrecovered == totals.left_out == 0


def test_hosts_count_an_incident_once_and_their_clocks_are_not_compared() -> None:
    far = {name: at + 1e6 for name, at in some().moments.items()}
    totals = add_up([some(), some(host="other", moments=far)])
    assert (totals.incidents, totals.lost, totals.longest_outage) == (1, 2, 28)
    assert totals.goodput == add_up([some()]).goodput


def test_what_is_not_known_is_left_out_of_goodput() -> None:
    unknown = [some(step=-1, start="1" * 16), some(seconds=None, start="2" * 16)]
    totals = add_up([*unknown, some(moments={"noticed": 1.0}, restored_step=-1)])
    assert (totals.left_out, totals.unrecovered, totals.incidents) == (2, 1, 3)
    assert totals.goodput == pytest.approx(40 * 7 / 8 / 50)
    assert add_up([]).goodput is None


def test_the_table_and_the_json_show_memory_and_storage(memory: Path, root: Path) -> None:
    save(root, 1)
    store_incident(PosixStore(root), some(generation=1, start="1" * 16, warm=False))
    store_incident(PosixStore(root), some(generation=2, restored_step=-1, moments={"noticed": 1.0}))
    write_incident(job_in(memory, root), some(generation=2, starts=3))  # newer than what storage has
    result = run(root)
    assert result.exit_code == 0 and not result.stderr, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1.7e9)).split()
    assert ["1", *at, "signal", "1", "node", "1/a", "7", "2", "memory", "cold"] in lines
    assert ["2", *at, "signal", "1", "node", "1/a", "7", "2", "memory", "warm,", "3", "tries"] in lines
    assert ["2", "1.000", "2.000", "3.000", "4.000", "5.000", "6.000", "7.000", "28.000"] in lines
    assert "2 incidents, 4 completed steps computed again" in result.stdout
    assert "from fault to first new step: median 28.00 s, longest 28.00 s" in result.stdout
    assert "goodput: 41.7%, 50.0 s of 120.0 s" in result.stdout
    found = json.loads(run(root, "--json").stdout)
    assert [one["lost"] for one in found["incidents"]] == [2, 2] and found["stretches"] == []
    assert found["incidents"][1]["parts"]["first_step"] == 7 and found["incidents"][1]["start"] == ID
    assert found["totals"]["goodput"] == pytest.approx(50 / 120)


def test_damaged_lines_are_skipped_with_a_word(memory: Path, root: Path) -> None:
    save(root, 1)
    store_incident(PosixStore(root), some(generation=1, start="1" * 16))
    (root / "incidents" / "0000000002-foreign.jsonl").write_text('{"hello": "world"}\n')
    job = job_in(memory, root)
    write_incident(job, some(generation=3))
    (path,) = incident_files(job)
    path.write_bytes(path.read_bytes()[:99])
    result = run(root)
    assert result.exit_code == 0 and "1 incident, " in result.stdout
    skipped = [line for line in result.stderr.splitlines() if line.startswith("skipped: ")]
    assert len(skipped) == 2 and str(path) in skipped[0] and "0000000002-foreign.jsonl" in skipped[1], result.stderr


def test_a_job_without_a_fault(memory: Path, root: Path) -> None:
    save(root, 1)
    result = run(root)
    assert (result.exit_code, result.stdout) == (0, f"{root}: no fault is recorded\n")
    found = json.loads(run(root, "--json").stdout)
    assert found["incidents"] == [] and found["totals"]["goodput"] is None


def test_nothing_there_is_an_error(memory: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "none")
    assert result.exit_code == rekindle.NotFoundError.exit_code and result.stderr.startswith("Error: ")
