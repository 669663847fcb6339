"""The page of ``rekindle ui`` in a real browser, offline: ``make ui``. ``make ui SHOTS=docs/img`` keeps its pictures.

Chromium is the machine's own; Playwright is in an environment of its own. Tests skip without either.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.format.lineage import ShardId
from rekindle.format.names import MANIFEST, receipt_name, shard_name, step_dir
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.lock import Lock
from rekindle.memory.status import STABLE, StatusPage
from rekindle.storage.catalog import find_copies
from rekindle.storage.incidents import store_incident
from rekindle.storage.manifest import build_manifest
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import verify
from rekindle.testing import make_shard
from tests.memory.test_incident import some
from tests.stored import START, job_in, remember

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make ui")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: make ui")

REPO = Path(__file__).parents[2]
EXAMPLE = REPO / "examples" / "train_gpt.py"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WITHIN = 120_000
"""Milliseconds that what must come may take on a busy machine."""
LOADS_WITHIN = 1.0
"""Seconds from the address to the page with all of its parts."""

_OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"

pytestmark = [
    pytest.mark.campaign(seconds=90),
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", _OFFLINE])
        yield browser
        browser.close()


@pytest.fixture
def served() -> Iterator[Callable[..., str]]:
    """Starts the command, and returns the address that it tells."""
    started: list[subprocess.Popen[str]] = []

    def serve(*arguments: object) -> str:
        command = [sys.executable, "-m", "rekindle", "ui", "--port", "0", *map(str, arguments)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        match = re.search(r"http://[\d.:]+/", process.stderr.readline())
        assert match
        return match[0]

    yield serve
    for process in started:
        process.terminate()
        assert process.wait(30) == 0


class Visit:
    """A page in a browser that finds no other machine, and what went wrong in it."""

    def __init__(self, browser: Any, address: str, scheme: str = "light", height: int = 900) -> None:
        self.wrong: list[str] = []
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": 1180, "height": height})
        self.page = self.context.new_page()
        self.page.on(
            "console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self._note(request.url, address))
        self.began = time.monotonic()
        self.page.goto(address)

    def _note(self, url: str, address: str) -> None:
        if not url.startswith((address, "data:")):
            self.wrong.append(f"asks for {url}")

    def wait(self, selector: str) -> Any:
        return self.page.wait_for_selector(selector, timeout=WITHIN)

    def until(self, expression: str) -> None:
        """Waits until it is true. Playwright's own way to ask again needs eval, which the page's policy forbids."""
        wait_until(lambda: self.page.evaluate(expression))

    def shoot(self, name: str, whole: bool = True) -> None:
        """Keeps a picture of the page, where the caller wants them; with few colors, as a document has it."""
        where = os.environ.get("REKINDLE_SHOTS")
        if where:
            path = Path(where) / f"ui-{name}.png"
            self.page.screenshot(path=str(path), full_page=whole)
            with Image.open(path) as picture:
                picture.convert("RGB").quantize(255, dither=Image.Dither.NONE).save(path, optimize=True)

    def close(self) -> None:
        self.context.close()
        assert not self.wrong


def wait_until(holds: Callable[[], Any]) -> Any:
    ends = time.monotonic() + WITHIN / 1000
    while not (found := holds()):
        assert time.monotonic() < ends
        time.sleep(0.05)
    return found


def put(root: Path, step: int) -> None:
    """A sound checkpoint, without the order of writes that a crash would need: ten thousand would take a minute."""
    stamp = ShardId(step, 0, 1, START)
    receipt, shard = make_shard(stamp, {"a": bytes(8)})
    there = root / step_dir(step)
    there.mkdir(parents=True)
    (there / shard_name(0, 1)).write_bytes(shard)
    (there / receipt_name(0, 1)).write_bytes(receipt.raw)
    (there / MANIFEST).write_bytes(build_manifest([receipt], stamp))


def test_ten_thousand_checkpoints_are_there_within_a_second(
    browser: Any, served: Callable[..., str], memory: Path
) -> None:
    root, now = memory / "run-17", time.time()
    for step in range(1, 10_001):
        put(root, step)
    assert verify(find_copies(None, PosixStore(root))[0]) == []
    for number in range(1, 41):
        told = {"generation": number, "start": f"{number:016x}", "at": now - 60 * (41 - number)}
        store_incident(PosixStore(root), some(**told, step=240 * number, restored_step=240 * number))
    remember(job_in(memory, root), 10_001)
    address = served(root)
    first = Visit(browser, address)
    first.wait('#checkpoints tr[data-step="10001"]')  # the browser itself has started; the server has read storage
    first.close()
    loads: list[float] = []
    ends = time.monotonic() + WITHIN / 1000
    while not loads or (loads[-1] >= LOADS_WITHIN and time.monotonic() < ends):  # others may need the cores, too
        visit = Visit(browser, address)
        visit.wait('#checkpoints tr[data-step="10001"]')
        visit.wait("#bars .incident")
        visit.wait(".chart canvas")
        loads.append(time.monotonic() - visit.began)
        if loads[-1] >= LOADS_WITHIN:
            visit.close()
    seconds = ", ".join(f"{one:.2f}" for one in loads)
    load = os.getloadavg()[0]
    print(f"10,000 checkpoints: all parts of the page are there after {seconds} s, with a load of {load:.1f}")
    assert loads[-1] < LOADS_WITHIN, loads
    assert "of 10,001" in visit.page.inner_text("#checkpoints-part .right")
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.className") == "skip"
    visit.page.get_by_role("button", name="older").focus()
    visit.page.keyboard.press("Enter")
    visit.wait('#checkpoints tr[data-step="9981"]')
    visit.page.get_by_label("Show steps that begin with").fill("777")
    visit.wait('#checkpoints tr[data-step="777"]')
    visit.close()


def test_a_live_job_is_followed_through_a_kill(browser: Any, served: Callable[..., str], memory: Path) -> None:
    """The bar of the incident adds up to the record of the recovery clock."""
    root = memory / "gpt"
    command = [sys.executable, "-m", "rekindle", "run", "--standalone", "--nproc-per-node=2", EXAMPLE, root]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    training = subprocess.Popen([*command, "--steps=100000"], env=environment, stdout=subprocess.DEVNULL)
    try:
        job = JobDir.of(root, memory_base(memory))
        wait_until(lambda: len(job.trainers()) == 2 and job.notes.durable())
        visit = Visit(browser, served(root))
        visit.wait(".state.training")
        visit.until("/^\\d/.test(document.querySelector('.tile .big').innerText)")

        def step() -> int:
            return int(visit.page.inner_text(".tile .big").replace(",", ""))

        seen = wait_until(lambda: step() > 20 and step())
        wait_until(lambda: step() > seen + 10)
        struck = subprocess.run(
            [sys.executable, "-m", "rekindle", "drill", str(root), "kill", "--json"], capture_output=True, text=True
        )
        assert struck.returncode == 0, struck.stderr
        bar = visit.wait("#bars .incident[data-outage]")
        (record,) = tell("incidents", root)["incidents"]
        parts = bar.eval_on_selector_all("i", "all => all.map(one => [one.dataset.part, Number(one.dataset.seconds)])")
        assert dict(parts) == {name: part for name, part in record["parts"].items() if part is not None}
        assert sum(part for _, part in parts) == pytest.approx(record["outage"], abs=0.001)
        assert float(bar.get_attribute("data-outage")) == record["outage"] > 0
        drawn = bar.eval_on_selector_all("i", "all => all.reduce((sum, one) => sum + one.offsetWidth, 0)")
        width = bar.eval_on_selector(".bar", "one => one.offsetWidth")
        assert drawn == pytest.approx(width, abs=len(parts))  # the only, so the longest one takes all of the width
        after = record["step"]
        wait_until(lambda: step() > after + 30)
        wait_until(lambda: "%" in visit.page.inner_text(".tiles"))
        visit.wait("#spread .histogram")
        visit.shoot("live")
        visit.page.emulate_media(color_scheme="dark")
        visit.shoot("dark")
        visit.page.set_viewport_size({"width": 400, "height": 900})
        visit.until("document.documentElement.scrollWidth <= 400")
        visit.shoot("narrow")
        visit.close()
    finally:
        training.terminate()
        training.wait(60)


def test_the_token_is_asked_for_and_jobs_may_go(
    browser: Any, served: Callable[..., str], memory: Path, tmp_path: Path
) -> None:
    jobs = [job_in(memory, Path("/runs") / name) for name in ("one", "two")]
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    visit = Visit(browser, served("--token-file", token))
    field = visit.page.get_by_label("Token of the file")
    field.fill("not-the-right-one")
    field.press("Enter")
    visit.until("document.getElementById('live').innerText === 'this is not the token'")
    field.fill("0123456789abcdef")
    field.press("Enter")
    visit.wait("#jobs tbody tr:nth-child(2)")
    for job in jobs:
        assert job.remove()
    visit.page.get_by_text("no jobs have memory on this node").wait_for(timeout=WITHIN)
    visit.context.close()
    assert visit.wrong and all("401" in one for one in visit.wrong), visit.wrong


def tell(command: str, root: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "rekindle", command, str(root), "--json"], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def train(root: Path, memory: Path, step: int) -> tuple[StatusPage, Lock, Lock]:
    """A job whose only rank is this process, which is its agent, too."""
    job = job_in(memory, root)
    rank, agent = job.lock_rank(0, 5.0), Lock(job.paths.agent_lock)
    assert agent.acquire()
    page = StatusPage(job.paths.status_page(0), 1)
    page.phase, page.step, page.snapshot = STABLE, step, step
    page.write()
    job.notes.write_durable(step - step % 50)
    return page, rank, agent


def test_a_hundred_jobs_are_listed_and_found(browser: Any, served: Callable[..., str], memory: Path) -> None:
    runs = Path("/runs")  # of which nothing is on storage
    held = [train(runs / f"llm-{number:03d}", memory, 1000 + 17 * number) for number in range(96)]
    for number in range(96, 100):
        remember(job_in(memory, runs / f"llm-{number:03d}"), 40 + number)
    visit = Visit(browser, served())
    visit.wait("#jobs tbody tr:nth-child(100)")
    first = visit.page.inner_text("#jobs tbody tr:first-child")
    assert "only in memory" in first and "llm-096" in first  # those with alarms come first
    assert "100 of 100 jobs, 4 with alarms" in visit.page.inner_text("main")
    held[0][0].step = 2000
    held[0][0].write()
    visit.wait('#jobs tbody tr:has-text("llm-000"):has-text("2,000")')
    visit.shoot("jobs", whole=False)
    search = visit.page.get_by_label("Show jobs by part of a name")
    search.fill("llm-04")
    visit.until("document.querySelectorAll('#jobs tbody tr').length === 10")
    search.fill("")
    visit.wait("#jobs tbody tr:nth-child(100)")
    visit.page.get_by_role("link", name="llm-097").focus()
    visit.page.keyboard.press("Enter")
    visit.wait(".alarms li")
    assert "/runs/llm-097" in visit.page.inner_text("h1")
    visit.page.go_back()
    visit.wait("#jobs tbody tr:nth-child(100)")
    visit.close()
    for _, rank, agent in held:
        rank.release()
        agent.release()
