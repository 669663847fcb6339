"""Loops that tell a step too small: an error before the state of one step is saved as that of another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rekindle
from tests.test_checkpointer import Training, go

RIGHT = r"for step in range\(start \+ 1, total \+ 1\)"


class Unannounced:
    """Updates parameters, and calls no hooks."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.param_groups = [{"params": list(module.parameters()), "lr": 0.1}]
        self.state: dict[torch.Tensor, dict[str, object]] = {}

    def state_dict(self) -> dict[str, object]:
        return {"lr": 0.1}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state == self.state_dict()

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:  # type: ignore[attr-defined]
                parameter.sub_(0.1)


def test_a_loop_that_tells_the_restored_step_again_is_stopped_at_its_first_update(root: Path, memory: Path) -> None:
    training = Training()
    with pytest.raises(rekindle.UsageError, match=f"began at step 0, and the state is that of step 1 .*{RIGHT}"):
        ckpt = rekindle.Checkpointer(root, training.state)
        for step in range(ckpt.restore(), 5):
            training.update()
            ckpt.step(step)
    assert training.progress.epoch == 1
    assert ckpt.metrics.saves == 0
    ckpt.close()

    ckpt = rekindle.Checkpointer(root, training.state)
    ckpt.restore()
    go(ckpt, training, 1, 3)
    ckpt.close()
    again = Training()
    ckpt = rekindle.Checkpointer(root, again.state)
    start = ckpt.restore()
    again.update()
    for save in (ckpt.step, ckpt.save):
        with pytest.raises(
            rekindle.UsageError, match=f"step 3 was restored, and the state is that of step 4 .*{RIGHT}"
        ):
            save(start)
    ckpt.step(start + 1)
    ckpt.close()
    assert next(c.step for c in ckpt.checkpoints()) == 4


def test_the_restored_step_may_be_told_and_saved_as_long_as_there_is_no_update(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    ckpt.step(0)
    ckpt.save(0, wait="memory")
    go(ckpt, training, 1, 2)
    ckpt.close()
    again = Training()
    again.update()  # as some make an optimizer's state before it is restored
    ckpt = rekindle.Checkpointer(root, again.state)
    assert ckpt.restore() == 2
    ckpt.step(2)
    ckpt.save(2, wait="durable", timeout=60)
    go(ckpt, again, 3, 3)
    ckpt.close()


@pytest.mark.parametrize("announced", [True, False])
def test_updates_without_hooks_are_seen(announced: bool, root: Path, memory: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = Unannounced(model)
    ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer})
    ckpt.restore()
    if announced:
        with ckpt.updating():
            optimizer.step()
    else:
        optimizer.step()
    with pytest.raises(rekindle.UsageError, match=RIGHT):
        ckpt.step(0)
    ckpt.step(1)
    ckpt.close()
