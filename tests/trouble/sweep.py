"""Every call of a save, its drain and its tidying, failing in turn: what must hold meanwhile, and afterwards.

``Worker`` runs cells in a process of its own, into which ``faults.c`` is loaded. It is trainer and agent in one thread,
so that the calls come in the same order each time.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ERRORS", "KINDS", "PLACES", "Cell", "Outcome", "Worker", "build"]

KINDS = (
    *("open-write", "open-read", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "allocate", "list", "stat"),
    *("mmap", "read", "lock"),
)
PLACES = ("storage", "memory")
ERRORS = {
    "open-write": (errno.EMFILE, errno.EACCES),
    "write": (errno.ENOSPC, errno.EIO, 0),  # 0: half of it is written, or read
    "read": (errno.EIO, 0),
    "allocate": (errno.ENOSPC,),
    "mkdir": (errno.ENOSPC, errno.EROFS),
    "rename": (errno.EIO, errno.EROFS),
    "mmap": (errno.ENOMEM,),
    "lock": (errno.ENOLCK,),
}
_CONTROL = struct.Struct("7I14I400s")


@dataclass(frozen=True)
class Cell:
    """One call of a kind that fails: the ``nth``, or all from the ``nth`` on; none if that is 0."""

    place: str
    kind: str
    error: int
    nth: int
    lasting: bool

    def __str__(self) -> str:
        name = errno.errorcode[self.error] if self.error else "half"
        return f"{self.place} {self.kind} {name} {'from ' if self.lasting else ''}{self.nth}"


@dataclass
class Outcome:
    calls: int = 0
    """Calls of the kind that were made while faults could strike."""
    fired: int = 0
    wrong: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)


class Control:
    """What ``faults.c`` looks at."""

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(_CONTROL.size))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _CONTROL.size)

    def set(self, cell: Cell, prefix: str) -> None:
        values = [0, KINDS.index(cell.kind), cell.error, cell.nth, int(cell.lasting), int(not cell.error), 0]
        self._map[:] = _CONTROL.pack(*values, *[0] * len(KINDS), prefix.encode())

    def arm(self, on: bool) -> None:
        self._map[:4] = struct.pack("I", on)

    def counts(self) -> tuple[int, tuple[int, ...]]:
        values = _CONTROL.unpack(self._map[:])
        return values[6], values[7 : 7 + len(KINDS)]


def build(directory: Path) -> Path | None:
    """The library that lets calls fail; None where it can't be had."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = directory / "faults.so"
    source = Path(__file__).with_name("faults.c")
    done = subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], capture_output=True, check=False
    )
    return library if done.returncode == 0 else None


class Worker:
    """A process in which calls fail on demand."""

    def __init__(self, directory: Path, library: Path) -> None:
        control = directory / f"control-{time.monotonic_ns()}"
        Control(control, create=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trouble.sweep", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "LD_PRELOAD": str(library), "REKINDLE_FAULTS": str(control), "OMP_NUM_THREADS": "1"},
        )

    def play(self, cell: Cell) -> Outcome:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(cell)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return Outcome(**json.loads(line)) if line else Outcome(wrong=["the process died"])

    def cells(self, place: str, kind: str, every: int, offset: int = 0) -> Iterator[Cell]:
        """Cells of one kind: of all calls that the unbroken run makes, each ``every``-th."""
        calls = self.play(Cell(place, kind, errno.EIO, 0, False)).calls
        number = offset
        for error in ERRORS.get(kind, (errno.EIO,)):
            for lasting in (False, True):
                for nth in range(1, calls + 1):
                    number += 1
                    if number % every == 0:
                        yield Cell(place, kind, error, nth, lasting)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(20)


# -- in that process -------------------------------------------------------------------------------------------------


class _Job:
    """One training job, whose agent is played by the same thread."""

    def __init__(self, place: Path) -> None:
        import torch

        import rekindle
        from rekindle.agent.drain import Drainer
        from rekindle.memory.job_dir import JobDir, memory_base
        from rekindle.memory.lock import Lock

        self.root, self.base = place / "run", memory_base(place / "memory")
        self.job = JobDir.of(self.root, self.base)
        self.job.create()
        self.lock = Lock(self.job.paths.agent_lock)
        assert self.lock.acquire()
        self.weights = torch.zeros(5000)
        self.values = rekindle.Values(weights=self.weights)
        self.ckpt = rekindle.Checkpointer(
            self.root,
            {"values": self.values},
            memory=place / "memory",
            keep=1,
            persist_seconds=0,
            fallback_after=1e-6,
        )
        self.ckpt.restore()
        self.drainer = Drainer(self.job)

    def step(self, n: int) -> None:
        import torch

        if n == 3:  # now the files in memory have to grow
            self.weights = self.values.weights = torch.zeros(9000)
        self.weights.fill_(n)
        self.ckpt.step(n)
        self.ckpt._saver.conclude()
        self.ckpt._saver.finish_direct()

    def drain(self) -> None:
        self.drainer._retry_at = 0.0
        self.drainer.tick()

    def sound(self, newest: int) -> list[str]:
        """What is wrong with what is on storage."""
        from rekindle.storage.catalog import find_copies
        from rekindle.storage.posix import PosixStore
        from rekindle.storage.verify import verify

        wrong = []
        copies = find_copies(None, PosixStore(self.root))
        if (copies[0].step if copies else 0) < newest:
            wrong.append(f"step {newest} was durable, and is not there")
        for copy in copies:
            wrong += [f"published, and damaged: {problem}" for problem in verify(copy)]
        return wrong

    def garbage(self, step: int) -> list[str]:
        there = sorted(str(path.relative_to(self.root)) for path in self.root.glob("step-*/**/*") if path.is_file())
        names = ("checkpoint.json", "shard-00000-of-00001.json", "shard-00000-of-00001.safetensors")
        wanted = [f"step-{step:010d}/{name}" for name in names]
        wrong = [] if there == wanted else [f"storage has {set(there) ^ set(wanted)}"]
        wrong += [f"storage has {p.name}" for p in self.root.glob("*step-*") if p.name != f"step-{step:010d}"]
        temporary = [path.name for path in self.job.path.rglob("*.tmp")]
        return wrong + [f"memory has {name}" for name in temporary]


class _Alarms(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@contextmanager
def _alarms() -> Iterator[list[str]]:
    handler, log = _Alarms(), logging.getLogger("rekindle")
    log.addHandler(handler)
    try:
        yield handler.seen
    finally:
        log.removeHandler(handler)


def _play(cell: Cell, control: Control, place: Path) -> Outcome:
    outcome = Outcome()
    with _alarms() as alarms:
        job = _Job(place)
        try:
            job.step(1)
            job.drain()
            control.set(cell, str(job.root if cell.place == "storage" else job.job.path))
            _strike(job, control, outcome)
            outcome.fired, counts = control.counts()
            outcome.calls = counts[KINDS.index(cell.kind)]
            _heal(job, outcome)
        finally:
            control.arm(False)
            job.lock.release()
            job.ckpt._saver.close()
    outcome.alarms = [alarm for alarm in alarms if "memory_limit is" not in alarm]  # the last look's own
    if cell.error and outcome.alarms and not any(_advises(alarm) for alarm in outcome.alarms):
        outcome.wrong.append(f"no alarm says what to do: {alarms}")
    return outcome


def _advises(alarm: str) -> bool:
    from rekindle.common.os_errors import _ADVICE

    return any(what in alarm for what in (*_ADVICE.values(), "see that it can be read", "free some of it"))


def _strike(job: _Job, control: Control, outcome: Outcome) -> None:
    durable = 1
    for step in (2, 3, 4):
        for what in (lambda step=step: job.step(step), job.drain):  # type: ignore[misc]
            control.arm(True)
            try:
                what()
            except BaseException as error:
                outcome.wrong.append(f"step {step}: {type(error).__name__}: {error}")
            finally:
                control.arm(False)
            durable = max(durable, job.drainer.progress.durable or 0)
            outcome.wrong += job.sound(durable)


def _heal(job: _Job, outcome: Outcome) -> None:
    import torch

    import rekindle
    from rekindle.storage.catalog import find_copies

    for step in (5, 6):
        job.step(step)
        job.drain()
    for _ in range(5):
        job.drain()
    metrics = job.ckpt.metrics
    outcome.wrong += job.sound(6) + job.garbage(6)
    if metrics.failed:
        outcome.wrong.append(f"{metrics.failed} saves failed though one store was well")
    if metrics.memory_lost != metrics.memory_back or not any(c.step == 6 for c in find_copies(job.job, None)):
        outcome.wrong.append(f"memory was lost {metrics.memory_lost} times and came back {metrics.memory_back} times")
    if job.drainer.progress.error:
        outcome.wrong.append(f"the drain still complains: {job.drainer.progress.error}")
    job.ckpt.close(timeout=5)
    job.lock.release()
    if not job.job.remove():
        outcome.wrong.append("the memory is not given back")
    again = {"values": rekindle.Values()}
    last = rekindle.Checkpointer(job.root, again, memory=job.base.parent, strict=False, memory_limit=1)
    if last.restore() != 6 or not torch.equal(again["values"].weights, job.weights):
        outcome.wrong.append("what is restored differs")
    last.close()


def main() -> None:
    import torch

    import rekindle

    gc.disable()  # what a call that failed has held must be given back at once
    assert rekindle.Checkpointer and torch.set_num_threads(1) is None
    logging.getLogger("rekindle").propagate = False
    control = Control(Path(os.environ["REKINDLE_FAULTS"]))
    for line in sys.stdin:
        cell = Cell(**json.loads(line))
        place = Path(tempfile.mkdtemp(prefix="cell-", dir=sys.argv[1]))
        try:
            outcome: Any = _play(cell, control, place)
        except BaseException as error:
            outcome = Outcome(wrong=[f"{type(error).__name__}: {error}"])
        shutil.rmtree(place, ignore_errors=True)
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
