"""Records of incidents that real faults have left: what is in them, and that they outlive the job."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.memory.incident import MOMENTS, Incident
from rekindle.memory.job_dir import JobDir
from rekindle.storage.incidents import load_incidents
from rekindle.storage.posix import PosixStore
from tests import forked
from tests.faults.cluster import Cell, run
from tests.faults.harness import finish
from tests.fork_server import context

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def recorded(root: Path) -> list[Incident]:
    found, problems = load_incidents(PosixStore(root))
    assert problems == []
    return found


def in_order(moments: dict[str, float], *names: str) -> bool:
    return all(moments[earlier] <= moments[later] for earlier, later in pairwise(names))


@pytest.mark.parametrize("fault", ["kill", pytest.param("kill-two", marks=pytest.mark.campaign(seconds=8))])
def test_a_kill_leaves_a_record_that_outlives_the_job(fault: str, root: Path, memory: Path) -> None:
    cell = Cell(root, memory, fault=fault, moment="forward")
    out = run(cell)
    assert not cell.job.path.exists(), "the job's memory is still there"
    incident, end = recorded(root)
    # The harness may have collected the dead rank before the agent got a processor.
    assert incident.cause in ("signal", "exit") and (incident.rank == 1 or fault == "kill-two"), incident
    assert incident.step == out.reached and incident.restored_step == out.resumed, incident
    assert incident.lost == out.lost and incident.place == "memory" and incident.warm is False
    assert in_order(incident.moments, "noticed", "started", "formed", "restored", "first_step"), incident
    assert incident.moments["noticed"] <= incident.moments["gone"] <= incident.moments["formed"], incident
    if fault == "kill":  # the survivor
        assert in_order(incident.moments, "noticed", "secured", "gone"), incident
    assert incident.outage is not None and 0 < incident.outage <= out.again + 5
    assert incident.seconds is not None and incident.trained is not None and 0 < incident.trained < incident.seconds
    assert end.cause == "end" and end.step == cell.steps and end.began_at == out.resumed
    assert end.generation > incident.generation and end.start != incident.start


def test_a_hang_is_timed_from_the_last_progress(root: Path, memory: Path) -> None:
    run(Cell(root, memory, fault="stop", moment="forward"))
    incident = recorded(root)[0]
    # An agent that got no processor did not see the ranks go.
    assert incident.cause == "hang" and incident.rank == 1 and incident.moments.keys() >= {"fault", *MOMENTS} - {"gone"}
    part = incident.parts()["noticed"]
    assert part is not None and part > 1  # the least that guard(watchdog="fast") waits


def _die_before(step: int, root: Path, memory: Path, log: Path) -> None:
    logging.basicConfig(level=logging.INFO, filename=log, force=True, format="%(message)s")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(root, state, memory=memory, snapshot_every=10)
    first = ckpt.restore() + 1
    with ckpt.guard(watchdog=False) as guard:
        assert guard.connected(60)
        for n in range(first, step):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            ckpt.step(n)
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_restore_says_how_many_completed_steps_are_lost(root: Path, memory: Path, tmp_path: Path) -> None:
    logs = [tmp_path / name for name in ("first", "second")]
    for step, log in zip((15, 11), logs, strict=True):
        process = context.Process(target=_die_before, args=(step, root, memory, log))
        process.start()
        assert finish([process]) == [-9], log.read_text()
    first, second = (log.read_text() for log in logs)
    said = "step 14 was completed before the fault, and step 10 is restored: 4 completed step(s) are lost"
    assert said in second, second
    assert "are lost, and computed again" not in first


TRAINING = """
import os, signal, sys, torch, rekindle
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = torch.nn.Linear(2, 2)
ckpt = rekindle.Checkpointer(ROOT, {"model": model})
first = ckpt.restore() + 1
"""

STRUCK_TWICE = """
with ckpt.guard() as guard:
    assert guard.connected(60)
    for step in range(first, 10):
        if start == 0 and step == 5 or start == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ckpt.step(step)
ckpt.close()
"""

UNGUARDED = """
for step in range(first, 10):
    if start == 0 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    ckpt.save(step, wait="memory")
ckpt.close()
"""

THROUGH_DCP = """
import os, signal, torch, torch.distributed.checkpoint as dcp
from rekindle.integrations.dcp import RekindleReader, RekindleWriter
start, state = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), {"x": torch.zeros(2)}
if start:
    dcp.load(state, storage_reader=RekindleReader(ROOT))
writer = RekindleWriter(ROOT)
for step in (1, 2) if start == 0 else (3, 4):
    dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
if start == 0:
    os.kill(os.getpid(), signal.SIGKILL)
writer.close()
"""

NEVER_BACK = """
with ckpt.guard() as guard:
    assert guard.connected(60)
    for step in range(first, 10):
        if step == 5:
            ckpt.save(4, wait="durable")
            os.kill(os.getpid(), signal.SIGKILL)
        ckpt.step(step)
"""


def launch(text: str, root: Path, *options: str, code: int = 0) -> None:
    """Runs a script under the real launcher."""
    script = root.with_name("worker.py")
    script.write_text(text.replace("ROOT", repr(str(root))))
    done = forked.run("rekindle", "run", "--standalone", *options, script, timeout=170)
    assert done.returncode == code, done.stderr


@pytest.mark.campaign(seconds=20)
def test_a_second_fault_before_the_job_is_back_has_a_record_of_its_own(root: Path, memory: Path) -> None:
    launch(TRAINING + STRUCK_TWICE, root)
    first, second, end = recorded(root)
    # The launcher may have collected the dead rank before the agent got a processor.
    assert {first.cause, second.cause} <= {"signal", "exit"} and end.cause == "end"
    assert first.step == second.step == 4 and first.restored_step == second.restored_step == 4
    assert "restored" in first.moments and "first_step" not in first.moments and first.outage is None
    assert second.outage is not None
    assert in_order(second.moments, "noticed", "started", "formed", "restored", "first_step"), second
    assert in_order(second.moments, "noticed", "gone", "formed"), second
    assert first.moments["restored"] <= second.moments["noticed"]
    assert (first.starts, second.starts) == (1, 1) and second.began_at == 4


@pytest.mark.campaign(seconds=14)
def test_a_start_that_ended_before_its_ranks_had_met_is_counted(root: Path, memory: Path) -> None:
    head, tail = TRAINING.split("model =")
    script = head + "if start == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nmodel =" + tail
    launch(script + STRUCK_TWICE.replace(" or start == 1", ""), root)
    incident, _ = recorded(root)
    assert incident.starts == 2 and incident.outage is not None and incident.rank == 0


@pytest.mark.campaign(seconds=24)
def test_an_unguarded_job_is_recorded_by_its_launcher(root: Path, memory: Path) -> None:
    launch(TRAINING + UNGUARDED, root)
    incident, end = recorded(root)
    assert (incident.cause, incident.rank, incident.what) == ("signal", 0, "rank 0 was killed by SIGKILL")
    assert (incident.step, incident.restored_step, incident.lost) == (-1, 4, None) and end.step == 9
    assert in_order(incident.moments, "noticed", "gone", "started", "formed", "restored", "first_step")


@pytest.mark.campaign(seconds=16)
def test_a_job_that_saves_through_dcp_alone_is_timed_up_to_its_first_save(root: Path, memory: Path) -> None:
    launch(THROUGH_DCP, root)
    incident, end = recorded(root)
    assert (incident.cause, incident.rank, incident.what) == ("signal", 0, "rank 0 was killed by SIGKILL")
    assert (incident.step, incident.restored_step, incident.lost) == (-1, 2, None) and incident.starts == 1
    assert in_order(incident.moments, "noticed", "gone", "started", "formed", "first_step")
    assert "restored" not in incident.moments and incident.outage is not None
    assert (end.cause, end.began_at, end.step) == ("end", 2, 4)


@pytest.mark.campaign(seconds=12)
def test_a_job_that_does_not_come_back_leaves_a_record_too(root: Path, memory: Path, job: JobDir) -> None:
    launch(TRAINING + NEVER_BACK, root, "--max-restarts", "0", code=1)
    done = forked.run("rekindle", "stop", root, timeout=100)
    assert done.returncode == 0 and not job.path.exists(), done.stderr
    (incident,) = recorded(root)
    assert incident.cause in ("signal", "exit") and incident.step == 4 and incident.outage is None
    shown = forked.run("rekindle", "incidents", "--json", root, timeout=100)
    assert json.loads(shown.stdout)["totals"]["unrecovered"] == 1
