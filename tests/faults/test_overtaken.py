"""A rank that others have overtaken goes on to their step, if one of them has no copy of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rekindle
from rekindle.faults import gasp
from rekindle.faults.gasp import Gasp
from rekindle.faults.guard import Guard
from rekindle.faults.hooks import HookCalls, Hooks
from rekindle.memory.fault import LOST, Fault
from rekindle.storage.posix import PosixStore
from tests.faults.peer import be_overtaken, peer, steps_of

_LONG = 30.0


class HostJob:
    """One rank whose state is in the host's memory."""

    def __init__(self, root: Path, snapshot_every: int = 10**9) -> None:
        self.model = torch.nn.Linear(10, 10)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        state = {"model": self.model, "optimizer": self.optimizer}
        self.ckpt = rekindle.Checkpointer(root, state, snapshot_every=snapshot_every, persist_every=10**9)
        self.ckpt.restore()
        self.guard = self.ckpt.guard(watchdog=False, notices=(), gasp_deadline=10 * _LONG)  # else it ends by that
        self.guard.__enter__()
        self.done = 0

    def step(self) -> None:
        self.model(torch.ones(10)).sum().backward()
        self.optimizer.step()
        self.done += 1
        self.ckpt.step(self.done)

    def fault(self, guard: Guard, cause: str) -> threading.Thread:
        fault = Fault(cause, 0, guard._generation, self.done, "rank 2 was killed by SIGKILL")
        assert guard._take_up(fault)
        thread = threading.Thread(target=guard._act, args=(fault,), name="gasp", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        self.guard._gate.release()
        self.guard._undo.close()
        self.ckpt._let_go(None)


@pytest.fixture
def host(root: Path, memory: Path) -> Iterator[HostJob]:
    job = HostJob(root)
    yield job
    job.close()


def test_a_rank_goes_on_to_a_step_of_which_another_has_its_only_copy(
    host: HostJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That rank has secured a later step, and not this one: neither would be complete."""
    monkeypatch.setattr(gasp, "_CATCH_UP", _LONG)
    for _ in range(3):
        host.step()
    be_overtaken(host.ckpt, host.guard, host.step, lambda: host.fault(host.guard, "signal"))


def test_a_rank_stays_where_others_that_are_past_it_have_a_copy(host: HostJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gasp, "_CATCH_UP", 10 * _LONG)
    for _ in range(3):
        host.step()
    with peer(host.ckpt, host.guard, 4, has=[3, 4]):
        gasping = host.fault(host.guard, "signal")
        gasping.join(_LONG)
        assert not gasping.is_alive() and steps_of(host.ckpt._session.job_dir, 0) == [3]


@pytest.mark.parametrize("has", [[3], [3, 4], [4]])
def test_a_rank_that_has_gone_is_missed_unless_it_has_left_a_copy(host: HostJob, has: list[int]) -> None:
    """Then each of the others secures all that it holds, not only its share."""
    for _ in range(3):
        host.step()
    with peer(host.ckpt, host.guard, has[-1], has=has, lives=False):
        hooks = HookCalls(Hooks(), SimpleNamespace(cause="exception"), 0.0, [])  # type: ignore[arg-type]
        gasping = Gasp(
            host.guard._gate, host.guard._securer, host.guard._peers, 0, False, time.monotonic() + 20.0, hooks
        )
        assert gasping._peers_differ(3) == (3 not in has)


@pytest.mark.parametrize("cause", ["notice", LOST])
def test_an_update_is_not_waited_for_where_a_node_is_gone(
    cause: str, host: HostJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait in vain for that node's rank, as collectives inside of ZeRO's do."""
    monkeypatch.setattr(gasp, "_UPDATE", 10 * _LONG)
    for _ in range(3):
        host.step()
    gate = host.guard._gate
    gate.updating(3)  # and no more
    gasping = host.fault(host.guard, cause)
    if cause == "notice":
        gasping.join(3 * gate.longest + 0.5)
        assert gasping.is_alive(), "a slow update is waited for"
        host.guard._hear({"afar": {"reached": -1, "told": True, "misses": True}})
    gasping.join(_LONG)
    assert not gasping.is_alive() and steps_of(host.ckpt._session.job_dir, 0) == []


def test_a_rank_that_is_told_to_go_inside_of_an_update_has_its_snapshot_brought_to_storage(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can't be in its state any more, and the snapshot was not meant for storage when it was made."""
    monkeypatch.setattr(gasp, "_UPDATE", 0.2)
    host = HostJob(root, snapshot_every=1)
    for _ in range(3):
        host.step()
    host.guard._gate.updating(3)  # and no more
    gasping = host.fault(host.guard, "notice")
    gasping.join(_LONG)
    assert not gasping.is_alive()
    assert [entry.stamp.step for entry in PosixStore(root).published()] == [3]
    host.close()
