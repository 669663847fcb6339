"""``restore(step=0)`` starts anew, whatever was restored before it."""

from __future__ import annotations

from pathlib import Path

import pytest

import rekindle
from tests.test_checkpointer import Training, go


@pytest.mark.parametrize("first", ["restore", "nothing"])
def test_a_start_anew_is_the_same_after_another_restore(first: str, root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    ckpt.restore()
    for step in (5, 20):
        ckpt.save(step, wait="durable", timeout=30)
    ckpt.close()
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    if first == "restore":
        assert ckpt.restore() == 20
    assert ckpt.restore(step=0) == 0
    assert (ckpt._session.incarnation.parent, ckpt._session.incarnation.parent_step, ckpt._saver.reached) == ("", 0, 0)
    found = ckpt.metrics.restored_step, ckpt.metrics.restored_from, ckpt.metrics.restore_seconds
    assert found == (0, "", 0.0)
    go(ckpt, training, 1, 2)
    ckpt.close(timeout=30)
    again = Training()
    ckpt = rekindle.Checkpointer(root, again.state)
    assert ckpt.restore() == 2, "what was left behind stays so"
    assert again.progress.epoch == 2
    ckpt.close()
