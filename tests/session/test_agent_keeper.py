"""Agents that hold their place and do nothing are replaced; trainers with fewer rights than usual go on."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.agent.drain import Drainer
from rekindle.errors import FormatError
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.lock import Lock
from rekindle.session import agent_keeper
from rekindle.storage.posix import PosixStore
from tests.faults.harness import wait_for
from tests.stored import START, job_in, newest, remember

REPOSITORY = Path(__file__).parents[2]


def test_an_agent_that_is_stopped_is_replaced(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_keeper, "_SIGN_WITHIN", 2.0)
    weights = torch.zeros(1000)
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(weights=weights)}, memory=memory, persist_seconds=0)
    ckpt.restore()
    job = JobDir.of(root, memory_base(memory))
    ckpt.save(1, wait="durable", timeout=30)
    agent = job.agent()
    assert agent
    time.sleep(3)
    assert job.agent() == agent, "one that lives, and has nothing to do, gives signs"
    os.kill(agent, signal.SIGSTOP)
    step, until = 1, time.monotonic() + 100
    while job.agent() in (agent, None) or newest(root) < 5:
        assert time.monotonic() < until
        step += 1
        weights.fill_(step)
        ckpt.step(step)
        time.sleep(0.05)
    ckpt.close(timeout=30)
    assert [r.getMessage() for r in caplog.records if "no sign of life" in r.getMessage()] == [
        f"agent {agent} gave no sign of life for 2 s: it is killed, and another one is started"
    ]
    assert newest(root) == step and ckpt.metrics.failed == 0


HOLDS = """
import sys, time
from pathlib import Path
from rekindle.memory.lock import Lock
lock = Lock(Path(sys.argv[1]))
assert lock.acquire(5)
print("has it", flush=True)
time.sleep(60)
"""


def test_a_process_that_drains_in_an_agents_place_is_let_live(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """'rekindle stop' is such a one, and gives no signs."""
    monkeypatch.setattr(agent_keeper, "_SIGN_WITHIN", 0.5)
    ckpt = rekindle.Checkpointer(
        root, {"values": rekindle.Values(weights=torch.zeros(10))}, memory=memory, persist_seconds=0
    )
    ckpt.restore()
    job = JobDir.of(root, memory_base(memory))
    ckpt.save(1, wait="durable", timeout=30)
    # Until the agent is taken to stay: another one would be started in its place.
    keeper = ckpt._session.keeper
    assert keeper is not None
    wait_for(lambda: keeper._thread is None or not keeper._thread.is_alive())
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(job.paths.agent_lock)], stdout=subprocess.PIPE) as other:
        agent = job.agent()
        assert agent
        os.kill(agent, signal.SIGKILL)
        assert other.stdout is not None and other.stdout.readline()
        until = time.monotonic() + 3
        for step in range(2, 1000):
            ckpt.step(step)
            time.sleep(0.05)
            if time.monotonic() > until:
                break
        assert other.poll() is None and job.agent() == other.pid
        other.kill()
    ckpt.close(timeout=30)


def begin(root: Path, memory: Path, **options: Any) -> rekindle.Checkpointer:
    values = {"values": rekindle.Values(weights=torch.zeros(10))}
    ckpt = rekindle.Checkpointer(root, values, memory=memory, persist_seconds=0, **options)
    ckpt.restore()
    return ckpt


def refuse(store: PosixStore, *_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(store.root))


def test_who_waits_for_a_trainer_that_drains_itself_is_told_its_error(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "write_shard", refuse)
        ckpt = begin(root, memory, fallback_after=0.01)
        ckpt.step(1)
        job = JobDir.of(root, memory_base(memory))
        wait_for(job.notes.drain_error, 120)
        with pytest.raises(rekindle.NotDurableError, match="No space left on device: make room there"):
            ckpt.save(1, wait="durable", timeout=0.5)
    ckpt.close(timeout=120)
    assert newest(root) == 1


def test_its_error_is_told_again_after_an_agent_has_lived_meanwhile(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(agent_keeper, "_START_WITHIN", 0.1)
    monkeypatch.setattr(agent_keeper, "delays", lambda within: repeat(0.5))
    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "write_shard", refuse)
        ckpt = begin(root, memory, fallback_after=0.01)
        ckpt.step(1)
        job = JobDir.of(root, memory_base(memory))
        error = wait_for(job.notes.drain_error, 60)
        job.notes.write_agent_status({"pid": 1, "error": None, "waits": None})  # as an agent leaves it
        assert wait_for(job.notes.drain_error, 60) == error
    ckpt.close(timeout=120)
    assert newest(root) == 1


@pytest.mark.parametrize("damage", [b"\0" * 20, b"", b"[]", b'{"root": 5}'])
def test_a_jobs_description_that_is_damaged_is_written_again(damage: bytes, root: Path, memory: Path) -> None:
    ckpt = begin(root, memory)
    ckpt.save(1, wait="durable", timeout=60)
    job = JobDir.of(root, memory_base(memory))
    job.paths.job.write_bytes(damage)
    ckpt.save(2, wait="durable", timeout=60)  # also by an agent that had read the description just before
    steps = count(3)

    def is_written() -> bool:
        ckpt.step(next(steps))  # looks at the description, at most twice a second: the save may have come too soon
        with suppress(FormatError):
            info = job.read_job()
            return info is not None and info.root == str(root)
        return False

    wait_for(is_written, 60)
    ckpt.close(timeout=60)
    assert newest(root) == next(steps) - 1


def test_a_directory_in_place_of_a_jobs_description_is_named(root: Path, memory: Path) -> None:
    ckpt = begin(root, memory)
    ckpt.save(1, wait="durable", timeout=60)
    job = JobDir.of(root, memory_base(memory))
    job.paths.job.unlink()
    job.paths.job.mkdir()
    wait_for(lambda: str(job.paths.job) in job.notes.drain_error(), 60)
    with pytest.raises(rekindle.NotDurableError, match=r"nothing is drained until .*/job.json: is not a regular file"):
        ckpt.save(2, wait="durable", timeout=0.5)
    job.paths.job.rmdir()
    ckpt.save(3, wait="durable", timeout=60)
    job.paths.job.unlink()
    job.paths.job.mkdir()
    with pytest.raises(rekindle.MemoryStoreError, match=f"{job.paths.job}: Is a directory: .*: remove it"):
        begin(root, memory)
    job.paths.job.rmdir()
    again = begin(root, memory)
    again.close(timeout=60)


def test_a_deleted_root_is_told_of_once_whoever_makes_it_anew(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One agent fails at that, and the next one does it with a newer step."""
    job = job_in(memory, root)
    info = job.read_job()
    assert info is not None
    keeper = agent_keeper.AgentKeeper(job, replace(info, start=START.id))

    def drain(step: int) -> bool:
        remember(job, step)
        drainer = Drainer(job)
        done = drainer.tick()
        job.notes.write_agent_status({"pid": os.getpid(), **asdict(drainer.progress)})
        assert keeper.pass_on_report()
        return done

    def told() -> list[str]:
        return [line.rpartition("step ")[2] for line in caplog.messages if "is made anew" in line]

    trainer, agent = job.lock_rank(0, 5.0), Lock(job.paths.agent_lock)
    try:
        assert agent.acquire(5.0) and drain(1) and not told()
        shutil.rmtree(root)
        with monkeypatch.context() as patch:
            patch.setattr(PosixStore, "write_shard", refuse)
            assert not drain(2) and told() == ["2 is its oldest checkpoint now"]
        assert drain(3) and len(told()) == 1
        shutil.rmtree(root)
        assert drain(4) and told()[1:] == ["4 is its oldest checkpoint now"], "it is deleted again"
    finally:
        agent.release()
        trainer.release()


@pytest.fixture
def as_somebody() -> Iterator[Callable[[str], subprocess.CompletedProcess[str]]]:
    """Runs a script as a user without rights, in a directory of their own. They may have no right to start an agent."""
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    place = Path(tempfile.mkdtemp(prefix="rekindle-test-"))
    os.chown(place, 54321, 54321)

    def run(script: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "REKINDLE_MEMORY": str(place / "memory")}
        command = [sys.executable, "-c", BEGIN + textwrap.dedent(script), str(place)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False, cwd=place)

    yield run
    shutil.rmtree(place, ignore_errors=True)


BEGIN = """
import os, resource, signal, sys, threading, time
from pathlib import Path
import torch, rekindle
from rekindle.memory.job_dir import JobDir, memory_base
place = Path(sys.argv[1])
warm = rekindle.Checkpointer(place / "warm", {"values": rekindle.Values(w=torch.zeros(2))}, memory=place / "m")
warm.restore()
warm.save(1, wait="durable", timeout=30)  # what is imported late can't be read by somebody without rights
warm.close()
os.setgroups([])
os.setgid(54321)
os.setuid(54321)
root = place / "run"
weights = torch.zeros(1000)
ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(weights=weights)}, fallback_after=0.2, persist_seconds=0)
ckpt.restore()
ckpt.save(1, wait="durable", timeout=30)
job = JobDir.of(root, memory_base())
"""


@pytest.mark.campaign(seconds=16)
def test_storage_that_refuses_at_the_end_is_waited_for(
    as_somebody: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    done = as_somebody("""
        ckpt.step(2)
        os.chmod(root, 0)
        try:
            ckpt.save(3, wait="durable", timeout=3)
        except rekindle.NotDurableError as error:
            assert "give this user the right to read and write there" in str(error), error
        else:
            raise AssertionError("it can't have been saved")
        threading.Timer(3, os.chmod, (root, 0o755)).start()
        ckpt.step(4)
        ckpt.close(timeout=60)
        assert (root / "step-0000000004" / "checkpoint.json").exists()
    """)
    assert done.returncode == 0, done.stderr


@pytest.mark.campaign(seconds=10)
def test_without_a_thread_to_be_had_training_goes_on(
    as_somebody: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    done = as_somebody("""
        soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
        try:
            threading.Thread(target=print).start()
        except RuntimeError:
            pass
        else:
            raise AssertionError("there is no such limit here")
        agent = job.agent()
        if agent not in (None, os.getpid()):
            os.kill(agent, signal.SIGKILL)
        until, step = time.monotonic() + 4, 1
        while time.monotonic() < until:
            step += 1
            weights.fill_(step)
            ckpt.step(step)
            time.sleep(0.05)
        assert ckpt.metrics.failed == 0
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
        ckpt.save(step + 1, wait="durable", timeout=60)
        ckpt.close(timeout=60)
    """)
    assert done.returncode == 0, done.stderr
