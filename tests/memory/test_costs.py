"""The page of costs: what is written is read, whole, also after the writer's death; histograms count what they say."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from array import array
from pathlib import Path

import pytest

from rekindle.errors import FormatError
from rekindle.memory.costs import BOUNDS, CostPage, Costs, Histogram, cost_page, rank_costs, read_costs
from tests.stored import job_in


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003.costs"
    stalls, steps = Histogram(array("Q", range(15)), 1.5), Histogram(array("Q", [7] * 15), 2.5)
    costs = Costs(*range(1, 14), 0.5, 0.25, stalls, steps)
    CostPage(path).write(costs)
    assert read_costs(path) == costs
    assert not list(tmp_path.glob(".*"))


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram()
    assert histogram.mean is None and histogram.quantile(0.5) is None
    for seconds in (0.0, 1e-4, 1.1e-4, 0.01, 1000.0):
        histogram.add(seconds)
    assert histogram.counts[:2].tolist() == [2, 1] and histogram.counts[BOUNDS.index(0.01)] == histogram.counts[-1] == 1
    assert histogram.count == 5 and histogram.total == pytest.approx(1000.01021)
    assert [histogram.quantile(share) for share in (0.4, 0.6, 0.8, 1.0)] == [1e-4, 3e-4, 0.01, math.inf]


def _write_for_ever(path: Path) -> None:
    page, costs = CostPage(path), Costs()
    for number in range(10**9):
        costs.pid = costs.step = costs.restored_step = number
        costs.step_seconds.counts[-1], costs.step_seconds.total = number, float(number)
        page.write(costs)


@pytest.mark.campaign(seconds=9)
def test_no_look_sees_two_writes_mixed_and_none_is_lost_by_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "page"
    process = multiprocessing.get_context("spawn").Process(target=_write_for_ever, args=(path,))
    process.start()
    seen, deadline = [], time.monotonic() + 120
    while len(set(seen)) < 1000 and time.monotonic() < deadline:
        if path.exists() and path.stat().st_size and (costs := _read(path)) is not None:
            histogram = costs.step_seconds
            assert costs.pid == costs.step == costs.restored_step == histogram.counts[-1] == histogram.total
            seen.append(costs.step)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert seen == sorted(seen) and len(set(seen)) >= 1000
    left = read_costs(path)
    assert left.pid == left.step == left.step_seconds.total >= seen[-1]


def _read(path: Path) -> Costs | None:
    try:
        return read_costs(path)
    except FormatError:  # before the first write
        return None


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page"
    for content in (b"x" * 4096, b"short", b""):
        path.write_bytes(content)
        with pytest.raises(FormatError, match="not a page of costs"):
            read_costs(path)
    page = CostPage(path)
    broken = Costs()
    broken.stalls.total = math.nan
    page.write(broken)
    with pytest.raises(FormatError, match="not a page of costs"):
        read_costs(path)
    with pytest.raises(FileNotFoundError):
        read_costs(tmp_path / "none")


def test_a_page_that_is_gone_or_truncated_ends_nobody(tmp_path: Path) -> None:
    path = tmp_path / "page"
    page = CostPage(path)
    os.truncate(path, 0)
    page.write(Costs(step=7))
    assert read_costs(path).step == 7
    path.unlink()
    page.write(Costs(step=8))
    assert not path.exists()
    page.install()
    page.write(Costs(step=9))
    assert read_costs(path).step == 9


def test_ranks_of_an_earlier_start_are_left_out(memory: Path, root: Path) -> None:
    job = job_in(memory, root, world=3)
    assert rank_costs(job) == {}
    for rank, generation in enumerate((2, 3, 3)):
        CostPage(cost_page(job.path, rank)).write(Costs(generation=generation, step=rank))
    CostPage(cost_page(job.path, 3)).write(Costs(generation=3))  # no rank of this node any more
    assert {rank: costs.step for rank, costs in rank_costs(job).items()} == {1: 1, 2: 2}
