"""A real job that chooses its intervals, is killed, and is advised: from its first step to the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rekindle.cli.main import main
from rekindle.memory.incidents import read_incidents
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.prices import read_pause
from rekindle.storage.posix import PosixStore
from tests.faults.harness import wait_for

_TRAIN = """
import sys, time, torch, rekindle
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
ckpt = rekindle.Checkpointer(sys.argv[1], state, snapshot_every="auto", persist_every="auto", persist_seconds=1)
step = ckpt.restore()
with ckpt.guard():
    while True:
        step += 1
        optimizer.zero_grad()
        model(torch.randn(64, 1000)).square().mean().backward()
        optimizer.step()
        ckpt.step(step)
"""


@pytest.mark.campaign(seconds=30)
def test_a_job_measures_itself_chooses_and_is_advised_also_after_a_kill(root: Path, memory: Path) -> None:
    job = JobDir.of(root, memory_base())

    def train() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", _TRAIN, str(root)])

    def advice() -> Any:
        told = CliRunner().invoke(main, ["advise", str(root), "--json"])
        return dict(json.loads(told.stdout)) if told.exit_code == 0 else {}

    first = train()
    try:
        wait_for(lambda: read_pause(job) is not None, 90, "the agent has chosen a pause")
        live = wait_for(lambda: "storage" in (found := advice()) and found, 60)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait(60)
    assert live["history"]["faults"] == 0 and live["storage"]["cost"] >= 0 and live["snapshots"]["now"]
    again = train()
    try:
        # The agent writes the first half of the record, and the next start the rest.
        record = wait_for(lambda: next((one for one in read_incidents(job) if one.outage is not None), None), 60)
        struck = advice()
    finally:
        os.kill(again.pid, signal.SIGKILL)
        again.wait(60)
    assert struck["history"]["faults"] == 1 and record.restored_step >= 0
    assert record.cause == "signal" and record.prices["drain"] > 0, "the start that ended has left its prices"
    assert struck["snapshots"]["measured"] and struck["prices"]["drain"] > 0
    assert len(PosixStore(root).published()) >= 1
