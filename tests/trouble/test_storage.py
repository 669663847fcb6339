"""Storage that hangs, crawls, is full, read-only or gone under a live job: real file systems in real trouble."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.catalog import find_copies
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import verify
from tests.faults.harness import Run, leftovers, traced, wait_for

REKINDLE = [sys.executable, "-m", "rekindle"]


@dataclass
class Troubled:
    """A mounted file system, and what it does."""

    path: Path
    control: Path
    server: int

    def do(self, what: str) -> None:
        """``hang``: who waits for it can still be killed, as with a server that is down."""
        os.kill(self.server, signal.SIGSTOP if what == "hang" else signal.SIGCONT)
        temporary = self.control.with_suffix(".tmp")
        temporary.write_text(what)
        temporary.replace(self.control)


@pytest.fixture
def troubled(tmp_path: Path) -> Iterator[Troubled]:
    if importlib.util.find_spec("fuse") is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("a file system in user space needs /dev/fuse, libfuse 2 and fusepy")
    backing, path, control = tmp_path / "backing", tmp_path / "mounted", tmp_path / "control"
    backing.mkdir()
    path.mkdir()
    command = [sys.executable, "-m", "tests.trouble.mount", str(backing), str(path), str(control)]
    server = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: os.path.ismount(path) or server.poll() is not None, what="the mount")
        if server.poll() is not None:
            pytest.skip(f"can't be mounted: {server.stderr.read() if server.stderr else ''}")
        yield Troubled(path, control, server.pid)
    finally:
        server.kill()  # whoever waits for it gets an error
        server.wait()
        subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)


def steps(run: Run) -> int:
    return sum(what == "step" for what, _ in traced(run)) if run.trace(0).exists() else 0


def durable(root: Path) -> list[int]:
    return [copy.step for copy in find_copies(None, PosixStore(root))]


def told(job: JobDir) -> str:
    return job.notes.drain_error()


def ask(*arguments: object, timeout: float = 40) -> subprocess.CompletedProcess[str]:
    """A command that must end by itself."""
    command = [*REKINDLE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.campaign(seconds=30)
def test_storage_that_hangs_holds_nobody_up_and_gets_all_once_it_answers(troubled: Troubled, memory: Path) -> None:
    import torch

    import rekindle

    root = troubled.path / "run"
    job = JobDir.of(root, memory_base(memory))
    weights = torch.zeros(1000)
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(weights=weights)}, memory=memory, persist_seconds=0)
    ckpt.restore()
    ckpt.save(1, wait="durable", timeout=30)
    agent = wait_for(lambda: job.agent())
    troubled.do("hang")
    began = time.monotonic()
    for step in range(2, 200):
        weights.fill_(step)
        ckpt.step(step)
    assert time.monotonic() - began < 20, "no step waits"
    wait_for(lambda: "storage does not answer" in told(job), what="an alarm")
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, what, root, *how) for what, *how in (["status"], ["ls"], ["stop", "--timeout", "2"])]
        began = time.monotonic()
        with pytest.raises(rekindle.NotDurableError, match="storage does not answer"):
            ckpt.close(timeout=1)
        assert time.monotonic() - began < 10
        status, listed, stopped = (future.result() for future in asked)
    assert status.returncode != 0 and "see that its server is up" in status.stderr
    assert listed.returncode == 1 and "does not answer within 10 s" in listed.stderr
    assert stopped.returncode in (7, 8), "a trainer was there, or storage did not take it"
    os.kill(agent, signal.SIGTERM)
    wait_for(lambda: job.agent() is None, what="the agent to give up")
    stopped = ask("stop", root, "--timeout", "2")
    assert stopped.returncode == 8 and "is not on storage" in stopped.stderr
    troubled.do("")
    stopped = ask("stop", root)
    assert stopped.returncode == 0, stopped.stderr
    assert durable(root)[0] == 199 and not job.path.exists() and leftovers(root) == []
    assert all(verify(copy) == [] for copy in find_copies(None, PosixStore(root)))


@pytest.mark.campaign
def test_with_storage_hanging_and_no_memory_a_job_still_ends(
    troubled: Troubled, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
import os, signal, time, torch, rekindle, logging
from rekindle.save import to_storage
logging.basicConfig()
to_storage._WRITE_TIMEOUT = 2.0
weights = torch.zeros(1000)
state = {{"v": rekindle.Values(w=weights)}}
ckpt = rekindle.Checkpointer({str(troubled.path / "run")!r}, state, memory_limit=1, persist_seconds=0)
ckpt.restore()
ckpt.save(1, wait="durable")
time.sleep(1)  # what the server has taken and not answered no signal ends, SIGKILL neither
os.kill({troubled.server}, signal.SIGSTOP)
began = time.monotonic()
for step in range(2, 50):
    ckpt.step(step)
assert time.monotonic() - began < 10
try:
    ckpt.close(timeout=1)
except rekindle.NotDurableError as error:
    print("close:", error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "close: storage has not taken the last checkpoint" in done.stdout, done.stderr
    troubled.do("")


@pytest.mark.parametrize(
    "trouble",
    ["slow", "eio", "halves"],
)
@pytest.mark.campaign(seconds=5)
def test_storage_in_trouble_for_a_while(trouble: str, troubled: Troubled, memory: Path, tmp_path: Path) -> None:
    import torch

    import rekindle

    root = troubled.path / "run"
    job = JobDir.of(root, memory_base(memory))
    weights = torch.zeros(100_000)
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(weights=weights)}, memory=memory, persist_seconds=0)
    ckpt.restore()
    ckpt.save(1, wait="durable", timeout=30)
    troubled.do(trouble)
    step, began = 1, time.monotonic()
    while time.monotonic() - began < 2:
        step += 1
        weights.fill_(step)
        ckpt.step(step)
        time.sleep(0.005)
    if trouble == "eio":
        assert "look at the disk" in wait_for(lambda: told(job), what="an alarm")
        assert [verify(copy) for copy in find_copies(None, PosixStore(root))] == [[]], (
            "what was durable is, and no more"
        )
    troubled.do("")
    ckpt.close(timeout=30)
    assert ckpt.metrics.failed == 0
    wait_for(lambda: not job.path.exists())
    assert durable(root)[0] == step and leftovers(root) == []
    assert all(verify(copy) == [] for copy in find_copies(None, PosixStore(root)))


def disk_image(tmp_path: Path, kind: str) -> Path:
    image = tmp_path / f"{kind}.img"
    size = {"ext4": 24, "xfs": 320}[kind] << 20
    with open(image, "wb") as file:
        file.truncate(size)
    make = shutil.which(f"mkfs.{kind}")
    if make is None:
        pytest.skip(f"there is no mkfs.{kind}")
    subprocess.run([make, "-q", *(["-F"] if kind == "ext4" else ["-f"]), str(image)], check=True)
    return image


@pytest.mark.parametrize("kind", ["ext4", pytest.param("xfs", marks=pytest.mark.campaign)])
def test_a_disk_that_fills_up_becomes_read_only_and_heals(
    kind: str, tmp_path: Path, memory: Path, mounted: Callable[..., Path]
) -> None:
    import torch

    import rekindle

    disk = mounted("disk", "-o", "loop", str(disk_image(tmp_path, kind)))
    root = disk / "run"
    job = JobDir.of(root, memory_base(memory))
    weights = torch.zeros(250_000)
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(weights=weights)}, memory=memory, persist_seconds=0)
    ckpt.restore()
    ckpt.save(1, wait="durable", timeout=30)

    def go_on(step: int, until: Callable[[], object]) -> int:
        deadline = time.monotonic() + 20
        while not until():
            assert time.monotonic() < deadline, told(job)
            step += 1
            weights.fill_(step)
            ckpt.step(step)
            time.sleep(0.01)
        return step

    ballast = disk / "ballast"
    with suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 65536)
    step = go_on(1, lambda: "No space left on device: make room there" in told(job))
    ballast.unlink()
    step = go_on(step, lambda: not told(job) and durable(root)[:1] > [step])
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=False)
    if not os.statvfs(disk).f_flag & os.ST_RDONLY:  # busy: the drain is writing; at the next attempt it isn't
        wait_for(lambda: subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=False).returncode == 0)
    step = go_on(step, lambda: "mount it writable again" in told(job))
    assert durable(root), "it can still be read"
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    step = go_on(step, lambda: not told(job) and durable(root)[0] > step)
    ckpt.close(timeout=30)
    assert ckpt.metrics.failed == 0
    wait_for(lambda: not job.path.exists())
    assert durable(root)[0] == step and leftovers(root) == []
    assert all(verify(copy) == [] for copy in find_copies(None, PosixStore(root)))
