"""``rekindle advise``: what it recommends, what that is from, and the picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

import rekindle
from rekindle.cli.advice import advise
from rekindle.cli.main import main
from rekindle.common.waste import best_interval, wasted_share
from rekindle.memory.incident import Incident
from rekindle.memory.incidents import StartRecord, write_incident, write_start
from rekindle.memory.prices import Prices
from rekindle.storage.incidents import store_incident
from rekindle.storage.posix import PosixStore
from tests.memory.test_incident import some
from tests.stored import job_in, save

PRICES = Prices(step=0.5, snapshot=0.1, snapshot_gap=0.5, drain=2.0, drain_cost=0.4, drain_gap=30.0)
HOUR, DAY = 3600.0, 86400.0


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["advise", *map(str, arguments)])


def start(number: int, prices: Prices | None = PRICES, **changes: object) -> Incident:
    told = {} if prices is None else prices.to_json()
    return some(**{"start": f"{number:016x}", "generation": number, "seconds": 6 * HOUR, "prices": told, **changes})


def test_the_interval_with_the_least_waste_is_recommended() -> None:
    records = [start(1), start(2), start(3, place="storage", step=100, restored_step=60), start(4, cause="end")]
    advice = advise(records, budget=0.01)
    assert advice is not None
    snapshots, storage = advice.levels
    assert snapshots.between == (DAY + DAY) / 3 and storage.between == (DAY + DAY) / 2
    assert snapshots.now == 0.5 and snapshots.best == pytest.approx(best_interval(0.1, snapshots.between), abs=0.5)
    assert snapshots.setting == f"snapshot_every={round(snapshots.best / 0.5)}"
    assert storage.setting == 'persist_every="4.4min"' and storage.best == pytest.approx(4.4 * 60)
    assert advice.waste_now == pytest.approx(wasted_share(0.5, 0.1, 16 * HOUR) + wasted_share(30, 0.4, DAY, 2.0))
    assert advice.waste_best < advice.waste_now / 20
    assert advice.outages == pytest.approx(28 / (2 * DAY / 4 + 28))


def test_what_starts_have_wasted_is_told_by_interval() -> None:
    often, rarely = PRICES, replace(PRICES, snapshot_gap=120.0, drain_gap=600.0)
    records = [start(1, often), start(2, often, cause="end"), start(3, rarely, step=300, restored_step=100)]
    records.append(start(3, rarely, host="other"))
    advice = advise([*records, start(4, None)], budget=0.01)
    assert advice is not None
    (one, other), (third, last) = (level.points for level in advice.levels)
    assert (one.interval, one.seconds, other.interval, other.seconds) == (0.5, 12 * HOUR, 120, 6 * HOUR)
    assert one.waste == pytest.approx(0.1 / 0.5 + 2 * 0.5 / (12 * HOUR))  # one fault, two steps back
    assert other.waste == pytest.approx(0.1 / 120 + 200 * 0.5 / (6 * HOUR))
    assert (third.waste, last.waste) == (pytest.approx(0.4 / 30), pytest.approx(0.4 / 600))


def test_what_the_newest_start_has_not_measured_is_known_from_the_one_before() -> None:
    advice = advise([start(1), start(2, Prices(step=0.25, snapshot=0.05))], budget=0.01)
    assert advice is not None and advice.prices == replace(PRICES, step=0.25, snapshot=0.05)


def test_no_interval_is_below_what_the_budget_and_storage_take() -> None:
    many = [start(number, seconds=30.0, place="storage") for number in range(1, 60)]
    advice = advise(many, budget=0.001)
    assert advice is not None and [level.bound for level in advice.levels] == ["the budget of training time"] * 2
    slow = advise([start(1, replace(PRICES, drain=4000.0))], budget=0.5)
    assert slow is not None and slow.levels[1].best >= 0.95 * 40_000 and "tenth" in slow.levels[1].bound
    free = advise([start(1, replace(PRICES, snapshot=0.0))], budget=0.01)
    assert free is not None and free.levels[0].setting == "snapshot_every=1"


@pytest.mark.parametrize(
    ("snapshot", "budget", "named"),
    [
        (0.0, 0.01, "snapshots limit no interval below 500ms: the length of a step"),
        (0.1, 0.0001, "snapshots limit no interval below 17min: the budget of training time"),
    ],
)
def test_what_allows_no_shorter_interval_is_named(
    snapshot: float, budget: float, named: str, memory: Path, root: Path
) -> None:
    save(root, 1)
    write_incident(job_in(memory, root), start(1, replace(PRICES, snapshot=snapshot, drain_cost=0.0)))
    shown = " ".join(run(root, "--budget", budget).stdout.split())
    assert named in shown, shown
    assert "storage limit no interval below 20s: storage is written to for at most a tenth of the time" in shown


def test_the_table_names_settings_and_what_they_are_from(memory: Path, root: Path) -> None:
    save(root, 1)
    store_incident(PosixStore(root), start(1, place="storage"))
    write_incident(job_in(memory, root), start(2))
    result = run(root)
    assert result.exit_code == 0 and not result.stderr, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["every", "waste", "better", "waste", "setting"]
    assert lines[1][:4] == ["snapshots", "500ms", "20", "%"] and lines[1][-1].startswith("snapshot_every=")
    assert lines[2][:4] == ["storage", "30s", "1.4", "%"] and 'persist_every="' in lines[2][-1]
    assert "takes 2s, and 400ms of training" in " ".join(result.stdout.split())
    assert "2 in 12h" in result.stdout
    assert "estimated from those recorded and one more, in the time recorded and 24h more" in result.stdout
    assert 'snapshot_every="auto"' in result.stdout and "by a measure of its own" in result.stdout


def test_the_json_has_the_curve_and_what_was_measured(memory: Path, root: Path) -> None:
    write_incident(job_in(memory, root), start(2))
    save(root, 1)
    told = json.loads(run(root, "--json", "--budget", 0.02).stdout)
    assert told["prices"] == PRICES.to_json() and told["history"]["faults"] == 1
    curve, best = told["snapshots"]["curve"], told["snapshots"]["best"]
    assert len(curve) > 50 and min(waste for _, waste in curve) == pytest.approx(best["waste"], rel=0.02)
    assert told["storage"]["measured"] == [
        {"interval": 30.0, "waste": pytest.approx(0.4 / 30), "seconds": 6 * HOUR},
    ]
    assert told["waste"]["best"] < told["waste"]["now"]


def test_a_job_that_trains_is_advised_before_its_first_write_is_measured(memory: Path, root: Path) -> None:
    from rekindle.common.process_start import clock_id
    from rekindle.memory.prices import write_prices

    job, ours = job_in(memory, root), "a" * 16
    lock = job.lock_rank(0, 1.0)
    write_start(job, StartRecord(ours, 1, clock_id(), 0.0, 0.0))
    write_prices(job, ours, Prices(0.5, 0.001, 0.5))
    result = run(root)
    lock.release()
    assert result.exit_code == 0 and "not measured yet: no advice on it" in result.stdout, result.output
    assert "snapshot_every=" in result.stdout and "persist_every" not in result.stdout


@pytest.mark.parametrize("name", ["curve.png", "curve.svg"])
def test_the_picture_shows_both_curves(name: str, memory: Path, root: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_incident(job_in(memory, root), start(2))
    save(root, 1)
    picture = tmp_path / name
    result = run(root, "--plot", picture)
    assert result.exit_code == 0 and "snapshot_every=" in result.stdout, result.output
    content = picture.read_bytes()
    if name.endswith("png"):
        assert content.startswith(b"\x89PNG") and len(content) > 10_000
    else:
        ElementTree.fromstring(content)
        assert b"persist_every" in content
    refused = run(root, "--plot", tmp_path / "none" / name)
    assert refused.exit_code != 0 and str(tmp_path / "none" / name) in refused.stderr


def test_without_matplotlib_the_error_says_what_to_install(
    memory: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_incident(job_in(memory, root), start(2))
    save(root, 1)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = run(root, "--plot", tmp_path / "curve.png")
    assert result.exit_code == rekindle.RekindleError.exit_code and "pip install matplotlib" in result.stderr


def test_what_can_not_be_told_is_an_error(memory: Path, root: Path, tmp_path: Path) -> None:
    save(root, 1)
    unmeasured = run(root)
    assert unmeasured.exit_code == rekindle.NotFoundError.exit_code and "is not known" in unmeasured.stderr
    assert run(tmp_path / "none").exit_code == rekindle.NotFoundError.exit_code
    wrong = run(root, "--plot", "curve.gif")
    assert wrong.exit_code == 2 and "must end in .png or .svg" in wrong.stderr
    assert run(root, "--budget", 0).exit_code == 2
