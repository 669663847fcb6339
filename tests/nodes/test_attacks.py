"""Attacks on a job of several nodes: on the copies that they keep of each other's steps, and on an agent's port."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rekindle.format.names import step_dir
from tests.nodes.cases import Unbroken
from tests.nodes.job import Job
from tests.nodes.lab import Lab, Node
from tests.nodes.outcome import observe
from tests.nodes.train import Task

_STEPS, _PAUSE = 24, 0.2


def damage_copies(node: Node) -> int:
    """Changes a byte of each copy that a node keeps. Returns their number."""
    found = list(node.inside(f"/dev/shm/rekindle-{os.getuid()}").glob("*/others/step-*/shard-*.safetensors"))
    for path in found:
        with open(path, "r+b") as file:
            file.seek(-5, os.SEEK_END)
            byte = file.read(1)
            file.seek(-5, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
    return len(found)


@pytest.mark.campaign(seconds=25)
def test_a_copy_that_was_damaged_is_passed_over_for_storage(unbroken: Unbroken, lab: Lab) -> None:
    here, lost = lab.add(), lab.add()
    task = Task(str(lab.mount / "run"), str(lab.directory), "fsdp2", 2, _STEPS, _PAUSE, {"persist_every": 10})
    stored = lab.storage / "run" / step_dir(10)
    with Job(lab, task) as job:
        job.wait_until(lambda: stored.exists() and max(job.safe_steps(), default=0) > 10, "copies newer than storage")
        struck = time.monotonic()
        lost.kill()
        job.wait_until(lambda: here.name in job.faults, "the loss to be known: nothing is copied any more")
        assert damage_copies(here) > 0
        lab.add()
        job.wait_for_end()
        out = observe(job, struck)
    assert "storage" in out.sources and "peer" not in out.sources and out.resumed == 10, out
    assert not out.differing and out.digests == unbroken.digests("fsdp2", 2, _STEPS)
    said = task.log(0).read_text()
    assert "differs from its checksum" in said, said[-3000:]


@pytest.mark.campaign(seconds=30)
@pytest.mark.parametrize(("before", "after", "index"), [(3, 2, 2), (3, 2, 0), (2, 3, 1)])
def test_a_job_that_comes_back_on_other_nodes_after_a_loss_goes_on_from_what_was_safe(
    lab: Lab, before: int, after: int, index: int
) -> None:
    """All ranks are killed, a node is lost, and another number of nodes goes on; then one more of them is lost."""
    place, traces = str(lab.mount / "run"), str(lab.directory)
    for _ in range(before):
        lab.add()
    with Job(lab, Task(place, traces, "fsdp2", before, 1000, _PAUSE), nodes=before, starts=1) as job:
        job.wait_for_safe()
        for rank in range(before):
            job.signal(rank)
        job.wait_for_failure()
        safe = job.safe_steps()[-1]
    lab.nodes[index].kill()
    while sum(node.alive for node in lab.nodes) < after:
        lab.add()
    with Job(lab, Task(place, traces, "fsdp2", after, safe + 60, _PAUSE), nodes=after) as job:
        job.wait_for_safe(beyond=safe, start=1)
        first = [row for row in job.rows("restored") if row["start"] == 1]
        assert min(row["step"] for row in first) >= safe, (safe, first)
        safe = job.safe_steps(1)[-1]
        job.node_of(0).kill()
        lab.add()
        job.wait_for_end()
        again = [row for row in job.rows("restored") if row["start"] > 1]
    assert min(row["step"] for row in again) >= safe, (safe, again)


@pytest.mark.campaign(seconds=30)
def test_two_jobs_on_the_same_nodes_keep_their_steps_apart(unbroken: Unbroken, lab: Lab, tmp_path: Path) -> None:
    lab.add()
    lost = lab.add()
    tasks = [Task(str(lab.mount / name), str(tmp_path / name), "fsdp2", 2, _STEPS, _PAUSE) for name in ("one", "two")]
    for task in tasks:
        Path(task.traces).mkdir()
    with Job(lab, tasks[0], port=29500) as one, Job(lab, tasks[1], port=29600) as two:
        for job in (one, two):
            job.wait_for_safe()
        struck = time.monotonic()
        lost.kill()
        lab.add()
        for job in (one, two):
            job.wait_for_end()
            out = observe(job, struck)
            assert not out.forgotten and not out.differing and "storage" not in out.sources, out
            assert out.digests == unbroken.digests("fsdp2", 2, _STEPS)


@pytest.mark.campaign(seconds=40)
@pytest.mark.parametrize("index", [0, 1])
def test_a_wait_for_other_nodes_ends_once_an_agent_that_dies_again_and_again_is_let_live(lab: Lab, index: int) -> None:
    hosts = [lab.add(), lab.add()]
    with Job(
        lab, Task(str(lab.mount / "run"), str(lab.directory), "fsdp2", 2, 14, _PAUSE, waits_at=10), starts=1
    ) as job:
        job.wait_for_step(8)
        until = time.monotonic() + 6.0
        while time.monotonic() < until:
            for pid in hosts[index].processes("rekindle.agent"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        job.wait_for_end()
    assert not any(job.faults.values()), job.log()
    waited = [row["safe"] for row in job.rows("step") if row["step"] == 10]
    assert waited == [10, 10], job.log()


@pytest.mark.campaign(seconds=30)
@pytest.mark.timeout(600)  # the flood takes a processor, and others may have the rest
def test_a_flood_of_an_agents_port_costs_a_job_that_trains_nothing(unbroken: Unbroken, lab: Lab) -> None:
    """From a third node, without the secret: connections by the thousand, silent, slow, of garbage, of wrong proofs."""
    here, _, stranger = lab.add(), lab.add(), lab.add()
    steps = 70
    with Job(lab, Task(str(lab.mount / "run"), str(lab.directory), "fsdp2", 2, steps, _PAUSE), starts=1) as job:
        job.wait_for_safe()
        (agent,) = here.processes("rekindle.agent")
        (record,) = here.inside(f"/dev/shm/rekindle-{os.getuid()}").glob("*/nodes.json")
        nodes = json.loads(record.read_text())
        at = nodes["nodes"][nodes["own"]]
        before, until = uses(agent), time.monotonic() + 4.0
        words = [sys.executable, "-I", "-S", str(Path(__file__).with_name("flood.py"))]
        command = stranger.command(*words, at["host"], str(at["port"]), nodes["start"])
        seen, safe = [], job.safe_steps()[-1]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flood:
            while time.monotonic() < until or job.safe_steps()[-1] < safe + 3:
                assert time.monotonic() < until + 60, "copies go on: they need no new connections"
                seen.append(uses(agent))
                time.sleep(0.05)
            done = json.loads(flood.communicate(timeout=60)[0])
        assert here.processes("rekindle.agent") == [agent]
        job.wait_for_end()
        out = observe(job, until)
    assert done["attempts"] > 2000 and len(done) == 7 and min(done.values()) > 20, done
    memory, files = (max(values) - former for values, former in zip(zip(*seen, strict=True), before, strict=True))
    assert 100 < files < 150 and memory < 64 << 20, "the limit of 128 was reached, and held"
    assert not any(job.faults.values()) and out.restarts == 0, job.log()
    assert out.digests == unbroken.digests("fsdp2", 2, steps)


def uses(pid: int) -> tuple[int, int]:
    """Bytes of memory, and open files, that a process has."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10, len(os.listdir(f"/proc/{pid}/fd"))
