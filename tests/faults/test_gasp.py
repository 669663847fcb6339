"""Faults at chosen moments of a real run: noticed, secured, gone on from, and the same in the end as without.

Some cells of the matrix; ``python -m tests.faults.matrix`` runs more, and ``--full`` all of them.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rekindle.memory.job_dir import JobDir
from rekindle.storage.catalog import find_copies, list_checkpoints
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import verify
from tests.faults.cluster import MOMENTS, Cell, lines_of, run, start
from tests.faults.matrix import judge, world_of

CELLS = [("ddp", "kill", moment) for moment in MOMENTS] + [
    ("ddp", "exception", "update-second"),
    ("ddp", "term", "backward"),
    ("ddp", "kill-two", "copying"),
    ("ddp", "agent-kill", "all-reduce"),
    ("ddp", "block", "forward"),
    ("bare", "kill", "forward"),
    ("bare", "kill", "update-first"),
    ("spaced", "kill", "update-first"),
    ("spaced", "kill", "update-second"),
    ("bare", "kill-in-gasp", "backward"),
    ("bare", "term-all", "forward"),
    ("zero", "kill", "copying"),
    ("bare", "stop", "before-step"),
    ("hsdp", "kill", "update-second"),
]
CAUSES = {
    "exception": ("exception", "rank 1 raised RuntimeError: a fault on purpose"),
    "kill": ("signal", "rank 1 was killed by SIGKILL"),
    "kill-two": ("signal", "was killed by SIGKILL"),
    "kill-in-gasp": ("signal", "rank 1 was killed by SIGKILL"),
    "term": ("notice", "rank 1 was sent SIGTERM"),
    "term-all": ("notice", "was sent SIGTERM"),
    "stop": ("hang", "rank 1 hangs after step 8"),
    "loop": ("hang", "after step 8"),
    "block": ("hang", "after step 8"),
    "agent-kill": ("", ""),
}


MORE = {("ddp", "kill", "backward"), ("ddp", "kill", "update-first"), ("ddp", "kill", "before-step")}
MORE |= {("bare", "kill", "forward"), ("ddp", "exception", "update-second"), ("ddp", "kill-two", "copying")}
MORE |= {("ddp", "kill", "forward"), ("bare", "kill-in-gasp", "backward"), ("bare", "stop", "before-step")}
MORE |= {("bare", "kill", "update-first"), ("zero", "kill", "copying"), ("hsdp", "kill", "update-second")}
MORE |= {("ddp", "block", "forward"), ("spaced", "kill", "update-second"), ("ddp", "kill", "copying")}
"""Cells that show little beside the others."""


@pytest.mark.parametrize(
    "cell", [pytest.param(c, id="-".join(c), marks=[pytest.mark.campaign] * (c in MORE)) for c in CELLS]
)
def test_fault(
    cell: tuple[str, str, str],
    root: Path,
    memory: Path,
    job: JobDir,
    unbroken_cell: Callable[[Path, str, int], list[str]],
) -> None:
    config, fault, moment = cell
    world = world_of(config, fault)
    out = run(Cell(root, memory, config, fault, moment, world=world))
    cause, what = CAUSES[fault]
    # Without an agent nobody writes the cause down; a new one may have come in time for the survivor's exception. An
    # agent that got no processor until the parent had collected the dead rank says that, and no more.
    late = (out.cause, out.what) == ("exit", "rank 1 has ended with an exit code that is not known")
    assert (out.cause == cause and what in out.what) or (fault == "agent-kill" and out.cause == "exception") or late
    assert any(code != 0 for code in out.codes[0]) and len(out.codes) == 2
    assert judge(out, unbroken_cell(memory, config, world)) == []


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A control group whose processes may have 200 MB."""
    path = Path(f"/sys/fs/cgroup/memory/rekindle-test-{os.getpid()}")
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text("200000000")
    except OSError as error:
        pytest.skip(f"no control group to be had: {error}")
    yield path
    path.rmdir()


@pytest.mark.campaign(seconds=5)
def test_whoever_waits_for_a_rank_that_pauses_does_not_hang(root: Path, memory: Path, job: JobDir) -> None:
    """Rank 1 evaluates for longer than a hang takes; rank 0 waits for it in a collective, without having said so."""
    cell = Cell(root, memory, "ddp", evaluate=3.0)
    out = run(cell)
    assert out.codes == [[0, 0]] and not job.paths.fault.exists()
    learned = [float(line[2]) for rank in (0, 1) for line in lines_of(cell, rank) if line[1] == "pause"]
    assert len(learned) == 2 and max(learned) < 3.0, "what rank 0 waited for is no measure of its own pauses"


def test_a_rank_that_the_kernel_kills_for_want_of_memory(
    root: Path, memory: Path, cgroup: Path, unbroken_cell: Callable[[Path, str, int], list[str]]
) -> None:
    out = run(Cell(root, memory, "ddp", "oom", "forward", cgroup=cgroup))
    assert out.cause == "oom" and out.what == "rank 1 was killed by the kernel, as memory ran out"
    assert judge(out, unbroken_cell(memory, "ddp", 2)) == []


@pytest.mark.parametrize(
    "fault", ["kill-two", *(pytest.param(fault, marks=pytest.mark.campaign) for fault in ("kill", "exception"))]
)
def test_a_gasp_reaches_storage_though_nobody_comes_back(fault: str, root: Path, memory: Path, job: JobDir) -> None:
    """The dead rank's part is put together by the agent, which doesn't heed its budget now: that would take an hour."""
    cell = Cell(root, memory, "bare", fault, "forward", world_of("bare", fault), options={"drain_limit": "4 B/s"})
    codes = start(cell, 0, time.monotonic() + 60)
    assert 0 not in codes
    deadline = time.monotonic() + 60
    while not (found := find_copies(None, PosixStore(root))) or str(found[0].files).endswith(".partial"):
        assert time.monotonic() < deadline, job.paths.agent_log.read_text()
        time.sleep(0.05)
    assert [(copy.step, len(copy.ranks)) for copy in found] == [(cell.at - 1, cell.world)]
    assert verify(found[0]) == []


def test_a_hang_leaves_a_report_of_where_every_rank_stood(root: Path, memory: Path, job: JobDir) -> None:
    cell = Cell(root, memory, "ddp", "block", "forward")
    assert 0 not in start(cell, 0, time.monotonic() + 60)
    report = root / "hang-1-step-8" / "report.txt"
    deadline = time.monotonic() + 60
    while not report.exists() or not report.read_text():  # it is made, and then written
        assert time.monotonic() < deadline, job.paths.agent_log.read_text()
        time.sleep(0.05)
    head, first, second = report.read_text().split("== rank ")
    assert "ranks 0, 1 hang after step 8, before its next update" in head and f"will be in {report}" in head
    assert "rank 0: after step 8" in head and "rank 1: after step 8" in head
    assert "rekindle/faults" not in first + second, "threads that wait for work say nothing"
    assert "in backward" in first and "last of default_pg: gloo:all_reduce number" in first
    assert "in strike" in second and "last of default_pg: gloo:barrier number" in second
    recorded = pickle.loads((report.parent / "rank_1").read_bytes())
    assert recorded["entries"][-1]["profiling_name"] == "gloo:barrier"
    assert list_checkpoints(job, PosixStore(root), [0, 1])[0].step == 8
