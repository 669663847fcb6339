"""Loops that tell a step too small: an error before the state of one step is saved as that of another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import rekindle
from tests.test_checkpointer import Training, go

RIGHT_LOOP = "for step in range(start + 1, total + 1)"
RIGHT = re.escape(RIGHT_LOOP)


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


def test_a_step_is_not_told_again_after_an_update(root: Path, memory: Path) -> None:
    """The second save of step 1 would have the state of step 2. Without an update between them a repeat is right."""
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    ckpt.restore()
    go(ckpt, training, 1, 1)
    ckpt.step(1)
    ckpt.save(1)
    training.update()
    for save in (ckpt.step, ckpt.save):
        with pytest.raises(rekindle.UsageError, match=r"step 1 again after an update: .* that of a later step"):
            save(1)
    ckpt.step(2)
    ckpt.save(2, wait="memory")
    ckpt.close()


def test_steps_that_are_not_saved_are_not_told_again_after_an_update_either(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, snapshot_every=100)
    ckpt.restore()
    go(ckpt, training, 1, 2)
    training.update()
    with pytest.raises(rekindle.UsageError, match="step 2 again after an update"):
        ckpt.step(2)
    ckpt.close()


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


def test_updates_without_hooks_are_seen(root: Path, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = Unannounced(model)
    ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer})
    ckpt.restore()
    optimizer.step()  # no more than a write: it may be of weights that are loaded by hand
    ckpt.step(0)
    assert len(warnings(caplog)) == 1
    with ckpt.updating():
        optimizer.step()
    with pytest.raises(rekindle.UsageError, match=RIGHT):
        ckpt.step(0)
    ckpt.step(1)
    ckpt.close()
    ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer})
    assert ckpt.restore() == 1
    optimizer.step()
    with pytest.raises(rekindle.UsageError, match=RIGHT):
        ckpt.step(1)
    ckpt.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for r in caplog.records if RIGHT_LOOP in (message := r.getMessage()) and r.levelname == "WARNING"]


def test_weights_loaded_by_hand_are_saved_as_step_0_with_a_warning(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(4, 4)
    ckpt = rekindle.Checkpointer(root, {"model": model})
    ckpt.restore()
    model.load_state_dict(torch.nn.Linear(4, 4).state_dict())
    ckpt.save(0, wait="memory")
    ckpt.step(0)
    assert len(warnings(caplog)) == 1
    assert "no update of training" in warnings(caplog)[0]
    ckpt.close()


def test_an_update_with_learning_rate_zero_is_no_step(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer})
    ckpt.restore()

    def update(lr: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()

    update(0.0)  # it makes the optimizer's state
    ckpt.save(0, wait="memory")
    assert len(warnings(caplog)) == 1
    update(0.0)
    update(0.1)
    with pytest.raises(rekindle.UsageError, match=RIGHT):
        ckpt.step(0)
    ckpt.step(1)
    ckpt.close()


@pytest.mark.parametrize("in_memory", [True, False])
def test_values_that_change_between_two_saves_of_a_step_are_named_once(
    in_memory: bool, root: Path, tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not in_memory:
        memory = tmp_path / "file"
        memory.write_text("no place for a memory store")
    training = Training()
    optimizer = training.optimizer
    ckpt = rekindle.Checkpointer(root, training.state, memory=memory, persist_every=10**6)
    ckpt.restore()
    told = []
    for step in (1, 2, 3):
        training.update()
        ckpt.save(step)
        torch.rand(1)  # generators may go on
        ckpt.save(step)
        if step > 1:
            optimizer.param_groups[0]["lr"] = 0.5 / step
            training.progress.best = "new"
        ckpt.save(step)
        told.append([m for r in caplog.records if "stays as it was first saved" in (m := r.getMessage())])
    assert (len(told[0]), len(told[1]), len(told[2])) == (0, 1, 1), told
    assert told[1][0].startswith("step 2 stays") and "progress.best" in told[1][0]
    assert "optimizer.param_groups[0].lr" in told[1][0] and "rng" not in told[1][0]
    ckpt.close()
    again = Training()
    ckpt = rekindle.Checkpointer(root, again.state)
    assert ckpt.restore() == 3
    assert again.optimizer.param_groups[0]["lr"] == 0.25 and again.progress.best == "new"
    ckpt.close()
