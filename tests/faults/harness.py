"""Real trainers in real processes, killed for real.

Trainers are forked from a server that has torch loaded already, so that a test that needs ten starts takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle.memory.job_dir import JobDir
from tests.fork_server import context


@dataclass(frozen=True)
class Run:
    """One start of a training job of ``world`` ranks."""

    root: Path
    memory: Path
    steps: int = 8
    world: int = 1
    points: dict[int, str] = field(default_factory=dict)
    """Failpoint of each rank."""
    agent_point: str = ""
    """Failpoint of the agent that this start brings up."""
    options: dict[str, Any] = field(default_factory=dict)
    """For the Checkpointer."""
    restore_step: int | None = None
    pause: float = 0.0
    """Seconds between steps."""
    wait: str | None = None
    """``durable`` makes every step wait until it is on storage."""
    width: int = 16
    executable: str | None = None
    """Interpreter that the agent is started with."""

    def log(self, rank: int) -> Path:
        return self.root.parent / f"{self.root.name}-rank{rank}.log"

    def trace(self, rank: int) -> Path:
        """Lines of ``restored N``, ``step N`` and ``done DIGEST``, written as they happen."""
        return self.root.parent / f"{self.root.name}-rank{rank}.trace"


def start(run: Run) -> list[multiprocessing.Process]:
    """Start all ranks."""
    rendezvous = run.root.parent / f"rendezvous-{time.monotonic_ns()}"
    processes = []
    for rank in range(run.world):
        process = context.Process(target=_train, args=(run, rank, str(rendezvous)))
        process.start()
        processes.append(process)
    return processes


def finish(processes: list[multiprocessing.Process], timeout: float = 120.0) -> list[int | None]:
    """Exit code of each rank; a negative one is a signal. Ranks left by a dead one are killed, as by torchrun."""
    deadline = time.monotonic() + timeout
    while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
        if any(p.exitcode not in (None, 0) for p in processes):
            for process in processes:
                process.join(0.5)
                if process.is_alive():
                    process.kill()
        time.sleep(0.01)
    assert not any(p.is_alive() for p in processes), "a trainer hangs"
    for process in processes:
        process.join()
    return [p.exitcode for p in processes]


def train(run: Run) -> list[int | None]:
    return finish(start(run))


def traced(run: Run, rank: int = 0) -> list[tuple[str, str]]:
    """What a rank wrote down in all its starts so far."""
    lines = run.trace(rank).read_text().splitlines()
    return [(line.split()[0], line.split()[1]) for line in lines if len(line.split()) == 2]


def digest_of(run: Run, rank: int = 0) -> str:
    """Digest of the weights and the optimizer's state that the last start ended with."""
    what, digest = traced(run, rank)[-1]
    assert what == "done", run.log(rank).read_text()
    return digest


def restored(run: Run, rank: int = 0) -> list[int]:
    """The step that each start went on from."""
    return [int(value) for what, value in traced(run, rank) if what == "restored"]


def wait_for(condition: Callable[[], Any], timeout: float = 60.0, what: str = "") -> Any:
    """The first true value of ``condition``."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout} s: {what or condition}")


def end_agent(job: JobDir) -> None:
    """Kill a job's agent, if it has one, and see it go."""
    deadline = time.monotonic() + 10
    pid = job.agent()
    while pid and pid != os.getpid() and job.agent() == pid and time.monotonic() < deadline:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def take_away(path: Path) -> None:
    """Remove a directory at one blow; whoever still works in it can't put a file into what is being removed."""
    gone = path.with_name(f".{path.name}.gone")
    path.rename(gone)
    shutil.rmtree(gone)


def leftovers(*places: Path) -> list[Path]:
    """Temporary files and unfinished directories."""
    found: list[Path] = []
    for place in places:
        found += [p for p in place.rglob("*") if p.name.endswith((".tmp", ".partial", ".retired"))]
    return found


# -- what runs in the trainer ---------------------------------------------------------------------------------------


def build(width: int) -> dict[str, Any]:
    """A small model with dropout, batch statistics and tied weights, its optimizer and its schedule."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3), torch.nn.Linear(width, width)
    )
    model[3].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
    }


def one_step(state: dict[str, Any], model: Any, width: int) -> None:
    import torch

    loss = model(torch.randn(8, width)).pow(2).mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["scheduler"].step()


def digest_state(state: dict[str, Any]) -> str:
    import torch

    total = hashlib.sha256()

    def feed(node: Any) -> None:
        if isinstance(node, torch.Tensor):
            node = getattr(node, "_local_tensor", node)
            total.update(node.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(node, dict):
            for key in node:
                total.update(str(key).encode())
                feed(node[key])
        elif isinstance(node, (list, tuple)):
            for item in node:
                feed(item)
        else:
            total.update(repr(node).encode())

    for name in ("model", "optimizer", "scheduler"):
        feed(state[name].state_dict())
    return total.hexdigest()


def _train(run: Run, rank: int, rendezvous: str) -> None:
    import sys

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import rekindle
    from rekindle.common import failpoints

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, filename=run.log(rank), force=True, format="%(levelname)s %(message)s")
    os.environ["REKINDLE_FAILPOINT"] = run.agent_point  # the agent's; ours is armed by hand
    failpoints.arm(run.points.get(rank, ""))
    if run.executable:
        sys.executable = run.executable
    trace = os.open(run.trace(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        if run.world > 1:
            how = {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": run.world} if rendezvous else {}
            dist.init_process_group("gloo", **how)
        state = build(run.width)
        model = DistributedDataParallel(state["model"]) if run.world > 1 else state["model"]
        torch.manual_seed(rank)
        # A small state is else copied inside of step(), where less can go wrong.
        options = {"persist_seconds": 0, "keep": 2, "overlap": True} | run.options
        ckpt = rekindle.Checkpointer(run.root, {**state, "model": model}, memory=run.memory, **options)
        first = ckpt.restore(run.restore_step)
        os.write(trace, b"restored %d\n" % first)
        for step in range(first + 1, run.steps + 1):
            one_step(state, model, run.width)
            ckpt.save(step, wait=run.wait, pin=False) if run.wait else ckpt.step(step)
            os.write(trace, b"step %d\n" % step)
            time.sleep(run.pause)
        ckpt.close(timeout=30)
        os.write(trace, f"metrics {json.dumps({'failed': ckpt.metrics.failed}, separators=(',', ':'))}\n".encode())
        os.write(trace, f"done {digest_state(state)}\n".encode())
    except BaseException:
        logging.exception("trainer failed")
        os._exit(1)
    os._exit(0)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    assert pid > 1, "that would be this process's group, or everybody"
    os.kill(pid, number)
