"""Options that are other ones in the code than in the checkpoint: restored, and said so in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rekindle


class Job:
    def __init__(self, lr: float, decay: float = 0.1, t_max: int = 100, schedule: bool = False) -> None:
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=decay)
        self.state: dict[str, object] = {"model": self.model, "optimizer": self.optimizer}
        self.schedules: list[torch.optim.lr_scheduler.LRScheduler] = []
        if schedule:
            self.schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=t_max)]
            self.state["schedule"] = self.schedules[0]

    def train(self, ckpt: rekindle.Checkpointer, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.model(torch.ones(1, 4)).sum().backward()
            self.optimizer.step()
            for schedule in self.schedules:
                schedule.step()
            ckpt.step(step)


def said(root: Path, caplog: pytest.LogCaptureFixture, before: Job, after: Job) -> list[str]:
    with rekindle.Checkpointer(root, before.state) as ckpt:
        ckpt.restore()
        before.train(ckpt, 1, 3)
    caplog.clear()
    with rekindle.Checkpointer(root, after.state) as ckpt:
        assert ckpt.restore() == 3
    return [r.getMessage() for r in caplog.records if "differ from the code" in r.getMessage()]


def test_a_changed_learning_rate_is_said_in_one_line(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    again = Job(1e-3, decay=0.2)
    assert said(root, caplog, Job(3e-4), again) == [
        "options that differ from the code were restored: optimizer.param_groups[0].lr: 0.001 in code, 0.0003 "
        "restored; optimizer.param_groups[0].weight_decay: 0.2 in code, 0.1 restored. To go on with those of the "
        "code, set them after restore()"
    ]
    assert again.optimizer.param_groups[0]["lr"] == 3e-4


def test_a_schedule_is_no_change_of_the_code(root: Path, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = Job(1e-3, schedule=True)
    assert said(root, caplog, before, Job(1e-3, schedule=True)) == []
    assert before.optimizer.param_groups[0]["lr"] != 1e-3


def test_a_reduced_learning_rate_is_no_change_of_the_code(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [Job(1e-3), Job(1e-3)]
    for job in jobs:
        job.state["schedule"] = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer, patience=7)
    jobs[0].optimizer.param_groups[0]["lr"] = 1e-4
    assert said(root, caplog, *jobs) == []


def test_cycled_momentum_is_no_change_of_the_code(root: Path, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    jobs = [Job(1e-3), Job(1e-3)]
    for job in jobs:
        job.schedules = [torch.optim.lr_scheduler.OneCycleLR(job.optimizer, max_lr=0.1, total_steps=50)]
        job.state["schedule"] = job.schedules[0]
    assert said(root, caplog, *jobs) == []


def test_what_a_schedule_was_made_with_is_compared(root: Path, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    (line,) = said(root, caplog, Job(1e-3, schedule=True), Job(5e-4, t_max=200, schedule=True))
    for change in (
        "optimizer.param_groups[0].initial_lr: 0.0005 in code, 0.001 restored",
        "schedule.T_max: 200 in code, 100 restored",
        "schedule.base_lrs: (0.0005) in code, (0.001) restored",
    ):
        assert change in line


def test_the_line_is_bounded_and_takes_any_option(root: Path, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    def job(lr: float) -> Job:
        made = Job(lr)
        made.optimizer = torch.optim.Adam(
            [{"params": [p]} for p in torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(20))).parameters()],
            lr=torch.tensor(lr),
        )
        made.state = {"optimizer": made.optimizer}
        return made

    pairs = [job(0.5), job(0.25)]
    for one in pairs:
        one.train = lambda ckpt, first, last: ckpt.step(last)  # type: ignore[method-assign]
        one.state["parameters"] = rekindle.Values(
            all=[p for group in one.optimizer.param_groups for p in group["params"]]
        )
    (line,) = said(root, caplog, *pairs)
    assert "optimizer.param_groups[7].lr: 0.25 in code, 0.5 restored; and 32 more" in line
