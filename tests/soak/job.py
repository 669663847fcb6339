"""The job under soak: ranks that train for real, and write down every step they complete, until told to end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle.format.names import root_path
from rekindle.memory.job_dir import JobDir, memory_base
from tests.faults.harness import digest_state
from tests.fork_server import context

__all__ = ["Line", "Spec", "Start"]

_GRACE = 30.0
"""Seconds that ranks get to end once one of them has failed, as from torchrun."""
_DURABLE_EVERY = 40
"""Steps between those that are waited for until they are on storage."""
_PATIENCE = 3.0
"""Seconds that such a wait may take: storage may be in trouble."""


@dataclass(frozen=True)
class Spec:
    """What all starts of the job have in common."""

    place: Path
    root: Path
    memory: Path
    world: int = 2
    width: int = 384
    pause: float = 0.01

    @property
    def job(self) -> JobDir:
        return JobDir.of(root_path(self.root), memory_base(self.memory))

    @property
    def stop(self) -> Path:
        return self.place / "stop"

    def trace(self, rank: int) -> Path:
        return self.place / f"rank{rank}.trace"

    def log(self, rank: int) -> Path:
        return self.place / f"rank{rank}.log"


@dataclass(frozen=True)
class Line:
    """What a rank wrote down: ``restored``, ``step``, ``durable`` or ``done``, and of which step."""

    what: str
    step: int
    digest: str
    stall: float


@dataclass
class Start:
    """One start of the job, as a launcher like torchrun makes it."""

    spec: Spec
    number: int
    points: dict[int, str] = field(default_factory=dict)
    """Failpoint of each rank."""
    agent_point: str = ""
    """Failpoint of an agent that this start brings up."""
    _ranks: list[Any] = field(default_factory=list)
    _read: list[int] = field(default_factory=list)
    _told: float = 0.0

    def begin(self) -> None:
        meeting = str(self.spec.place / f"meeting-{self.number}")
        self._read = [self._size(rank) for rank in range(self.spec.world)]
        for rank in range(self.spec.world):
            point = self.points.get(rank, "")
            process = context.Process(target=_train, args=(self.spec, rank, meeting, point, self.agent_point))
            process.start()
            self._ranks.append(process)

    def _size(self, rank: int) -> int:
        with suppress(FileNotFoundError):
            return self.spec.trace(rank).stat().st_size
        return 0

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._ranks if process.is_alive()]

    def lines(self, rank: int) -> list[Line]:
        """What a rank of this start has written down so far; a last line that is not whole is left out."""
        with suppress(FileNotFoundError):
            raw = self.spec.trace(rank).read_bytes()[self._read[rank] :]
            words = [line.split() for line in raw.decode().split("\n")[:-1]]
            return [Line(what, int(step), digest, float(stall)) for what, step, digest, stall in words]
        return []

    def over(self) -> list[int | None] | None:
        """Exit codes once all have ended. When one has failed the others are told to, and in the end made to."""
        if not any(process.is_alive() for process in self._ranks):
            return [process.exitcode for process in self._ranks]
        if any(process.exitcode not in (None, 0) for process in self._ranks):
            if not self._told:
                self._told = time.monotonic()
                self._each("terminate")
            elif time.monotonic() - self._told > _GRACE:
                self._each("kill")
        return None

    def kill(self) -> None:
        self._each("kill")

    def _each(self, method: str) -> None:
        for process in self._ranks:
            if process.is_alive():
                getattr(process, method)()


# -- what runs in a rank --------------------------------------------------------------------------------------------


def _train(spec: Spec, rank: int, meeting: str, point: str, agent_point: str) -> None:
    import torch
    import torch.distributed as dist

    from rekindle.common import failpoints

    torch.set_num_threads(1)
    os.environ |= {"LOCAL_WORLD_SIZE": str(spec.world), "REKINDLE_FAILPOINT": agent_point}
    failpoints.arm(point)
    os.dup2(os.open(spec.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)  # what torch has to say, too
    logging.basicConfig(level=logging.INFO, force=True, format="%(asctime)s %(message)s")
    trace = os.open(spec.trace(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=spec.world)
        _steps(spec, rank, lambda *words: os.write(trace, (" ".join(map(str, words)) + "\n").encode()))
    except BaseException:
        logging.exception("trainer failed")
        os._exit(1)
    os._exit(0)


def _build(width: int) -> tuple[dict[str, Any], Any]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    return {"model": wrapped, "optimizer": optimizer, "scheduler": scheduler}, wrapped


def _steps(spec: Spec, rank: int, say: Callable[..., object]) -> None:
    import torch
    import torch.distributed as dist

    import rekindle

    state, model = _build(spec.width)
    plain = {**state, "model": model.module}
    torch.manual_seed(rank)
    options = {"persist_seconds": 0, "overlap": True}
    ckpt = rekindle.Checkpointer(spec.root, state, memory=spec.memory, keep=3, **options)
    step = ckpt.restore()
    say("restored", step, digest_state(plain), 0.0)
    going = torch.ones(())
    with ckpt.guard(watchdog="fast"):
        while going:
            time.sleep(spec.pause)
            loss = model(torch.randn(8, spec.width)).pow(2).mean()
            state["optimizer"].zero_grad()
            loss.backward()
            going.fill_(not spec.stop.exists())
            dist.all_reduce(going, op=dist.ReduceOp.MIN)  # before the update: docs/faults.md says why
            state["optimizer"].step()
            state["scheduler"].step()
            step += 1
            digest = digest_state(plain)
            if step % _DURABLE_EVERY == 0:
                with suppress(rekindle.NotDurableError):
                    ckpt.save(step, wait="durable", timeout=_PATIENCE, pin=False)
                    say("durable", step, digest, ckpt.metrics.last_stall)
            else:
                ckpt.step(step)
            say("step", step, digest, ckpt.metrics.last_stall)
        ckpt.save(step, wait="durable", timeout=60, pin=False)
        say("durable", step, digest, ckpt.metrics.last_stall)
    ckpt.close(timeout=60)
    say("done", step, digest, ckpt.metrics.max_stall)
