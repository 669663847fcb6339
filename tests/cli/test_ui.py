"""``rekindle ui``: the server's answers, without a browser. ``test_browser.py`` looks at the page itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner

from rekindle.cli.alarms import KINDS
from rekindle.cli.main import main
from rekindle.cli.page import server
from rekindle.cli.page.jobs import Jobs, describe_history
from rekindle.cli.page.sampling import Sampler, Samples, steps_per_second
from rekindle.cli.page.server import Server
from rekindle.cli.page.timeline import draw, thin_out
from rekindle.errors import UsageError
from rekindle.memory.incidents import write_incident
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.incidents import store_incident
from rekindle.storage.posix import PosixStore
from tests.memory.test_incident import some
from tests.stored import job_in, remember, save

STATIC = Path(server.__file__).with_name("static")
Get = Callable[..., Awaitable[Any]]


@asynccontextmanager
async def served(roots: list[Path], memory: Path, token: str | None = None) -> AsyncIterator[int]:
    """Serves the page, and gives its port."""
    jobs = Jobs(roots, memory_base(memory))
    sampler = Sampler(jobs.directories)
    sampler.look()
    runner = web.AppRunner(Server(jobs, sampler, "127.0.0.1", token).application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


def ask_page(roots: list[Path], memory: Path, work: Callable[[Get], Awaitable[None]], token: str | None = None) -> None:
    """Has ``work`` ask a server, by a function that returns the answer's JSON, or its text with its status."""

    async def run() -> None:
        async with (
            served(roots, memory, token) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        ):

            async def get(path: str, **headers: str) -> Any:
                async with session.get(path, headers=headers) as response:
                    assert "default-src 'self'" in response.headers["Content-Security-Policy"]
                    if response.ok and response.content_type == "application/json":
                        return await response.json()
                    return response.status, await response.text()

            await work(get)

    asyncio.run(run())


async def only_job(get: Get) -> str:
    (job,) = (await get("/api/jobs"))["jobs"]
    return str(job["id"])


def test_the_page_loads_nothing_from_elsewhere(memory: Path) -> None:
    """Each file that one of its files names is there, and no file names an address."""

    async def work(get: Get) -> None:
        seen, todo = set(), ["/"]
        while todo:
            path = todo.pop()
            status, text = await get(path)
            assert status == 200, path
            seen.add(path)
            if path not in ("/static/uplot.js", "/static/uplot.css"):
                assert not re.search(r"https?:|\bimport\(|url\(", text), path
            named = re.findall(r'(?:src|href)="(/[^"]+)"', text) + re.findall(r'from "\./(\w+\.js)"', text)
            todo += {f"/static/{name.removeprefix('/static/')}" for name in named} - seen
        assert {path.name for path in STATIC.iterdir()} == {Path(path).name for path in seen if path != "/"} | {
            "index.html",
            "uplot.LICENSE",
        }

    ask_page([], memory, work)


def test_a_job_is_shown_from_its_files_alone(memory: Path, root: Path) -> None:
    """All numbers are those of ``ls`` and ``incidents``; nothing is written."""
    for step in (3, 6):
        save(root, step)
    job = job_in(memory, root)
    remember(job, 7)
    store_incident(PosixStore(root), some(generation=1, start="1" * 16))
    write_incident(job, some(generation=2, starts=3))
    before = sorted((path, path.stat().st_mtime_ns) for path in [*root.rglob("*"), *job.path.rglob("*")])

    async def work(get: Get) -> None:
        name = await only_job(get)
        now = (await get(f"/api/jobs/{name}"))["job"]
        assert (now["root"], now["state"], now["newest_in_memory"]) == (str(root), "ended", 7)
        assert [alarm["kind"] for alarm in now["alarms"]] == ["undrained"] and "stop ROOT" in now["alarms"][0]["do"]
        past = (await get(f"/api/jobs/{name}/history"))["history"]
        told = json.loads(CliRunner().invoke(main, ["incidents", str(root), "--json"]).stdout)
        assert past["totals"] == told["totals"]
        assert [one["parts"] for one in past["incidents"]] == [one["parts"] for one in told["incidents"]]
        assert past["newest_stored"]["step"] == 6 and past["used"]["storage"]["checkpoints"] == 2
        lines = (await get(f"/api/jobs/{name}/checkpoints"))["lines"]
        listed = json.loads(CliRunner().invoke(main, ["ls", str(root), "--json"]).stdout)
        places = [(line["step"], place) for line in lines for place in ("memory", "storage") if line[place]]
        assert places == [(one["step"], one["place"]) for one in listed]
        sizes = [line[place]["bytes"] for line in lines for place in ("memory", "storage") if line[place]]
        assert sizes == [one["bytes"] for one in listed]

    ask_page([], memory, work)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in [*root.rglob("*"), *job.path.rglob("*")])


def test_a_job_without_memory_is_shown_if_it_is_named(memory: Path, root: Path) -> None:
    save(root, 4)

    async def work(get: Get) -> None:
        name = await only_job(get)
        assert (await get(f"/api/jobs/{name}"))["job"]["state"] == "away"
        assert (await get(f"/api/jobs/{name}/history"))["history"]["newest_stored"]["step"] == 4
        assert (await get("/api/jobs/other"))[0] == 404
        assert (await get("/api/jobs"))["jobs"][0]["durable_step"] == 4  # the history has been read by now

    ask_page([root], memory, work)


def test_checkpoints_come_a_page_at_a_time(memory: Path, root: Path) -> None:
    for step in (1, 2, 10, 11):
        save(root, step)
    remember(job_in(memory, root), 11)

    async def work(get: Get) -> None:
        path = f"/api/jobs/{await only_job(get)}/checkpoints"

        async def steps(query: str) -> tuple[int, list[int]]:
            found = await get(f"{path}?{query}")
            return found["total"], [line["step"] for line in found["lines"]]

        assert await steps("count=2") == (4, [11, 10]) and await steps("skip=3&count=2") == (4, [1])
        assert await steps("step=1") == (3, [11, 10, 1]) and await steps("only=memory") == (1, [11])
        assert await steps("only=damaged") == (0, [])
        assert (await get(f"{path}?skip=-1"))[0] == 400

    ask_page([], memory, work)


def test_what_verify_has_found_is_shown(memory: Path, root: Path) -> None:
    for step in (1, 2):
        save(root, step)
    (shard,) = (root / "step-0000000002").glob("*.safetensors")
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    jobs = Jobs([root], memory_base(memory))
    (job,) = jobs.directories()
    assert [line["storage"]["read_at"] for line in describe_history(jobs, job)["checkpoints"]] == [None, None]
    before = time.time()
    assert CliRunner().invoke(main, ["verify", str(root)]).exit_code
    found = describe_history(jobs, job)
    assert [line["storage"]["sound"] for line in found["checkpoints"]] == [False, True]
    assert all(before - 1 < line["storage"]["read_at"] < time.time() + 1 for line in found["checkpoints"])
    assert [(alarm["kind"], alarm["what"]) for alarm in found["alarms"]] == [("damaged", "damaged on storage: step 2")]
    (root / "verified.json").write_text("[1]")
    assert [line["storage"]["read_at"] for line in describe_history(jobs, job)["checkpoints"]] == [None, None]


def test_a_root_that_is_away_is_an_alarm_and_memory_is_shown(memory: Path, root: Path) -> None:
    save(root, 1)
    job = job_in(memory, root)
    remember(job, 2)
    job.notes.write_durable(1, PosixStore(root).trace(1))
    os.rename(root, root.with_name("gone"))
    found = describe_history(Jobs([], memory_base(memory)), job)
    assert [line["step"] for line in found["checkpoints"]] == [2]
    assert found["alarms"][0]["kind"] == "unread" and str(root) in found["alarms"][0]["what"], found["alarms"]


def test_others_need_a_token_and_names_that_lead_here_do_not_help(memory: Path, root: Path) -> None:
    save(root, 1)

    async def with_token(get: Get) -> None:
        assert (await get("/"))[0] == 200 and (await get("/static/page.js"))[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert (await get("/api/jobs", **headers))[0] == 401
        assert (await get("/api/jobs", Authorization="Bearer right-token-of-it"))["jobs"]

    async def without(get: Get) -> None:
        for path in ("/", "/api/jobs"):
            assert (await get(path, Host="evil.example"))[0] == 403

    ask_page([root], memory, with_token, token="right-token-of-it")
    ask_page([root], memory, without)
    result = CliRunner().invoke(main, ["ui", str(root), "--host", "0.0.0.0", "--port", "0"])
    assert result.exit_code == UsageError.exit_code and "--token-file" in result.stderr


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"Host: 127.0.0.1\r\nAuthorization: Bearer \xff\xfe\x00ok", 400),
        (b"Host: 127.0.0.1\r\nAuthorization: Bearer \xff\xfe", 401),
        (b"Host: 127.0.0.1\r\nAuthorization: Bearer " + b"r" * 8000, 401),
        (b"Host: " + b"127.0.0.1" * 10_000, 400),
        (b"Host: 127.0.0.1", 401),
        (b"Host: 127.0.0.1\r\nAuthorization: Bearer right-token-of-it", 200),
    ],
    ids=["zero", "no-text", "long", "huge-host", "none", "right"],
)
def test_headers_of_any_bytes_are_refused(request_: bytes, status: int, memory: Path) -> None:
    async def run() -> bytes:
        async with served([], memory, "right-token-of-it") as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /api/jobs HTTP/1.1\r\n" + request_ + b"\r\nConnection: close\r\n\r\n")
            answer = await reader.readline()
            writer.close()
            return answer

    assert asyncio.run(run()).split()[1] == str(status).encode()


def test_a_request_without_a_host_is_refused(memory: Path) -> None:
    async def run() -> bytes:
        async with served([], memory) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /api/jobs HTTP/1.0\r\n\r\n")
            answer = await reader.readline()
            writer.close()
            return answer

    assert asyncio.run(run()).split()[1] == b"403"


def test_a_job_that_comes_and_goes_breaks_no_answer(memory: Path, root: Path) -> None:
    save(root, 1)
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            job = job_in(memory, root)
            remember(job, 2)
            write_incident(job, some())
            time.sleep(0.005)
            job.remove()
            time.sleep(0.005)

    async def work(get: Get) -> None:
        name, kinds = JobDir.of(root, memory_base(memory)).path.name, set()
        for _ in range(60):
            for path in ("", f"/{name}", f"/{name}/history", f"/{name}/checkpoints"):
                found = await get(f"/api/jobs{path}")
                assert isinstance(found, dict) or found[0] == 404, found
                kinds.add(type(found))
                assert not (isinstance(found, dict) and found["error"]), found
        assert kinds == {dict, tuple}

    comer = threading.Thread(target=come_and_go)
    comer.start()
    try:
        ask_page([], memory, work)
    finally:
        over.set()
        comer.join()


def test_records_that_are_none_are_named_and_hide_no_others(memory: Path, root: Path) -> None:
    save(root, 1)
    job = job_in(memory, root)
    write_incident(job, some())
    names = {b"\x00" * 100: "0000000001-a.jsonl", b'{"version": 1, "at": NaN}\n': "0000000002-b.jsonl"}
    names[some(generation=9).encode()[:-40]] = "0000000003-c.jsonl"
    names[some(generation=9).encode().replace(b'"rank": ', b'"rank": 1e999, "x": ')] = "0000000004-d.jsonl"
    for content, name in names.items():
        (job.paths.incidents / name).write_bytes(content)
    (root / "incidents").mkdir()
    (root / "incidents" / "0000000005-e.jsonl").write_bytes(b"\xff\n")
    (job.path / "drained").write_bytes(b"nan inf")

    async def work(get: Get) -> None:
        name = await only_job(get)
        past = (await get(f"/api/jobs/{name}/history"))["history"]
        assert len(past["incidents"]) == 1 and past["totals"]["incidents"] == 1
        told = " ".join(past["problems"])
        assert all(name in told for name in (*names.values(), "0000000005-e.jsonl")), told
        assert (await get(f"/api/jobs/{name}"))["job"]["drains_seen"] == []

    ask_page([], memory, work)


def test_a_root_that_never_was_is_an_alarm(memory: Path, tmp_path: Path) -> None:
    async def work(get: Get) -> None:
        name = await only_job(get)
        assert (await get(f"/api/jobs/{name}"))["job"]["state"] == "away"
        (alarm,) = (await get(f"/api/jobs/{name}/history"))["history"]["alarms"]
        assert alarm["kind"] == "unread" and str(tmp_path / "none") in alarm["what"]

    ask_page([tmp_path / "none"], memory, work)


def test_a_hundred_jobs_are_listed_in_one_answer(memory: Path, tmp_path: Path) -> None:
    for number in range(100):
        job = job_in(memory, tmp_path / f"run-{number}")
    job.paths.job.write_bytes(b"{")  # one that can't be read must not hide the others

    async def work(get: Get) -> None:
        found = (await get("/api/jobs"))["jobs"]
        assert len({one["id"] for one in found}) == 100
        assert [one["id"] for one in found if one["state"] == "unknown"] == [job.path.name]
        assert [one["id"] for one in found if one["alarms"]] == [job.path.name]

    ask_page([], memory, work)


def test_samples_keep_changes_and_tell_the_rate() -> None:
    seen = Samples()
    for at in range(60):
        seen.add(float(at), at // 10 * 5)
    assert seen.steps[:3] == [(0.0, 0), (9.0, 0), (10.0, 5)] and seen.steps[-1] == (59.0, 25)
    assert steps_per_second(seen.steps) == pytest.approx(0.5, abs=0.2)
    seen.add(60.0, 3)  # a restart from an earlier step
    assert steps_per_second(seen.steps) is None
    seen.add(62.0, 7)
    assert steps_per_second(seen.steps) == 2.0
    for at in range(100, 20_000):
        seen.add(float(at), at)
    assert len(seen.steps) <= 6000 and seen.steps[0] == (0.0, 0) and seen.steps[-1][1] == 19_999


def test_the_timeline_marks_faults_by_the_wall_clock_and_thins_points_out() -> None:
    found = draw([], [some(), replace(some(generation=4), cause="end")])
    (mark,) = found["incidents"]
    record = some()
    assert mark["back"] - mark["began"] == pytest.approx(record.outage) and len(found["ends"]) == 1
    assert mark["began"] == pytest.approx(record.at - (record.moments["noticed"] - record.moments["fault"]))
    points = list(range(10_000))
    assert len(thin_out(points)) == 1500 and {thin_out(points)[0], thin_out(points)[-1]} == {0, 9_999}
    assert thin_out([1, 2]) == [1, 2]


def test_the_command_serves_until_it_is_told_to_end(memory: Path, root: Path) -> None:
    save(root, 1)
    with subprocess.Popen(
        [sys.executable, "-m", "rekindle", "ui", str(root), "--port", "0"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        match = re.search(r"page at http://127\.0\.0\.1:(\d+)/", process.stderr.readline())
        assert match
        taken = CliRunner().invoke(main, ["ui", "--port", match[1]])
        assert taken.exit_code == 1 and "choose another by --port" in taken.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_job_that_has_gone_is_left_out(memory: Path, root: Path) -> None:
    jobs = Jobs([], memory_base(memory))
    job = job_in(memory, root)
    assert jobs.find(job.path.name) is not None
    assert job.remove() and jobs.directories() == [] and jobs.find(job.path.name) is None
    assert isinstance(jobs.root_of(JobDir(job.path)), (Path, type(None)))


def test_the_operating_guide_tells_of_each_alarm() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    assert not [kind for kind in (*KINDS, "unread", "damaged") if f"| `{kind}` |" not in page]
