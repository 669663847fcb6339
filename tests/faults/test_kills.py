"""SIGKILL at random moments, of one rank or of all, under the real launcher; and of the agent."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.memory.job_dir import JobDir
from tests.faults.harness import Run, digest_of, finish, kill, leftovers, restored, start, traced, train, wait_for

KILLS = int(os.environ.get("REKINDLE_TEST_KILLS", "8"))
TRAINER = Path(__file__).with_name("launched.py")


@pytest.mark.timeout(600)
@pytest.mark.campaign(seconds=70)
def test_random_kills_lose_no_completed_step(
    root: Path, memory: Path, job: JobDir, unbroken: Callable[[Run], list[str]]
) -> None:
    """``REKINDLE_TEST_KILLS=20`` for more of them, ``REKINDLE_TEST_SEED`` for the same ones."""
    seed = int(os.environ.get("REKINDLE_TEST_SEED", time.time_ns() % 1_000_000))
    chance = random.Random(seed)
    print(f"REKINDLE_TEST_SEED={seed}")
    run = Run(root, memory, steps=10 * KILLS, world=2, pause=0.05)
    output = open(root.parent / "launcher.log", "wb")  # noqa: SIM115
    command = [sys.executable, "-m", "rekindle", "run", "--nproc-per-node", "2", "--monitor-interval", "0.1"]
    arguments = [str(TRAINER), str(root), str(memory), str(run.steps), str(run.pause)]
    launcher = subprocess.Popen([*command, *arguments], stdout=output, stderr=output, cwd=Path(__file__).parents[2])
    try:
        for number in range(KILLS):
            _kill_somebody(run, job, chance, starts=number + 1)
        assert launcher.wait(120) == 0, (root.parent / "launcher.log").read_text()[-3000:]
    finally:
        launcher.kill()
        output.close()
    for rank in (0, 1):
        starts = _starts(run, rank)
        assert len(starts) == KILLS + 1, f"rank {rank} started {len(starts)} times"
    for before in range(KILLS):
        # Ranks may be one step apart; a step counts as completed once the slower one has completed it.
        completed = min(_starts(run, rank)[before][1] for rank in (0, 1))
        resumed = {_starts(run, rank)[before + 1][0] for rank in (0, 1)}
        # The copy of the last one may have been under way: it is whole before the next update begins.
        assert len(resumed) == 1 and resumed <= {completed - 1, completed, completed + 1}, (
            f"kill {before}: completed {completed}, resumed from {resumed}"
        )
    assert [digest_of(run, rank) for rank in (0, 1)] == unbroken(run)
    wait_for(lambda: not job.path.exists(), what="the memory to be given back")
    assert leftovers(root, memory) == []


def _kill_somebody(run: Run, job: JobDir, chance: random.Random, starts: int) -> None:
    """Once this start has made progress, wait a random time and kill one rank, or all."""

    def progress() -> bool:
        return all(len(_starts(run, rank)) == starts and _starts(run, rank)[-1][2] > 0 for rank in (0, 1))

    wait_for(progress, 60, f"start {starts} to make a step")
    time.sleep(chance.uniform(0, 0.15))
    trainers = job.trainers()
    assert sorted(trainers) == [0, 1]
    victims = list(trainers.values()) if chance.random() < 0.5 else [trainers[chance.randrange(2)]]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


def _starts(run: Run, rank: int) -> list[tuple[int, int, int]]:
    """(step restored, last step completed, steps completed) of each start of a rank."""
    if not run.trace(rank).exists():
        return []
    found: list[tuple[int, int, int]] = []
    for what, value in traced(run, rank):
        if what == "restored":
            found.append((int(value), int(value), 0))
        elif what == "step":
            found[-1] = found[-1][0], int(value), found[-1][2] + 1
    return found


def test_two_incarnations_that_saved_the_same_step_are_never_mixed(
    root: Path, memory: Path, job: JobDir, unbroken: Callable[[Run], list[str]]
) -> None:
    # Nothing goes to storage while trainers live; who isn't killed has its shard in memory before it goes on.
    options = {"persist_every": 1000, "overlap": False}
    first = Run(root, memory, world=2, points={1: "save.copying@5"}, options=options)
    codes = finish(start(first))
    assert codes[1] == -9
    assert _ranks_in_memory(job, 5) == {0}
    second = Run(root, memory, world=2, points={0: "save.copying@5"}, options=options)
    assert train(second)[0] == -9
    shards = {stamp.rank: stamp.incarnation.generation for stamp, _ in job.snapshots.shard_ids() if stamp.step == 5}
    assert shards in ({1: 2}, {0: 1, 1: 2}), "half of step 5 by each incarnation, or only the second one's"
    third = Run(root, memory, world=2, options=options)
    assert train(third) == [0, 0], third.log(0).read_text()
    assert restored(third, 0) == restored(third, 1) == [0, 4, 4]
    skipped = "step 5 of generation 2 was skipped: incomplete: rank 0 of 2 has no shard of it (ended before"
    assert skipped in third.log(0).read_text()
    assert [digest_of(third, rank) for rank in (0, 1)] == unbroken(third)


def _ranks_in_memory(job: JobDir, step: int) -> set[int]:
    return {stamp.rank for stamp, _ in job.snapshots.shard_ids() if stamp.step == step}


def test_agent_killed_while_training_goes_on(
    root: Path, memory: Path, job: JobDir, unbroken: Callable[[Run], list[str]]
) -> None:
    run = Run(root, memory, steps=60, pause=0.05)
    processes = start(run)
    wait_for(run.trace(0).exists)
    killed: list[int] = []
    while len(killed) < 3 and len(traced(run)) < 50 and processes[0].is_alive():
        agent = job.agent()
        if agent and agent not in (processes[0].pid, *killed):  # the trainer drains a while if three did not stay
            kill(agent)
            killed.append(agent)
        time.sleep(0.3 if agent else 0.01)
    assert len(killed) > 1
    assert finish(processes) == [0]
    assert [digest_of(run)] == unbroken(run)
    wait_for(lambda: not job.path.exists(), what="the memory to be given back")


def test_agent_is_spared_by_a_kill_of_the_trainers_process_group_and_holds_no_torch(
    root: Path, memory: Path, job: JobDir
) -> None:
    run = Run(root, memory, steps=1000, pause=0.02, options={"idle_timeout": 600.0})
    processes = start(run)
    agent = wait_for(job.agent, what="an agent")
    wait_for(lambda: list(root.glob("step-*/checkpoint.json")), what="a durable step")
    status = Path(f"/proc/{agent}/status").read_text()
    resident = sum(int(re.findall(rf"{kind}:\s+(\d+) kB", status)[0]) for kind in ("RssAnon", "RssFile"))
    assert resident < 40_000, "more than 40 MB beside the shared memory"
    assert "torch" not in Path(f"/proc/{agent}/maps").read_text()
    assert os.getsid(agent) == agent
    assert os.getsid(processes[0].pid or 0) != agent
    kill(processes[0].pid or 0)
    assert finish(processes) == [-9]
    steps = sorted({stamp.step for stamp, _ in job.snapshots.shard_ids()})
    wait_for(lambda: (root / f"step-{steps[-1]:010d}").exists(), what="what memory holds to become durable")
    assert job.agent() == agent


def test_two_agents_never_serve_one_job(root: Path, memory: Path, job: JobDir) -> None:
    processes = start(Run(root, memory, steps=1000, pause=0.02))
    agent = wait_for(job.agent, what="an agent")
    second = subprocess.run([sys.executable, "-m", "rekindle.agent", str(job.path)], timeout=20, capture_output=True)
    assert second.returncode == 0
    assert job.agent() == agent
    kill(processes[0].pid or 0)
    finish(processes)


def test_without_an_agent_the_trainer_drains_in_a_thread_and_says_so_once(
    root: Path, memory: Path, job: JobDir, unbroken: Callable[[Run], list[str]]
) -> None:
    run = Run(root, memory, steps=60, pause=0.05, options={"fallback_after": 1.0}, executable="/bin/false")
    assert train(run) == [0], run.log(0).read_text()
    assert run.log(0).read_text().count("no agent on this node") == 1
    assert [digest_of(run)] == unbroken(run)
    assert (root / "step-0000000060").exists()


def test_saves_go_on_while_a_drain_stands_still(root: Path, memory: Path, job: JobDir) -> None:
    run = Run(root, memory, steps=300, pause=0.02, width=512)
    processes = start(run)
    agent = wait_for(job.agent, what="an agent")
    wait_for(lambda: job.notes.durable() or 0, what="a first durable step")
    # Stopped in the middle of a drain, or with one about to begin: its pin, if it has one, stays.
    os.kill(agent, signal.SIGSTOP)
    before = int(traced(run)[-1][1])
    wait_for(lambda: int(traced(run)[-1][1]) > before + 20, what="training to go on for 20 steps")
    files = [p for p in job.path.rglob("*") if p.suffix in (".safetensors", ".slot")]
    assert len(files) <= 3
    newest = max(stamp.step for stamp, _ in job.snapshots.shard_ids())
    assert newest >= before + 20
    os.kill(agent, signal.SIGCONT)
    assert finish(processes) == [0]
    assert (root / "step-0000000300").exists()
    assert ("metrics", '{"failed":0}') in traced(run)
