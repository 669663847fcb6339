"""How often a snapshot is taken: the smallest interval that a budget allows, the same on all ranks."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rekindle
from rekindle.save import cadence
from rekindle.save.cadence import Fixed, agreement
from rekindle.session.group import this_group
from tests.faults.harness import wait_for
from tests.fork_server import context


def test_fixed() -> None:
    assert [n for n in range(1, 13) if Fixed(4).due(n)] == [4, 8, 12]


def _vote(rank: int, rendezvous: str, queue: object) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    ask = agreement(this_group())
    answers = [ask(float(number))() for number in (rank, 10 - rank)]
    pending = ask(math.inf if rank == 1 else 0.5)
    queue.put((rank, [*answers, pending()]))
    if rank == 2:
        return  # gone
    try:
        queue.put((rank, ask(1.0)()))
    finally:
        time.sleep(0.5)


def test_agreement_among_real_ranks(tmp_path: Path) -> None:
    queue = context.Queue()
    ranks = [context.Process(target=_vote, args=(rank, str(tmp_path / "rendezvous"), queue)) for rank in range(3)]
    for process in ranks:
        process.start()
    found = [queue.get(timeout=60) for _ in range(5)]
    for process in ranks:
        process.join(60)
    assert [answer for _, answer in sorted(found, key=str) if isinstance(answer, list)] == [[2.0, 10.0, math.inf]] * 3
    left = [answer for _, answer in found if not isinstance(answer, list)]
    assert len(left) == 2 and all(math.isnan(answer) for answer in left), "a rank that is gone leaves no agreement"


def _be_late(rank: int, place: Path, queue: object) -> None:
    cadence._AGREE_WITHIN = timedelta(seconds=1)
    dist.init_process_group("gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2)
    ask, given_up = agreement(this_group()), place / "given up"
    if rank == 1:
        time.sleep(3)  # as in an evaluation, for which the job's next collective waits
    pending = ask(float(rank))
    dist.barrier()
    answers = [pending()]
    if rank == 1:
        wait_for(given_up.exists)
    answers.append(ask(float(rank))())
    given_up.touch()
    queue.put((rank, answers))
    queue.close()
    dist.barrier()


def test_a_rank_that_is_late_ends_no_agreement_and_does_not_hold_back_others_for_long(tmp_path: Path) -> None:
    queue = context.Queue()
    ranks = [context.Process(target=_be_late, args=(rank, tmp_path, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = dict(queue.get(timeout=100) for _ in ranks)
    for process in ranks:
        process.join(100)
    assert [answers[0] for answers in found.values()] == [1.0, 1.0]
    assert math.isnan(found[0][1]) and found[1][1] == 1.0, "rank 1 waited for rank 0 to give up"
    assert [process.exitcode for process in ranks] == [0, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"snapshot_every": value} for value in ("often", None, 0)),
        *({"snapshot_budget": value} for value in (0, 1, 1.5, "1%", None)),
        *({"keep": 0}, {"memory_limit": "1GB"}, {"memory_limit": -5}, {"memory_headroom": -1}, {"drain_limit": "fast"}),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, object], root: Path, memory: Path) -> None:
    with pytest.raises(rekindle.UsageError, match="rate" if "drain_limit" in wrong else next(iter(wrong))):
        rekindle.Checkpointer(root, {"model": torch.nn.Linear(2, 2)}, **wrong)
