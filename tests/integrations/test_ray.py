"""The example for Ray on two raylets: a worker that is killed costs nothing but the time to start all of them again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from rekindle.format.names import receipt_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.listing import list_values
from tests.faults.harness import end_agent, wait_for
from tests.integrations.environments import REPO, environment

STEPS, KILLED_AFTER = 200, 30
LONG = 120.0
"""Seconds that a start of Ray, or of all workers, may take on processors that have other work."""

pytestmark = [pytest.mark.campaign(seconds=55), pytest.mark.timeout(1800)]


class Cluster:
    """Two raylets with a processor each. Each has a memory store on a file system of its own, which makes it a node."""

    def __init__(self, place: Path, memories: list[Path]) -> None:
        self.bin = Path(environment("ray")).parent
        self.place, self.memories = place, memories
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        # Names of sockets are short, and those that Ray makes below this are long.
        self.temporary = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self._raylets: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        head = ("--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.temporary}")
        self._raylets.append(self._start_raylet(self.memories[0], *head))
        wait_for(self._answers, LONG, "Ray's first node does not answer")
        self._raylets.append(self._start_raylet(self.memories[1], f"--address=127.0.0.1:{self.port}"))

    def _start_raylet(self, memory: Path, *options: str) -> subprocess.Popen[bytes]:
        alike = ("--block", "--num-cpus=1", "--object-store-memory=80000000", "--node-ip-address=127.0.0.1")
        ports = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0")
        with open(self.place / "raylets.log", "ab") as log:
            return subprocess.Popen(
                [str(self.bin / "ray"), "start", *options, *alike, *ports],
                env=self._environment(REKINDLE_MEMORY=str(memory)),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _environment(self, **more: str) -> dict[str, str]:
        path = f"{self.bin}:{os.environ['PATH']}"
        ours = {"PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "PATH": path}
        return {**os.environ, **ours, "RAY_DEDUP_LOGS": "0", "RAY_ADDRESS": f"127.0.0.1:{self.port}", **more}

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def train(self, root: Path) -> subprocess.Popen[bytes]:
        """Starts the example, whose output goes to a file."""
        command = [str(self.bin / "python"), str(REPO / "examples/ray/train.py"), str(root), f"--steps={STEPS}"]
        with self.output(root).open("wb") as output:
            return subprocess.Popen(
                command, env=self._environment(), stdout=output, stderr=output, cwd=self.place, start_new_session=True
            )

    def output(self, root: Path) -> Path:
        return self.place / f"{root.name}.out"

    def jobs(self, root: Path) -> list[JobDir]:
        """The job's memory on each node."""
        return [JobDir.of(str(root), memory_base(memory)) for memory in self.memories]

    def end(self) -> None:
        for raylet in self._raylets[::-1]:
            raylet.terminate()  # and it ends the others of its node
            with suppress(subprocess.TimeoutExpired):
                raylet.wait(45)
            with suppress(ProcessLookupError):
                os.killpg(raylet.pid, signal.SIGKILL)
            raylet.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)


@pytest.fixture
def cluster(tmp_path: Path, memory: Path) -> Iterator[Cluster]:
    (other := tmp_path / "memory").mkdir(mode=0o700)
    if other.stat().st_dev == memory.stat().st_dev:
        pytest.skip("temporary files lie on the file system of the memory store: see pytest's --basetemp")
    made = Cluster(tmp_path, [memory, other])
    try:
        made.start()
        yield made
    finally:
        made.end()
        for directory in other.glob("rekindle-*/*"):
            end_agent(JobDir(directory))


def content(root: Path) -> dict[str, Any]:
    """All tensors and values of the last step, but those of generators that the example doesn't seed."""
    found: dict[str, Any] = {}
    for rank in range(2):
        path = root / step_dir(STEPS) / receipt_name(rank, 2)
        tensors = load_file(path.with_suffix(".safetensors"))
        found |= {f"{name} of rank {rank}": (t.dtype, t.shape, t.tobytes()) for name, t in tensors.items()}
        values = list_values(Receipt.decode(path.read_bytes(), path))
        found |= {f"{name} of rank {rank}": value for name, value in values}
    return {name: value for name, value in found.items() if not name.startswith(("rng.python", "rng.numpy"))}


def finished(cluster: Cluster, root: Path, during: Callable[[], None] = lambda: None) -> str:
    """Trains to the end. Returns the output."""
    driver = cluster.train(root)
    try:
        during()
        code = driver.wait(5 * LONG)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    text = cluster.output(root).read_text()
    assert code == 0, text
    return text


def test_a_killed_worker_costs_no_step(cluster: Cluster, tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    finished(cluster, unbroken)
    jobs, reached = cluster.jobs(broken), list[int]()

    def newest() -> int:
        return min(max((stamp.step for stamp, _ in job.snapshots.shard_ids()), default=0) for job in jobs)

    def kill() -> None:
        wait_for(lambda: newest() >= KILLED_AFTER, LONG, "no steps are made on both nodes")
        one, other = (job.trainers() for job in jobs)
        assert sorted([*one, *other]) == [0, 1] and len(one) == 1, "Ray has put a worker on each node"
        reached.append(newest())
        os.kill({**one, **other}[1], signal.SIGKILL)

    text = finished(cluster, broken, kill)
    restored = {int(step) for step in re.findall(r"\[\d\] restored step (\d+) from memory", text)}
    assert len(restored) == 1 and reached[0] <= restored.pop() < STEPS, text
    wait_for(lambda: not any(job.path.exists() for job in jobs), what="memory is not given back at the end")
    assert content(broken) == content(unbroken)
