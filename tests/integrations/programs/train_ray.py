"""Trains by Ray Train, and dies or goes on.

train_ray.py PLACE CASE

CASE is an object in JSON with the names of ``Case``. The run leaves PLACE/NAME.json, its end, and PLACE/NAME.reported,
a line for each report that Ray has had. Without $RAY_ADDRESS it makes a cluster of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TypedDict

import ray.train
import torch
from ray.train.torch import TorchTrainer
from train_plain import Task

import rekindle
from rekindle.data import Resumable
from rekindle.integrations.ray import leave, notices, report, root

LONG = 120.0


class Case(TypedDict):
    name: str
    named: bool
    """Gives the run its name in Ray, too."""
    workers: int
    """None of them is Ray's local mode."""
    epochs: int
    dying: list[int]
    """Ranks that are killed."""
    dies: int
    """The step in which they are, before its update."""
    by: str
    """The signal of their death."""
    hold: int
    """The step behind which training waits, at the first start, for PLACE/go."""
    failures: int
    """Faults that Ray may count."""


class Reports(ray.train.UserCallback):
    """Writes down what Ray is reported, in its controller."""

    def __init__(self, path: str) -> None:
        self.path = path

    def after_report(self, run_context, metrics, checkpoint) -> None:
        with open(self.path, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(metrics[0]) + "\n")


def die(place: Path, case: Case, rank: int, step: int) -> None:
    """Kills this worker, once."""
    mark = place / f"{case['name']}.killed{rank}"
    if step == case["dies"] and rank in case["dying"] and not mark.exists():
        mark.touch()
        if len(case["dying"]) > 1:
            torch.distributed.barrier()  # so that nobody learns of another's end before its own
        os.kill(os.getpid(), signal.Signals[case["by"]])
        time.sleep(LONG)  # Ray takes a signal in its own thread, and ends the worker


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LONG
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def train(config: dict) -> dict:
    case, place = config["case"], Path(config["place"])
    rank = ray.train.get_context().get_world_rank()
    task, seen = Task(), rekindle.Values(losses=[])
    data = Resumable(task.loader)
    state = {"model": task.model, "optimizer": task.optimizer, "schedule": task.schedule, "data": data, "seen": seen}
    ckpt = rekindle.Checkpointer(root() if case["workers"] else place / "local", state)
    start = step = ckpt.restore()
    node = ray.get_runtime_context().get_node_id() if case["workers"] else ""
    with ckpt.guard(notices=notices(), on_exit=leave):
        for _epoch in range(data.epoch, case["epochs"]):
            for (x,) in data:
                step += 1
                seen.losses.append(task.backward(x))
                die(place, case, rank, step)
                task.update()
                ckpt.step(step)
                report(ckpt, {"step": step, "loss": seen.losses[-1], "node": node})
                if step == case["hold"] and start == 0:
                    wait_for(place / "go")
    ckpt.close()
    report(ckpt, {"step": step, "loss": seen.losses[-1], "node": node})
    return {**task.end(list(seen.losses)), "start": start, "from": ckpt.metrics.restored_from, "root": str(ckpt.root)}


def fit(place: Path, case: Case) -> None:
    name = case["name"]
    result = TorchTrainer(
        train,
        train_loop_config={"case": case, "place": str(place)},
        scaling_config=ray.train.ScalingConfig(num_workers=case["workers"]),
        run_config=ray.train.RunConfig(
            name=name if case["named"] else None,
            storage_path=str(place / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=case["failures"]),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
            callbacks=[Reports(str(place / f"{name}.reported"))],
        ),
    ).fit()
    pointer = None
    if result.checkpoint is not None:
        with result.checkpoint.as_directory() as directory:
            pointer = json.loads((Path(directory) / "rekindle.json").read_text())
    (place / f"{name}.json").write_text(json.dumps({**result.return_value, "pointer": pointer}))


def main() -> None:
    place, case = Path(sys.argv[1]), json.loads(sys.argv[2])
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets are short
    try:
        if "RAY_ADDRESS" in os.environ:
            ray.init()
        elif case["workers"]:
            ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, _temp_dir=temporary)
        fit(place, case)
        ray.shutdown()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    main()
