"""A forked child may look at checkpoints through its parent's Checkpointer, and do nothing else with it."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rekindle
from tests.test_checkpointer import Training, go


def in_child(work: Callable[[], object]) -> int:
    """Exit code of a forked child that does ``work``."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # what hangs fails
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_that_saves_or_restores_is_refused(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=1000, overlap=True)
    ckpt.restore()

    def restores() -> None:
        with pytest.raises(rekindle.UsageError, match="forked"):
            ckpt.restore()

    assert in_child(restores) == 0
    go(ckpt, training, 1, 2)

    def saves() -> None:
        torch.nn.init.constant_(training.model.weight, 7.0)
        for call in (lambda: ckpt.step(3), lambda: ckpt.save(3, wait="durable", timeout=10), ckpt.guard):
            with pytest.raises(rekindle.UsageError, match="forked"):
                call()

    assert in_child(saves) == 0
    assert [c.step for c in ckpt.checkpoints()] == [2, 1], "the child has added nothing"
    go(ckpt, training, 3, 3)
    ckpt.close(timeout=30)
    again = Training()
    ckpt = rekindle.Checkpointer(root, again.state)
    assert ckpt.restore() == 3
    assert torch.equal(again.model.weight, training.model.weight)
    ckpt.close()


def test_a_child_may_look_while_its_parents_copy_is_on_its_way(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=1000, overlap=True)
    ckpt.restore()
    go(ckpt, training, 1, 1)
    assert ckpt._saver.memory is not None
    pending = ckpt._saver.memory.pending
    assert pending is not None
    pending.commit()
    pending._ended = False  # as if the child had been forked a moment earlier

    def looks() -> None:
        assert [c.step for c in ckpt.checkpoints()] == [1]
        assert not pending._ended, "what is under way is the parent's"

    assert in_child(looks) == 0
    pending._ended = True
    ckpt.close(timeout=30)
