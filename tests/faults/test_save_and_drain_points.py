"""SIGKILL at every named point of a save and of a drain: nothing complete is lost, nothing torn is offered."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rekindle.cli.main import main
from rekindle.common.failpoints import POINTS
from rekindle.memory.job_dir import JobDir
from tests.faults.harness import Run, digest_of, finish, leftovers, restored, start, train, wait_for

KILLED = -9


def verified(root: Path, memory: Path) -> bool:
    result = CliRunner().invoke(main, ["verify", str(root), "--memory", str(memory)])
    return result.exit_code == 0


def ended(job: JobDir) -> bool:
    """Wait until the agent has tidied up and left."""
    wait_for(lambda: not job.path.exists(), what="the job's memory to be given back")
    return True


def agent_died(job: JobDir) -> None:
    log = job.paths.agent_log
    wait_for(lambda: log.exists() and "serves" in log.read_text(), what="the agent to come up")
    wait_for(lambda: job.agent() is None, what="the agent to die at its point")
    assert not re.search(r"agent \d+ ends", log.read_text()), "the agent ended of its own accord"


@pytest.mark.parametrize("point", POINTS["save"])
def test_trainer_killed_in_a_save(
    point: str, root: Path, memory: Path, job: JobDir, unbroken: Callable[[Run], list[str]]
) -> None:
    run = Run(root, memory, steps=8)
    assert train(Run(root, memory, steps=8, points={0: f"{point}@5"})) == [KILLED]
    assert verified(root, memory)
    assert train(run) == [0], run.log(0).read_text()
    # Step 5 counts only from the moment its receipt has its name; step 4 must be there whatever happened to 5.
    assert restored(run) == [0, 5 if point == "save.committed" else 4]
    assert [digest_of(run)] == unbroken(run)
    assert verified(root, memory)
    assert ended(job) and leftovers(root, memory) == []


@pytest.mark.parametrize("point", [p for p in POINTS["drain"] if p not in ("drain.aside", "drain.prune")])
def test_agent_killed_in_a_drain(
    point: str, root: Path, memory: Path, job: JobDir, unbroken: Callable[[Run], list[str]]
) -> None:
    run = Run(root, memory, steps=8)
    dying = Run(root, memory, steps=8, points={0: "save.committed@5"}, agent_point=f"{point}@5")
    processes = start(dying)
    assert finish(processes) == [KILLED]
    agent_died(job)
    assert verified(root, memory)
    assert train(run) == [0], run.log(0).read_text()
    assert restored(run) == [0, 5]
    assert [digest_of(run)] == unbroken(run)
    assert verified(root, memory)
    assert ended(job) and leftovers(root, memory) == []


@pytest.mark.parametrize("point", ["drain.started", "drain.copying", "drain.shard", "drain.manifest"])
def test_a_new_agent_goes_on_from_the_files(point: str, root: Path, memory: Path, job: JobDir) -> None:
    dying = Run(root, memory, points={0: "save.committed@5"}, agent_point=f"{point}@5")
    processes = start(dying)
    assert finish(processes) == [KILLED]
    agent_died(job)
    result = CliRunner().invoke(main, ["stop", str(root), "--memory", str(memory)])
    assert result.exit_code == 0, result.output
    assert not job.path.exists()
    assert (root / "step-0000000005" / "checkpoint.json").exists()
    assert verified(root, memory)
    assert leftovers(root) == []


def test_agent_killed_while_it_removes_a_surplus_checkpoint(root: Path, memory: Path, job: JobDir) -> None:
    assert train(Run(root, memory, steps=3, options={"keep": 3}, wait="durable")) == [0]
    dying = Run(root, memory, steps=4, points={0: "save.committed@4"}, agent_point="drain.prune", options={"keep": 1})
    processes = start(dying)
    assert finish(processes) == [KILLED]
    agent_died(job)
    assert any(not (p / "checkpoint.json").exists() for p in root.glob("step-*")), "it died before it removed anything"
    assert verified(root, memory)
    run = Run(root, memory, steps=5, options={"keep": 1})
    assert train(run) == [0]
    assert restored(run)[-1] == 4
    assert ended(job) and [p.name for p in root.glob("step-*")] == ["step-0000000005"]


def test_agent_killed_while_it_moves_an_older_incarnations_step_aside(root: Path, memory: Path, job: JobDir) -> None:
    assert train(Run(root, memory, steps=6, options={"keep": 9}, wait="durable")) == [0]
    first = root / "step-0000000006" / "shard-00000-of-00001.json"
    before = first.read_bytes()
    dying = {0: "save.committed@6"}  # before any other step, behind which the agent would remove the older one
    again = Run(root, memory, 6, points=dying, agent_point="drain.aside", restore_step=5, options={"keep": 9})
    processes = start(again)
    assert finish(processes) == [KILLED]
    agent_died(job)
    assert leftovers(root), "it died before it moved anything aside"
    assert verified(root, memory)
    run = Run(root, memory, steps=7, options={"keep": 9})
    assert train(run) == [0]
    assert restored(run)[-1] == 6, "the step of the later incarnation, from memory or from its unnamed directory"
    assert ended(job) and leftovers(root, memory) == []  # the agent, which names what was left unnamed, has gone
    assert first.read_bytes() != before
