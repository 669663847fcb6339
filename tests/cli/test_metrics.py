"""``rekindle metrics``: the numbers are the records', only those read them who may, rules and dashboard fit."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from rekindle.cli.access import check_access, is_loopback, read_token
from rekindle.cli.goodput import add_up
from rekindle.cli.incidents import find_incidents
from rekindle.cli.main import main
from rekindle.errors import UsageError
from rekindle.memory.costs import BOUNDS, CostPage, Costs, cost_page
from rekindle.memory.incidents import incident_files, write_incident
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from tests.memory.test_incident import some
from tests.stored import job_in, remember

MONITORING = Path(__file__).parents[2] / "examples/monitoring"
PAGE = Path(__file__).parents[2] / "docs/metrics.md"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")


def samples_of(text: str) -> Samples:
    """Values by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def printed() -> str:
    result = CliRunner().invoke(main, ["metrics", "--once"])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def job(memory: Path, root: Path) -> Iterator[JobDir]:
    """A job of two ranks that trains here: it has failed once, and storage is one step behind."""
    job = job_in(memory, root, world=2)
    locks = [job.lock_rank(rank, 5.0) for rank in range(2)]
    for rank in range(2):
        for step in (6, 7):
            remember(job, step, rank, 2)
        costs = Costs(os.getpid(), generation=4, step=7 + rank, steps=2, saves=2, snapshot_bytes=64, agent_lost=rank)
        for seconds in (0.002, 0.2):
            costs.stalls.add(seconds)
        costs.step_seconds.add(1.5)
        CostPage(cost_page(job.path, rank)).write(costs)
    job.notes.write_durable(6)
    write_incident(job, some())
    yield job
    for lock in locks:
        lock.release()


def test_the_numbers_are_those_of_the_records(job: JobDir, root: Path) -> None:
    found = samples_of(printed())

    def value(name: str, **labels: str) -> float:
        return found[f"rekindle_{name}", tuple(sorted({"root": str(root), **labels}.items()))]

    assert [value("step", rank=rank) for rank in "01"] == [7, 8]
    assert value("saves_total", rank="1") == 2 and value("snapshot_bytes_total", rank="1") == 64
    assert [value("failures_total", rank=rank, kind="agent") for rank in "01"] == [0, 1]
    assert value("stall_seconds_count", rank="0") == 2 and value("stall_seconds_sum", rank="0") == pytest.approx(0.202)
    buckets = [value("stall_seconds_bucket", rank="0", le=le) for le in (*map(str, BOUNDS), "+Inf")]
    assert buckets == [0, 0, 0, 1, 1, 1, 1, *[2] * 8]
    assert value("step_seconds_sum", rank="0") == 1.5
    assert value("trainers") == 2 and value("agent_up") == 0 and value("memory_bytes") == job.held_bytes()
    assert (value("checkpoint_step", place="memory"), value("checkpoint_step", place="storage")) == (7, 6)
    for place in ("memory", "storage"):
        assert 0 <= time.time() - value("checkpoint_timestamp_seconds", place=place) < 600
    assert value("alarm", kind="agent") == 1 and value("alarm", kind="storage") == 0
    record = some()
    assert value("incidents_total", cause="signal") == 1 and value("incidents_total", cause="oom") == 0
    assert value("lost_steps_total") == record.lost and value("outage_seconds_sum") == record.outage
    for part, seconds in record.parts().items():
        assert value("recovery_seconds_sum", part=part) == seconds and value("recovery_seconds_count", part=part) == 1
    assert value("goodput_ratio") == pytest.approx(add_up(find_incidents(job)[0]).goodput or 0)


def test_a_checkpoint_counts_once_all_ranks_have_it(job: JobDir, root: Path) -> None:
    remember(job, 8, 0, 2)
    found = samples_of(printed())
    assert found["rekindle_checkpoint_step", (("place", "memory"), ("root", str(root)))] == 7


def test_the_note_on_a_durable_step_keeps_its_time(job: JobDir) -> None:
    """An agent that comes back finds the same step on storage, and notes it again."""
    os.utime(job.path / "durable", (1000.0, 1000.0))
    job.notes.write_durable(6)
    assert (job.path / "durable").stat().st_mtime == 1000.0
    job.notes.write_durable(7)
    assert (job.path / "durable").stat().st_mtime > 1e9


def test_a_counter_of_incidents_never_goes_back(job: JobDir, memory: Path, root: Path) -> None:
    """Memory keeps only the newest records."""
    from rekindle.cli.metrics import _make_renderer

    render, name = _make_renderer(job.path.parent), ("rekindle_lost_steps_total", (("root", str(root)),))
    before = samples_of(render("")[0].decode())[name]
    write_incident(job, some(generation=9, start="9" * 16))
    for path in incident_files(job)[:1]:
        path.unlink()
    assert samples_of(render("")[0].decode())[name] == before + (some().lost or 0)


def test_a_damaged_job_hides_no_other(job: JobDir, memory: Path, tmp_path: Path) -> None:
    other = job_in(memory, tmp_path / "other")
    other.paths.job.write_bytes(b"{")
    found = samples_of(printed())
    assert found["rekindle_unreadable_jobs", ()] == 1
    assert len([name for name, _ in found if name == "rekindle_step"]) == 2


def test_alarms_have_kinds(job: JobDir, root: Path) -> None:
    lock = Lock(job.paths.agent_lock)
    assert lock.acquire()
    try:
        for error, alarms in (("no space", ["storage"]), (None, [])):
            status = {"pid": os.getpid() + 1, "error": error, "durable": 6, "drained": 3, "nbytes": 7, "busy": 0.5}
            job.notes.write_agent_status(status)
            assert not [
                name for name, _ in samples_of(printed()) if "drain" in name
            ]  # another process than the one that holds the lock wrote it
            job.notes.write_agent_status({**status, "pid": os.getpid(), "failures": 2})
            found = samples_of(printed())
            assert [
                dict(labels)["kind"] for (name, labels), value in found.items() if name == "rekindle_alarm" and value
            ] == alarms
            assert found["rekindle_drain_bytes_total", (("root", str(root)),)] == 7
            assert found["rekindle_drain_failures_total", (("root", str(root)),)] == 2
        os.utime(job.paths.agent_status, (1000.0, 1000.0))
        for rank in range(2):  # else it is a trainer that drains, and holds the lock
            job.paths.rank_lock(rank).unlink()
        assert samples_of(printed())["rekindle_alarm", (("kind", "silent"), ("root", str(root)))] == 1
    finally:
        lock.release()


@pytest.mark.parametrize(
    "change", [{"error": 5}, {"nbytes": "x"}, {"durable": [1]}, {"pid": "1"}, {"waits": {"a": 1}}], ids=str
)
def test_what_no_agent_writes_is_passed_over(job: JobDir, change: dict[str, object]) -> None:
    lock = Lock(job.paths.agent_lock)
    assert lock.acquire()
    try:
        job.notes.write_agent_status({"pid": os.getpid(), "error": None, "nbytes": 1, **change})
        found = samples_of(printed())
        assert not [name for name, _ in found if "drain" in name] and found["rekindle_unreadable_jobs", ()] == 0
    finally:
        lock.release()


# -- serving --------------------------------------------------------------------------------------------------------


def serve(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "rekindle", "metrics", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("metrics at "), line + process.stderr.read()
    return process, line.split()[-1]


def test_it_serves_those_that_know_the_token_and_ends_when_told(job: JobDir, root: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    process, url = serve("--token-file", str(token))
    try:
        request = Request(url, headers={"Authorization": "Bearer 0123456789abcdef", "Accept": "text/plain"})
        with urlopen(request, timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            found = samples_of(answer.read().decode())
        assert found["rekindle_trainers", (("root", str(root)),)] == 2
        with pytest.raises(OSError, match="401"):
            urlopen(url, timeout=30)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_port_that_is_taken_is_told(memory: Path) -> None:
    process, url = serve()
    try:
        result = CliRunner().invoke(main, ["metrics", "--port", url.split(":")[2].split("/")[0]])
        assert result.exit_code == 1 and "choose another by --port" in result.stderr
    finally:
        process.terminate()
        assert process.wait(30) == 0


def test_who_may_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--token-file"):
        check_access("0.0.0.0", None)
    assert [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "127.8.8.8")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "node", "")] == [False] * 5
    token = tmp_path / "token"
    for content in (b"short", b"", b"\xff" * 20, b"a" * 20 + b"\n" + b"b"):
        token.write_bytes(content)
        with pytest.raises(UsageError, match="token"):
            read_token(token)
    with pytest.raises(UsageError, match="token"):
        read_token(tmp_path / "none")

    async def statuses(secret: str | None, *headers: dict[str, str]) -> list[int]:
        async def handler(_: web.Request) -> web.Response:
            return web.Response()

        app = web.Application(middlewares=[check_access("127.0.0.1", secret)])
        app.add_routes([web.get("/", handler)])
        async with TestClient(TestServer(app)) as client:
            return [(await client.get("/", headers=each)).status for each in headers]

    hosts = ({}, {"Host": "localhost:1"}, {"Host": "[::1]:1"}, {"Host": "evil.example"}, {"Host": "127.0.0.1.evil"})
    assert asyncio.run(statuses(None, *hosts)) == [200, 200, 200, 403, 403]
    known = ({"Authorization": "Bearer " + "s" * 16}, {}, {"Authorization": "Bearer " + "s" * 15})
    assert asyncio.run(statuses("s" * 16, *known, {"Authorization": "s" * 16})) == [200, 401, 401, 401]


# -- rules and dashboard --------------------------------------------------------------------------------------------


def promtool(*arguments: object, text: str | None = None) -> str:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], input=text, capture_output=True, text=True, cwd=MONITORING, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_promtool
def test_promtool_finds_no_fault(job: JobDir) -> None:
    assert promtool("check", "metrics", text=printed()) == ""
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    assert "FAILED" not in promtool("test", "rules", "rekindle.rules.test.yml")


def expressions() -> Iterator[str]:
    yaml = pytest.importorskip("yaml")
    for rule in yaml.safe_load((MONITORING / "rekindle.rules.yml").read_text())["groups"][0]["rules"]:
        yield rule["expr"]
    board = json.loads((MONITORING / "grafana.json").read_text())
    yield from (target["expr"] for panel in board["panels"] for target in panel["targets"])
    yield from (one["expr"] for one in board["annotations"]["list"])


def test_rules_and_dashboard_ask_for_what_there_is(job: JobDir) -> None:
    recorded = set(re.findall(r"record: (\S+)", (MONITORING / "rekindle.rules.yml").read_text()))
    served = {sample for sample, _ in samples_of(printed())} | recorded
    served |= {"rekindle_start_timestamp_seconds", "rekindle_drain_bytes_total", "rekindle_drain_seconds_total"}
    served |= {"rekindle_drain_failures_total", "rekindle_drained_checkpoints_total"}  # of an agent
    asked = {name for each in expressions() for name in re.findall(r"\brekindle[_:]\w+", each) if name != "rekindle_"}
    assert asked and not asked - served
    told = set(re.findall(r"^\| `(rekindle_\w+)", PAGE.read_text(), re.MULTILINE))
    plain = {re.sub(r"_(bucket|sum|count)$", "", name) for name in served if ":" not in name}
    assert told == plain, told ^ plain


def test_every_alert_is_explained() -> None:
    alerts = set(re.findall(r"alert: (\w+)", (MONITORING / "rekindle.rules.yml").read_text()))
    told = re.findall(r"^\| `(Rekindle\w+)` ", PAGE.read_text(), re.MULTILINE)
    assert set(told) == alerts and len(told) == len(alerts)


PANEL: dict[str, Any] = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos", "targets", "datasource", "fieldConfig"],
    "properties": {
        "id": {"type": "integer"},
        "type": {"enum": ["stat", "timeseries", "barchart"]},
        "title": {"type": "string", "minLength": 1},
        "gridPos": {
            "type": "object",
            "required": ["x", "y", "w", "h"],
            "properties": {"x": {"minimum": 0}, "w": {"minimum": 1, "maximum": 24}},
        },
        "targets": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["refId", "expr", "datasource"],
                "properties": {"expr": {"type": "string", "minLength": 1}},
            },
        },
    },
}
BOARD: dict[str, Any] = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time", "annotations"],
    "properties": {
        "schemaVersion": {"type": "integer", "minimum": 30},
        "panels": {"type": "array", "items": PANEL},
        "templating": {
            "type": "object",
            "properties": {"list": {"items": {"required": ["name", "type", "query"]}}},
        },
    },
}
"""The parts of Grafana's JSON model of a dashboard that ours uses."""


def test_the_dashboard_is_one() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    board = json.loads((MONITORING / "grafana.json").read_text())
    jsonschema.validate(board, BOARD)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = {
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    }
    area = sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in board["panels"])
    assert len(places) == area and max(x for x, _ in places) < 24, "panels overlap, or reach over the edge"
    names = {f"${one['name']}" for one in board["templating"]["list"]}
    assert set(re.findall(r"\$[a-z]+", " ".join(expressions()))) <= names


@needs_promtool
def test_prometheus_understands_the_dashboard(tmp_path: Path) -> None:
    """Its expressions as rules: Prometheus checks those."""
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(expressions())]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert "SUCCESS" in promtool("check", "rules", tmp_path / "rules.json")
