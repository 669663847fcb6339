"""A small cluster that trains for real, is struck by a fault at a chosen moment, and starts anew by itself.

It does what torchrun does: starts the ranks, ends all of them when one has failed, starts them again. Trainers are
forked from a server that has torch loaded, so a cell of the matrix takes seconds.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle.faults.inject import inject_fault
from rekindle.format.names import root_path
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.status import SECURED, STAGES, read_status
from tests.faults.harness import digest_state, end_agent, take_away
from tests.fork_server import context

FAULTS = (
    "exception",
    "kill",
    "term",
    "term-all",
    "stop",
    "loop",
    "block",
    "kill-two",
    "kill-in-gasp",
    "agent-kill",
)
HELD = "term-all-held"
"""SIGTERM to all ranks, of which none gets past the step: for ranks that can't see where the others are."""
TWO_DIE = ("kill-two", "kill-in-gasp")
MOMENTS = (
    "forward",
    "backward",
    "all-reduce",
    "update-first",
    "update-second",
    "before-step",
    "copying",
)
CONFIGS = ("ddp", "zero", "bare")
"""DDP with a snapshot at every step; DDP with ZeRO-1 over replica groups; DDP without snapshots.

One more, "hsdp", is fully_shard over a mesh of replicas and shards, without snapshots; it has no "all-reduce"."""

_POLL = 0.1
"""torchrun's."""
_GRACE = 30.0
"""torchrun's too."""
WIDTH = 32


@dataclass(frozen=True)
class Cell:
    """One experiment."""

    root: Path
    memory: Path
    config: str = "ddp"
    fault: str = ""
    moment: str = ""
    world: int = 2
    steps: int = 14
    at: int = 9
    """The step during which the fault strikes: the state is that of the one before."""
    victim: int = 1
    width: int = WIDTH
    pause: float = 0.02
    """Seconds of a forward, beside its work."""
    cgroup: Path | None = None
    """Where the victim of an ``oom`` trains: a control group with little memory."""
    evaluate: float = 0.0
    """Seconds that the victim evaluates at the step of the fault, which it declares."""
    memory_goes: bool = False
    """Somebody removes the memory store just before the fault."""
    options: dict[str, Any] = field(default_factory=dict)
    """For the Checkpointer, beside those of the configuration."""

    @property
    def second(self) -> int:
        """Who dies in its gasp."""
        return (self.victim + 1) % self.world

    @property
    def job(self) -> JobDir:
        return JobDir.of(root_path(self.root), self.memory / f"rekindle-{os.getuid()}")

    def trace(self, rank: int) -> Path:
        return self.root.parent / f"{self.root.name}-rank{rank}.trace"

    def log(self, rank: int) -> Path:
        return self.root.parent / f"{self.root.name}-rank{rank}.log"


@dataclass
class Outcome:
    """What came of a cell. Times in seconds, from the moment of the fault."""

    codes: list[list[int | None]] = field(default_factory=list)
    """Exit codes of each start's ranks."""
    cause: str = ""
    what: str = ""
    noticed: float = -1.0
    secured: float = -1.0
    """When the last survivor had secured its state."""
    gone: float = -1.0
    """When the last process of the struck start had ended."""
    again: float = -1.0
    """When the first new step was complete."""
    reached: int = -1
    """Newest step that every rank had completed before the fault."""
    resumed: int = -1
    stages: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    """What the ranks, and the agent, had to say."""

    @property
    def lost(self) -> int:
        return self.reached - self.resumed


def run(cell: Cell, starts: int = 3, timeout: float = 150.0) -> Outcome:
    """Train to the end, whatever it takes."""
    out = Outcome()
    deadline = time.monotonic() + timeout
    for attempt in range(starts):
        out.codes.append(start(cell, attempt, deadline))
        if attempt == 0 and cell.fault:
            _observe(cell, out)
        if all(code == 0 for code in out.codes[-1]):
            break
    _conclude(cell, out)
    end_agent(cell.job)  # a job without snapshots leaves memory behind, and an agent that waits for it to come back
    return out


def start(cell: Cell, attempt: int, deadline: float) -> list[int | None]:
    """One start of the job, from its first process to its last one's end. Exit codes."""
    meeting = cell.root.parent / f"{cell.root.name}-meeting-{attempt}"
    ranks = [context.Process(target=_train, args=(cell, rank, attempt, str(meeting))) for rank in range(cell.world)]
    for process in ranks:
        process.start()
    return _finish(ranks, deadline)


def _finish(ranks: list[Any], deadline: float) -> list[int | None]:
    told = 0.0
    while any(p.is_alive() for p in ranks):
        assert time.monotonic() < deadline, "a trainer hangs"
        failed = any(p.exitcode not in (None, 0) for p in ranks)
        if failed and not told:
            told = time.monotonic()
            for process in ranks:
                if process.is_alive():
                    process.terminate()
        if told and time.monotonic() - told > _GRACE:
            for process in ranks:
                process.kill()
        time.sleep(_POLL if not told else 0.005)
    return [p.exitcode for p in ranks]


def lines_of(cell: Cell, rank: int) -> list[list[str]]:
    """``[time, what, value...]`` as the rank wrote it down."""
    path = cell.trace(rank)
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def _observe(cell: Cell, out: Outcome) -> None:
    """Look at what the struck start left, before the next one writes over it."""
    now = time.monotonic()
    struck = [float(line[0]) for r in range(cell.world) for line in lines_of(cell, r) if line[1] == "fault"]
    assert struck, "the fault did not strike: " + cell.log(cell.victim).read_text()[-2000:]
    out.gone = now - struck[0]
    if cell.fault == "kill-in-gasp":
        assert any(line[1] == "gasping" for line in lines_of(cell, cell.second)), "nobody was killed in its gasp"
    out.logs = [cell.log(rank).read_text()[-8000:] for rank in range(cell.world)]
    with suppress(OSError):
        out.logs.append(cell.job.paths.agent_log.read_text()[-8000:])
    with suppress(OSError, ValueError):
        fault = json.loads(cell.job.paths.fault.read_bytes())
        out.cause, out.what, out.noticed = fault["cause"], fault["what"], fault["noticed"] - struck[0]
    out.reached = min(_completed(lines_of(cell, rank)) for rank in range(cell.world))
    pages = []
    for rank in range(cell.world):
        with suppress(FileNotFoundError):  # nobody had anything in memory: the agent gives it back
            pages.append(read_status(cell.job.paths.status_page(rank)))
    out.stages = [STAGES[page.stage] for page in pages]
    secured = [page.progress / 1e9 for page in pages if page.stage == SECURED]
    out.secured = max(secured) - struck[0] if secured else -1.0


def _completed(lines: list[list[str]]) -> int:
    """Newest step that a rank completed in its first start."""
    restored = [i for i, line in enumerate(lines) if line[1] == "restored"]
    first = lines[: restored[1]] if len(restored) > 1 else lines
    return max((int(line[2]) for line in first if line[1] == "step"), default=0)


def read_traces(cell: Cell) -> Outcome:
    """Tells from what the ranks wrote down how a run has gone that another launcher brought to its end."""
    out = Outcome()
    out.reached = min(_completed(lines_of(cell, rank)) for rank in range(cell.world))
    _conclude(cell, out)
    return out


def _conclude(cell: Cell, out: Outcome) -> None:
    for rank in range(cell.world):
        lines = lines_of(cell, rank)
        assert lines and lines[-1][1] == "done", f"rank {rank}: {out.codes}\n{cell.log(rank).read_text()[-3000:]}"
        out.digests.append(lines[-1][2])
    lines = lines_of(cell, 0)
    restored = [i for i, line in enumerate(lines) if line[1] == "restored"]
    if cell.fault and len(restored) > 1:
        out.resumed = int(lines[restored[1]][2])
        struck = min(float(line[0]) for r in range(cell.world) for line in lines_of(cell, r) if line[1] == "fault")
        again = [float(line[0]) for line in lines[restored[1] :] if line[1] == "step"]
        out.again = again[0] - struck if again else -1.0


# -- what runs in a rank --------------------------------------------------------------------------------------------


class _Trainer:
    def __init__(self, cell: Cell, rank: int, attempt: int, trace: int) -> None:
        self.cell, self.rank, self.trace = cell, rank, trace
        self.armed = attempt == 0
        self.step = 0
        self.pids = [0] * cell.world
        self.ckpt: Any = None

    def say(self, *words: object) -> None:
        os.write(self.trace, (" ".join(map(str, (time.monotonic(), *words))) + "\n").encode())

    def at(self, moment: str) -> None:
        """The moment has come."""
        cell = self.cell
        if self.armed and moment == cell.moment and self.step == cell.at and self.rank == cell.victim:
            self.armed = False
            self.strike(cell.fault)

    def strike(self, fault: str) -> None:
        if fault == "agent-kill":
            with suppress(TypeError, ProcessLookupError):
                os.kill(self.cell.job.agent() or 0, signal.SIGKILL)
        if self.cell.memory_goes:
            take_away(self.cell.job.path)
        self.say("fault", fault)
        if fault == "exception":
            raise RuntimeError("a fault on purpose")
        if fault == "kill-two":
            other = next(pid for pid in self.pids if pid != os.getpid())
            os.kill(other, signal.SIGKILL)
        if fault in ("kill", "kill-two", "kill-in-gasp", "agent-kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        if fault in ("term-all", HELD):
            for pid in self.pids:
                os.kill(pid, signal.SIGTERM)
        if fault == HELD:
            time.sleep(2.0)  # by then every rank has heard of it, and none could get past this step
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "oom":
            inject_fault("oom")
        if fault == "loop":
            while True:
                pass
        if fault == "block":
            import torch.distributed as dist

            dist.barrier()  # nobody else comes

    def in_gasp(self, _: object) -> None:
        if self.cell.fault == "kill-in-gasp" and self.rank == self.cell.second:
            self.say("gasping")
            os.kill(os.getpid(), signal.SIGKILL)


def _build(trainer: _Trainer, rank: int) -> tuple[dict[str, Any], Any]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    cell = trainer.cell
    width = cell.width
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
    )
    model[4].register_forward_pre_hook(lambda *_: trainer.at("forward"))
    # Looking for unused parameters keeps DDP from making its buckets anew after the first step of each start: with
    # more than two ranks the order of a sum, and so its last bit, depends on where in a bucket a gradient lies.
    wrapped: Any = model
    if cell.config == "hsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, cell.world // 2), mesh_dim_names=("replicate", "shard"))
        for part in (model[0], model[3], model[5], model):
            fully_shard(part, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001, find_unused_parameters=True)
    if cell.config == "hsdp":  # whose weights take no part in backward(): what is gathered from them does
        model[1].register_full_backward_hook(lambda *_: trainer.at("backward"))
    else:
        model[3].weight.register_hook(lambda grad: trainer.at("backward"))

    def reduce(group: Any, bucket: Any) -> Any:
        future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        trainer.at("all-reduce")
        return future.then(lambda done: done.value()[0] / cell.world)

    reduce.__annotations__.clear()  # torch insists on seeing types, not their names
    if wrapped is not model:
        wrapped.register_comm_hook(None, reduce)

    class Halves(torch.optim.AdamW):
        """AdamW that tells where in its update it is."""

        def _init_group(self, group: dict[str, Any], *args: Any) -> Any:
            if group is self.param_groups[1]:
                trainer.at("update-first")
            if group is self.param_groups[-1]:
                trainer.at("update-second")
            return super()._init_group(group, *args)

    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[1], model[3], model[5])]
    if cell.config == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        import rekindle

        half = rekindle.replica_groups(dist.group.WORLD, copies=2)
        optimizer: Any = ZeroRedundancyOptimizer(groups, Halves, process_group=half.group, lr=1e-2)
    else:
        optimizer = Halves(groups, lr=1e-2)
    state = {
        "model": model if cell.config == "bare" else wrapped,  # what is a replica of what is known either way
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
    }
    return state, wrapped


def _one_step(trainer: _Trainer, state: dict[str, Any], model: Any) -> None:
    import torch

    time.sleep(trainer.cell.pause)
    loss = model(torch.randn(8, trainer.cell.width)).pow(2).mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["scheduler"].step()
    trainer.at("before-step")


def _train(cell: Cell, rank: int, attempt: int, meeting: str) -> None:
    """Trains a cell, and ends this process."""
    try:
        train(cell, rank, attempt, meeting)
    except BaseException:
        logging.exception("trainer failed")
        os._exit(1)
    os._exit(0)


def train(cell: Cell, rank: int, attempt: int, meeting: str = "") -> None:
    """Trains a cell in this process, a rank of it. The ranks meet in a file, else as torchrun has told them."""
    import torch
    import torch.distributed as dist

    import rekindle

    torch.set_num_threads(1)
    os.environ |= {"LOCAL_WORLD_SIZE": str(cell.world)}
    os.dup2(os.open(cell.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)  # what torch has to say, too
    logging.basicConfig(level=logging.INFO, force=True, format="%(asctime)s %(message)s")
    trainer = _Trainer(cell, rank, attempt, os.open(cell.trace(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    if cell.cgroup is not None and rank == cell.victim and attempt == 0:
        (cell.cgroup / "cgroup.procs").write_text(str(os.getpid()))
    how = f"file://{meeting}" if meeting else "env://"
    dist.init_process_group("gloo", init_method=how, rank=rank, world_size=cell.world)
    dist.all_gather_object(trainer.pids, os.getpid())
    state, model = _build(trainer, rank)
    torch.manual_seed(rank)
    every = 10**9 if cell.config in ("bare", "spaced", "hsdp") else 1
    options = {"memory": cell.memory, "snapshot_every": every, "persist_every": 10**9, "overlap": True}
    options |= cell.options
    trainer.ckpt = ckpt = rekindle.Checkpointer(cell.root, state, **options)
    start = ckpt.restore()
    trainer.say("restored", start)
    hooks = {"on_stop": trainer.in_gasp, "on_gasp": trainer.in_gasp}
    watchdog = 60.0 if cell.fault == "oom" else "fast"  # with little of a processor it takes memory for seconds
    with ckpt.guard(watchdog=watchdog, fence=cell.config in ("bare", "hsdp"), **hooks) as guard:
        assert guard.connected(30) or "memory" in cell.options, "no agent"
        dist.barrier()
        for step in range(start + 1, cell.steps + 1):
            trainer.step = step
            if cell.evaluate and step == cell.at and rank == cell.victim:
                with ckpt.pause_watchdog("evaluation"):
                    time.sleep(cell.evaluate)
            _one_step(trainer, state, model)
            ckpt.step(step)
            trainer.say("step", step)
            trainer.at("copying")
        if cell.evaluate:
            trainer.say(
                "pause",
                read_status(JobDir.of(cell.root, memory_base(cell.memory)).paths.status_page(rank)).pause,
            )
    ckpt.close(timeout=30)
    plain = {**state, "model": getattr(model, "module", model)}
    if cell.config == "zero":
        plain["optimizer"] = state["optimizer"].optim
    trainer.say("done", digest_state(plain) + f"-{torch.randint(1 << 30, ()).item()}")
