"""The best checkpoint by a metric stays on storage beside the newest, through restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import rekindle
from rekindle.cli.main import main
from tests.faults.harness import wait_for
from tests.parallel.launch import on_ranks
from tests.stored import steps_on


def job(root: Path, **settings: Any) -> tuple[torch.nn.Module, rekindle.Checkpointer]:
    model = torch.nn.Linear(2, 2)
    return model, rekindle.Checkpointer(root, {"model": model}, keep=1, **settings)


def save(ckpt: rekindle.Checkpointer, step: int, loss: object = None) -> None:
    metrics: Any = None if loss is None else {"loss": loss, "other": step}
    ckpt.save(step, wait="durable", timeout=60, pin=False, metrics=metrics)


def left(root: Path, *steps: int) -> None:
    wait_for(lambda: steps_on(root) == list(steps), what=f"retention, which leaves {steps}")


def listed(root: Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(main, ["ls", str(root), "--json"])
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return [row for row in found if row["place"] == "storage"]


def test_the_best_stays_through_restarts_and_is_told(root: Path, memory: Path) -> None:
    model, ckpt = job(root, keep_best=("loss", "min"))
    for step, loss in enumerate((0.5, 0.25, torch.tensor(0.375), 0.75), 1):
        torch.nn.init.constant_(model.weight, step)
        save(ckpt, step, loss)
    left(root, 2, 4)
    assert [(row["step"], row["best"], row["metric"]["value"]) for row in listed(root)] == [
        (4, False, 0.75),
        (2, True, 0.25),
    ]
    ckpt.close(timeout=60)
    told = CliRunner().invoke(main, ["ls", str(root)], env={"COLUMNS": "160"}).stdout
    assert "complete, best" in told and "loss 0.25" in told
    assert rekindle.load_model(root, model, "best") == 2 and model.weight[0, 0] == 2

    model, ckpt = job(root, keep_best=("loss", "min"))
    assert ckpt.restore() == 4
    torch.nn.init.constant_(model.weight, 5)
    ckpt.step(5, {"loss": 0.3125})
    save(ckpt, 6)
    left(root, 2, 6)
    ckpt.save(6, metrics={"loss": 0.125})  # evaluated after it came to storage
    wait_for(lambda: [row["step"] for row in listed(root) if row["best"]] == [6], what="the note on storage")
    save(ckpt, 7, float("nan"))  # no reason to end, and not the best
    left(root, 6, 7)
    assert listed(root)[0]["metric"] is None
    ckpt.close(timeout=60)

    _, ckpt = job(root)  # without a word of it
    assert ckpt.restore() == 7
    save(ckpt, 8)
    left(root, 6, 8)
    ckpt.close(timeout=60)
    for extra, steps in ((["--keep", "1"], [6, 8]), (["--keep", "1", "--no-best"], [8])):
        assert CliRunner().invoke(main, ["prune", str(root), *extra]).exit_code == 0
        assert steps_on(root) == steps


def test_metrics_that_make_no_sense_are_refused_before_anything_is_saved(root: Path, memory: Path) -> None:
    _, ckpt = job(root, keep_best=("loss", "min"))
    for metrics, told in (
        ({"accuracy": 1}, "with 'loss', which"),
        ({"loss": "low"}, "one number"),
        (0.5, "dictionary"),
    ):
        with pytest.raises(rekindle.UsageError, match=told):
            ckpt.step(1, metrics)  # type: ignore[arg-type]
        with pytest.raises(rekindle.UsageError, match=told):
            ckpt.save(1, metrics=metrics)  # type: ignore[arg-type]
    assert ckpt.latest() is None
    ckpt.close()
    _, ckpt = job(root)
    with pytest.raises(rekindle.UsageError, match=r"make the Checkpointer with keep_best=\(NAME, 'min'\)"):
        ckpt.step(1, {"loss": 0.5})
    ckpt.close()


def save_two(rank: int, world: int, root: str) -> dict[str, Any]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    with rekindle.Checkpointer(root, {"model": model}, keep=1, keep_best=("loss", "min")) as ckpt:
        for step in (1, 2):
            ckpt.save(step, wait="durable", timeout=60, pin=False, metrics={"loss": 10.0 * rank + step})
    return {}


def test_the_metric_of_rank_0_counts(root: Path, memory: Path) -> None:
    for answer in on_ranks(2, save_two, str(root)):
        assert not answer.error, answer.trace
    assert [(row["step"], row["metric"]["value"], row["best"]) for row in listed(root)] == [
        (2, 2.0, False),
        (1, 1.0, True),
    ]
