"""``rekindle status --watch``: a line for each job, with its speed."""

from __future__ import annotations

import io
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from rekindle.cli import status
from rekindle.cli.board import Board
from rekindle.cli.main import main
from rekindle.cli.operations import job_status
from rekindle.memory.status import StatusPage
from tests.stored import job_in, remember, save


def told(board: Board, *jobs: dict[str, Any]) -> list[list[str]]:
    """The cells of each line below the heading, by their words."""
    out = Console(file=io.StringIO(), width=200)
    out.print(board.table(jobs))
    return [line.split() for line in out.file.getvalue().splitlines()[1:]]  # type: ignore[attr-defined]


def job(root: str, step: int, **more: object) -> dict[str, Any]:
    ranks = {rank: {"step": step + rank, "does": "before its next update"} for rank in range(2)}
    return {
        **{"root": root, "directory": "/dev/shm/x", "ranks": ranks, "trainers": {0: 1, 1: 2}, "problem": None},
        **{"memory_steps": [step], "memory_bytes": 2_000_000, "node_safe_step": None, "durable_step": 3, "drain": None},
        **more,
    }


def test_a_line_tells_step_speed_and_what_is_safe() -> None:
    now = 100.0
    board = Board(lambda: now)
    assert told(board, job("/runs/17", 10))[0][:4] == ["/runs/17", "2", "10", "-"]
    now += 2
    line = told(board, job("/runs/17", 15, drain={"step": 12, "done": 1, "total": 4}))[0]
    assert line[1:11] == ["2", "15", "2.50", "15", "-", "3", "25", "%", "before", "its"]
    for _ in range(60):
        now += 1
        line = told(board, job("/runs/17", 100 + round(now)))[0]
    assert line[3] == "1.00", "of the last ten seconds only"
    now += 1
    assert told(board, job("/runs/17", 50))[0][3] == "-", "a restart has gone back"


def test_jobs_with_a_problem_come_first_then_the_newest_steps() -> None:
    jobs = [job("/runs/a", 5), job("/runs/b", 7), job("/runs/c", 1, problem="no agent: nothing is being drained")]
    lines = told(Board(), *jobs)
    assert [line[0] for line in lines] == ["c", "b", "a"] and "agent:" in lines[0]
    ended = job("s3://bucket/d", 1, ranks={}, trainers={}, memory_steps=[])
    assert [line[0] for line in told(Board(), *jobs[:1], ended)] == ["/runs/a", "s3://bucket/d"]
    assert told(Board(), ended)[0][-2:] == ["has", "ended"]


def test_80_columns_are_enough() -> None:
    out = Console(file=io.StringIO(), width=80)
    drain = {"step": 1234560, "done": 1, "total": 1}
    out.print(
        Board().table(
            [job("/mnt/shared/runs/a/long/name/17", 1234567, node_safe_step=1234566, durable_step=1234500, drain=drain)]
        )
    )
    told = out.file.getvalue()  # type: ignore[attr-defined]
    assert {"1234567", "1234566", "1234500", "100", "before", "update"} <= set(told.split()), told
    assert "".join(line[:10].rstrip() for line in told.splitlines()[1:]) == "/mnt/shared/runs/a/long/name/17"


def test_a_job_of_this_node(memory: Any, root: Any) -> None:
    save(root, 4)
    here = job_in(memory, root)
    lock = here.lock_rank(0, 5.0)
    page = StatusPage(here.paths.status_page(0), 1)
    page.step, page.snapshot = 6, 5
    page.write()
    remember(here, 5)
    line = told(Board(), job_status(here))[0]
    lock.release()
    assert line[:5] == [str(root), "1", "6", "-", "5"] and "agent:" in line


def test_watching_shows_the_table_and_of_one_job_all_there_is(
    memory: Any, root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_seconds: float) -> None:
        raise KeyboardInterrupt

    save(root, 4)
    remember(job_in(memory, root), 5)
    monkeypatch.setattr(status.time, "sleep", end)
    said = CliRunner().invoke(main, ["status", "--watch"])
    assert said.exit_code == 130
    assert "1 job" in said.stdout and "per s" in said.stdout and "in memory  5 (" in said.stdout, said.stdout
