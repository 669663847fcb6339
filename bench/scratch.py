"""Holds a benchmark's directories and processes: whatever happens, neither outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from task import Task

from rekindle.memory.job_dir import JobDir

__all__ = ["Failed", "Scratch", "scratch"]

_HERE = Path(__file__).resolve().parent
_LIMIT = 1800.0
"""Seconds after which a worker counts as hung."""


class Failed(Exception):
    """A worker ended badly; the text says how."""


class Scratch:
    """A directory on the disk under test, one in memory, and an id that what others leave in /dev/shm is known by."""

    def __init__(self, target: Path, memory: Path) -> None:
        self.target, self.memory = target, memory
        self._id = f"rekindle-bench-{os.getpid()}"
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self, task: Task, place: str = "memory") -> Any:
        """Returns the result of a worker whose memory store is the directory ``place``. Raises Failed."""
        return self.run_ranks(task, 1, place)[0]

    def run_ranks(self, task: Task, world: int, place: str = "memory") -> list[Any]:
        """Returns the results of the workers of ``world`` ranks, which run at the same time. Raises Failed."""
        results = [self.target / f"result-{rank}" for rank in range(world)]
        for path in results:
            path.unlink(missing_ok=True)
        try:
            for rank, path in enumerate(results):
                self._start(replace(task, result=str(path)), place, rank, world)
            return [self._finish(*pair) for pair in zip(list(self._running), results, strict=True)]
        finally:
            self.kill()

    def _start(self, task: Task, place: str, rank: int, world: int) -> None:
        """A worker in a session of its own, so that all that it starts can be ended with it."""
        (self.memory / place).mkdir(exist_ok=True)
        command = [sys.executable, str(_HERE / "worker.py"), json.dumps(asdict(task))]
        own = {"REKINDLE_MEMORY": str(self.memory / place), "TORCHELASTIC_RUN_ID": self._id, "TMPDIR": str(self.target)}
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        with Path(f"{task.result}.err").open("w") as errors:
            process = subprocess.Popen(
                command,
                env={**os.environ, **own, **(ranks if world > 1 else {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        self._running.append(process)

    def _finish(self, process: subprocess.Popen[bytes], result: Path) -> Any:
        try:
            process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            raise Failed(f"no end after {_LIMIT:.0f} s") from None
        if process.returncode not in (0, -signal.SIGKILL) or not result.exists():
            said = Path(f"{result}.err").read_text(errors="replace").strip()
            raise Failed(f"ended with {process.returncode}:\n{said[-4000:]}")
        return json.loads(result.read_bytes())

    def kill(self) -> None:
        """End all workers, and helpers that they have left running."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running.clear()
        self._forget_segments()

    def _forget_segments(self) -> None:
        """DLRover leaves its shared memory and its sockets behind."""
        for path in Path("/dev/shm").glob(f"{self._id}*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(Path("/tmp/ckpt_sock") / self._id, ignore_errors=True)

    def agents(self) -> list[int]:
        """Process ids of the agents of all jobs."""
        found = [JobDir(job).agent() for base in self.memory.glob("*/rekindle-*") for job in base.iterdir()]
        return [pid for pid in found if pid is not None]

    def stop_agents(self) -> None:
        """End the agents of all jobs, and give their memory back."""
        for base in self.memory.glob("*/rekindle-*"):
            for job in base.iterdir():
                _stop_agent(JobDir(job))
            shutil.rmtree(base, ignore_errors=True)


def _stop_agent(job: JobDir) -> None:
    deadline = time.monotonic() + 10
    pid = job.agent()
    while pid is not None and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)
        pid = job.agent()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[Scratch]:
    """Temporary directories under ``directory`` and in the memory store's file system."""
    directory.mkdir(parents=True, exist_ok=True)
    base = os.environ.get("REKINDLE_MEMORY", "/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=directory) as target,
        tempfile.TemporaryDirectory(prefix="bench-", dir=base, ignore_cleanup_errors=True) as memory,
    ):
        place = Scratch(Path(target), Path(memory))
        try:
            yield place
        finally:
            place.kill()
            place.stop_agents()
