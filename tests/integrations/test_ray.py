"""The example for Ray on two raylets: a worker that is killed costs nothing but the time to start all of them again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.numpy import load_file

from rekindle.format.names import receipt_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.listing import list_values
from tests.faults.harness import end_agent, wait_for
from tests.integrations.environments import REPO
from tests.integrations.raylets import LONG, Cluster

STEPS, KILLED_AFTER = 200, 30

pytestmark = [pytest.mark.campaign(seconds=55), pytest.mark.timeout(1800)]


class Job(NamedTuple):
    """The example on two nodes of a cluster."""

    cluster: Cluster
    place: Path
    memories: list[Path]

    def train(self, root: Path) -> subprocess.Popen[bytes]:
        """Starts the example, whose output goes to a file."""
        python = str(self.cluster.bin / "python")
        command = [python, str(REPO / "examples/ray/train.py"), str(root), f"--steps={STEPS}"]
        with self.output(root).open("wb") as output:
            return subprocess.Popen(
                command,
                env=self.cluster.environment(),
                stdout=output,
                stderr=output,
                cwd=self.place,
                start_new_session=True,
            )

    def output(self, root: Path) -> Path:
        return self.place / f"{root.name}.out"

    def jobs(self, root: Path) -> list[JobDir]:
        """The job's memory on each node."""
        return [JobDir.of(str(root), memory_base(memory)) for memory in self.memories]


@pytest.fixture
def job(tmp_path: Path, memory: Path) -> Iterator[Job]:
    (other := tmp_path / "memory").mkdir(mode=0o700)
    if other.stat().st_dev == memory.stat().st_dev:
        pytest.skip("temporary files lie on the file system of the memory store: see pytest's --basetemp")
    cluster = Cluster(tmp_path)
    try:
        cluster.add(memory)
        cluster.add(other)
        yield Job(cluster, tmp_path, [memory, other])
    finally:
        cluster.end()
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


def finished(job: Job, root: Path, during: Callable[[], None] = lambda: None) -> str:
    """Trains to the end. Returns the output."""
    driver = job.train(root)
    try:
        during()
        code = driver.wait(5 * LONG)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    text = job.output(root).read_text()
    assert code == 0, text
    return text


def test_a_killed_worker_costs_no_step(job: Job, tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    finished(job, unbroken)
    nodes, reached = job.jobs(broken), list[int]()

    def newest() -> int:
        return min(max((stamp.step for stamp, _ in node.snapshots.shard_ids()), default=0) for node in nodes)

    def kill() -> None:
        wait_for(lambda: newest() >= KILLED_AFTER, LONG, "no steps are made on both nodes")
        one, other = (node.trainers() for node in nodes)
        assert sorted([*one, *other]) == [0, 1] and len(one) == 1, "Ray has put a worker on each node"
        reached.append(newest())
        os.kill({**one, **other}[1], signal.SIGKILL)

    text = finished(job, broken, kill)
    restored = {int(step) for step in re.findall(r"\[\d\] restored step (\d+) from memory", text)}
    assert len(restored) == 1 and reached[0] <= restored.pop() < STEPS, text
    wait_for(lambda: not any(node.path.exists() for node in nodes), what="memory is not given back at the end")
    assert content(broken) == content(unbroken)
