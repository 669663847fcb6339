"""What agents copy of a job's steps, and what becomes of the copies."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress

import pytest

from rekindle.storage.catalog import find_copies
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import verify
from tests.faults.harness import wait_for
from tests.nodes.cases import Unbroken
from tests.nodes.job import Job
from tests.nodes.lab import Lab, Node
from tests.nodes.train import Task


def copied(node: Node) -> list[list[str]]:
    """Names of the tensors in each copy that a node keeps."""
    found = []
    for path in node.inside(f"/dev/shm/rekindle-{os.getuid()}").glob("*/others/step-*/shard-*.json"):
        with suppress(FileNotFoundError):  # a newer one takes its place
            found.append([tensor["name"] for tensor in json.loads(path.read_text())["tensors"]])
    return found


def memory_of(node: Node) -> list[int]:
    """Bytes that each snapshot and each copy takes, and each slot that is free."""
    job = node.inside(f"/dev/shm/rekindle-{os.getuid()}")
    taken: dict[int, int] = {}
    for path in [*job.rglob("*.slot"), *job.rglob("*.safetensors")]:
        with suppress(FileNotFoundError):  # a save or a copy takes it
            found = path.stat()
            taken[found.st_ino] = found.st_blocks * 512
    return list(taken.values()) or [1]


@pytest.mark.campaign(seconds=30)
def test_ddp_without_guard_copies_what_each_rank_has_alone_and_outlives_a_node(unbroken: Unbroken, lab: Lab) -> None:
    here, lost = lab.add(), lab.add()
    with Job(lab, Task(str(lab.mount / "run"), str(lab.directory), "ddp", 2, 24, 0.2, guard=None)) as job:
        job.wait_for_safe()
        found = copied(here) + copied(lost)
        assert found and not any(name.startswith(("model", "optimizer")) for names in found for name in names), found
        safe = job.safe_steps()[-1]
        lost.kill()
        lab.add()
        job.wait_for_end()
        first = [row for row in job.rows("restored") if row["start"] == 1]
        assert min(row["step"] for row in first) >= safe and not [row for row in first if row["place"] == "storage"]
        digests = {(row["rank"], row["step"]): row["digest"] for row in job.rows("step")}
    assert digests == unbroken.digests("ddp", 2, 24)


@pytest.mark.campaign(seconds=59)
def test_what_was_safe_gets_to_storage_when_the_job_ends_with_the_loss_of_a_node(lab: Lab) -> None:
    lab.add()
    lost = lab.add()
    options = {"persist_every": 10**6}
    task = Task(str(lab.mount / "run"), str(lab.directory), "fsdp2", 2, 1000, 0.2, options, width=512)
    with Job(lab, task, starts=1) as job:
        job.wait_for_safe()
        enough, peak = job.safe_steps()[-1] + 20, 0.0
        while not job.reached(enough):
            files = memory_of(lost)
            peak = max(peak, sum(files) / max(files))
            time.sleep(0.02)
        assert 2.5 < peak < 6 * 1.05, "snapshots and copies, in sizes of one of them: what a rank has is all unique"
        safe = job.safe_steps()[-1]
        lost.kill()
        job.wait_for_failure()
        store = PosixStore(lab.storage / "run")
        assert store.published() == []
        wait_for(store.published, timeout=90, what="the step on storage")
        wait_for(lambda: store.durable(store.published()[0].stamp), what="its final name")
        (found,) = find_copies(None, store)
        assert found.step >= safe and verify(found) == []
