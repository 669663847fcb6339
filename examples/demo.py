"""Kills a training run twice, in earnest, and shows that nothing of it is lost. Run it with ``make demo``.

``train_gpt.py`` trains on two ranks: first unbroken, then once more while one rank is killed, and later all of them;
the launcher starts them again each time. So small a state is committed inside of ``ckpt.step()``: no step may be lost
whose ``ckpt.step()`` has returned on both ranks. Both runs must end with the same weights and optimizer state, bit for
bit.
Every figure is measured: with this script's clock, at lines that Rekindle, the example and the launcher log.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from safetensors.numpy import load_file

from rekindle.cli.goodput import add_up
from rekindle.cli.incidents import make_incident_tables, summarize
from rekindle.format.names import receipt_name, root_path, step_dir
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.incidents import load_incidents
from rekindle.storage.listing import list_values
from rekindle.storage.open import open_store

EXAMPLE = Path(__file__).with_name("train_gpt.py")
RANKS, STEPS = 2, 90
PATIENCE = 20
"""Steps that a fault is put off at most, until the launcher has a spare process for a warm start."""
ROOM = 256 << 20
"""Bytes of /dev/shm without which its memory is kept elsewhere: Docker gives containers a quarter of that."""
LIMIT = 180.0
"""Seconds that any one wait may take."""

LINES = {
    "begun": re.compile(r"\[(?P<rank>\d+)\] rank \d+ of \d+, generation (?P<generation>\d+): snapshots of"),
    "restored": re.compile(r"\[(?P<rank>\d+)\] restored step (?P<step>\d+) from (?P<place>[\w ]+):"),
    "step": re.compile(r"\[(?P<rank>\d+)\] step (?P<step>\d+) loss "),
    "promised": re.compile(r"\[0\] snapshots: each is in memory when its step\(\) returns"),
    "closed": re.compile(
        r"\[(?P<rank>\d+)\] closed: .*stall median (?P<median>[\d.]+) ms, longest (?P<longest>[\d.]+)"
    ),
    "noticed": re.compile(r"all ranks are started again, restart \d+ of"),
    "ready": re.compile(r"restarts are warm from now on"),
    "cold": re.compile(r"started cold: (?P<why>.+)"),
}
"""What is read from a job's output: lines of Rekindle, of the example and, the last three, of the launcher."""


class Failed(Exception):
    """The demo can't go on."""


@dataclass(frozen=True)
class Event:
    """A line of a job's output, when it came, and during which start of the job."""

    kind: str
    at: float
    generation: int
    fields: dict[str, str]


class Run:
    """A training job under its launcher, and what its output has told so far."""

    def __init__(self, name: str, root: Path, show: Callable[[int], None]) -> None:
        self.name, self.root, self._show = name, root_path(root), show
        self.job = JobDir.of(self.root, memory_base())
        self.output: list[str] = []
        self.events: list[Event] = []
        self.generation = 0
        launcher = [sys.executable, "-m", "rekindle", "run", "--standalone", f"--nproc-per-node={RANKS}"]
        self.launcher = subprocess.Popen(
            [*launcher, EXAMPLE, root, f"--steps={STEPS}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # a CPU adds up in the same order each time
            start_new_session=True,  # Ctrl-C is for the demo, which ends the job itself
        )
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.launcher.stdout is not None
        for line in self.launcher.stdout:
            now = time.monotonic()
            with self._news:
                self.output.append(line)
                for kind, pattern in LINES.items():
                    if match := pattern.search(line):
                        self.generation = int(match.groupdict().get("generation", self.generation))
                        self.events.append(Event(kind, now, self.generation, match.groupdict()))
                self._news.notify()

    def of(self, kind: str, generation: int | None = None) -> list[Event]:
        return [event for event in self.events if event.kind == kind and generation in (None, event.generation)]

    def steps(self, rank: int, generation: int | None = None) -> list[tuple[int, float]]:
        """Steps that ``rank`` has completed, each with its time."""
        return [(int(e.fields["step"]), e.at) for e in self.of("step", generation) if e.fields["rank"] == str(rank)]

    def completed(self, generation: int | None = None) -> int:
        """The newest step that all ranks have completed: their ``ckpt.step()`` has returned."""
        return min(max((step for step, _ in self.steps(rank, generation)), default=0) for rank in range(RANKS))

    def is_ready(self) -> bool:
        """True if the launcher has a spare process, so that the next start is warm."""
        told = [event.kind for event in self.events if event.kind in ("ready", "cold")]
        return told[-1:] == ["ready"]

    def step_seconds(self) -> float:
        times = [at for _, at in self.steps(0, self.generation)]
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT
        with self._news:
            while not ready():
                self._show(self.completed())
                if not self._reader.is_alive():
                    raise Failed(f"the job ended, with exit code {self.launcher.wait(LIMIT)}, before {what}")
                if time.monotonic() > deadline:
                    raise Failed(f"{what} did not come within {LIMIT:.0f} s")
                self._news.wait(0.1)
            self._show(self.completed())

    def finish(self) -> None:
        self.wait(lambda: self.completed() >= STEPS and len(self.of("closed")) == RANKS, "the end of the training")
        if code := self.launcher.wait(LIMIT):
            raise Failed(f"the launcher ended with exit code {code}")

    def gone(self) -> bool:
        """Whether the agent has left within some seconds, and given the job's memory back."""
        deadline = time.monotonic() + 10
        while (there := self.job.path.exists()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not there

    def stop(self) -> None:
        """End what is left of a job that failed. After one that ended well there is nothing."""
        self.launcher.terminate()
        try:
            self.launcher.wait(10)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
        for pid in self.job.trainers().values():
            os.kill(pid, signal.SIGKILL)
        if agent := self.job.agent():
            os.kill(agent, signal.SIGKILL)  # its memory goes with the demo's own


@dataclass(frozen=True)
class Fault:
    """What one fault did, and what it cost."""

    name: str
    completed: int
    restored: int
    place: str
    start: str
    """How the new processes were started: "warm", or "cold" and why."""
    parts: dict[str, float]
    """Seconds, from the kill to the first new step."""

    @property
    def lost(self) -> int:
        """Steps that all ranks had completed and that had to be done again."""
        return max(0, self.completed - self.restored)


def strike(run: Run, name: str, ranks: list[int], at_step: int, say: Callable[[str], None]) -> Fault:
    """Kill ``ranks`` in the middle of a step, and see the job come back."""
    latest = at_step + PATIENCE
    run.wait(lambda: run.completed() >= (at_step if run.is_ready() else latest), f"step {at_step}")
    dying, reborn = run.generation, run.generation + 1
    victims = {rank: pid for rank, pid in run.job.trainers().items() if rank in ranks}
    if len(victims) != len(ranks):
        raise Failed(f"{name}: of ranks {ranks} only {list(victims)} are there")
    time.sleep(run.step_seconds() / 2)
    ready, killed = run.is_ready(), time.monotonic()
    for pid in victims.values():
        os.kill(pid, signal.SIGKILL)
    say(f"{name}: SIGKILL to " + " and ".join(f"rank {rank} (process {pid})" for rank, pid in victims.items()))
    run.wait(lambda: all(run.steps(rank, reborn) for rank in range(RANKS)), "the first step after the fault")
    if survivors := set(victims.values()) & set(run.job.trainers().values()):
        raise Failed(f"{name}: {survivors} still train")
    notices = [event.at for event in run.of("noticed") if event.at >= killed]
    restores = run.of("restored", reborn)
    if not notices or not restores:
        raise Failed(f"{name}: " + ("nothing was restored" if notices else "the launcher does not say what it saw"))
    moments = {
        "launcher notices": notices[0],
        "processes start": max(event.at for event in run.of("begun", reborn)),
        "restore": restores[0].at,
        "first step": max(run.steps(rank, reborn)[0][1] for rank in range(RANKS)),
    }
    times = itertools.pairwise([killed, *moments.values()])
    parts = {what: after - before for what, (before, after) in zip(moments, times, strict=True)}
    fields = restores[0].fields
    cold = [event.fields["why"] for event in run.of("cold") if event.at >= killed]
    start = f"cold: {cold[0]}" if cold else "warm" if ready else "cold: the spare was not ready"
    fault = Fault(name, run.completed(dying), int(fields["step"]), fields["place"], start, parts)
    say(f"{name}: back after {sum(parts.values()):.1f} s, at step {fault.restored} out of {fault.place}")
    return fault


def content(root: Path) -> dict[str, object]:
    """Every tensor's dtype, shape and bytes, and every other value, of all ranks at the last step, by name."""
    found: dict[str, object] = {}
    for rank in range(RANKS):
        path = root / step_dir(STEPS) / receipt_name(rank, RANKS)
        tensors = load_file(path.with_suffix(".safetensors"))  # stock safetensors: Rekindle is not its own witness
        found |= {f"{name} of rank {rank}": (t.dtype, t.shape, t.tobytes()) for name, t in tensors.items()}
        values = list_values(Receipt.decode(path.read_bytes(), path))
        found |= {f"{name} of rank {rank}": value for name, value in values}
    # The example seeds torch's generator alone; these two begin elsewhere in each run.
    return {name: value for name, value in found.items() if not name.startswith(("rng.python", "rng.numpy"))}


def compare(one: Path, other: Path) -> dict[str, bool]:
    """For each part of the final state: what was compared, and whether it is the same in both runs."""
    ours, theirs = content(one), content(other)
    parts = {"model.": "weights", "optimizer.": "optimizer state", "scheduler.": "schedule", "rng.": "random generator"}
    compared = {}
    for prefix, part in parts.items():
        names = sorted(name for name in ours.keys() | theirs.keys() if name.startswith(prefix))
        differ = [name for name in names if name not in ours or name not in theirs or ours[name] != theirs[name]]
        verdict = f"{len(differ)} differ, {differ[0]} first" if differ else "equal bit for bit"
        compared[f"{part} of both runs: {len(names)} entries, {verdict}"] = bool(names) and not differ
    return compared


def tabulate(title: str, columns: list[str], rows: dict[str, list[str]]) -> Table:
    table = Table("", title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def cost_of_faults(faults: list[Fault]) -> Table:
    rows = {
        "last completed step": [str(fault.completed) for fault in faults],
        "restored step": [str(fault.restored) for fault in faults],
        "restored from": [fault.place for fault in faults],
        "steps lost": [str(fault.lost) for fault in faults],
        "new processes started": [fault.start for fault in faults],
        "kill to first new step": [f"{sum(fault.parts.values()):.2f} s" for fault in faults],
    }
    rows |= {f"  {part}": [f"{fault.parts[part]:.2f} s" for fault in faults] for part in faults[0].parts}
    return tabulate("What the faults cost", [fault.name for fault in faults], rows)


def cost_of_saving(runs: list[Run]) -> Table:
    steps = [run.step_seconds() * 1e3 for run in runs]
    medians = [max(float(event.fields["median"]) for event in run.of("closed")) for run in runs]
    longest = [max(float(event.fields["longest"]) for event in run.of("closed")) for run in runs]
    rows = {
        "time per step": [f"{step:.0f} ms" for step in steps],
        "stall per step": [f"{stall:.1f} ms ({stall / step:.1%})" for stall, step in zip(medians, steps, strict=True)],
        "longest stall": [f"{stall:.1f} ms" for stall in longest],
    }
    return tabulate("What saving every step cost, since the last start", [run.name for run in runs], rows)


def demonstrate(directory: Path, console: Console, runs: list[Run]) -> bool:
    """Both runs, the tables and the verdict. True when all is as promised. Adds to ``runs`` what it starts."""
    bars = (
        TextColumn("{task.description:<15}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    with Progress(*bars, console=console) as progress:

        def launch(name: str) -> Run:
            bar = progress.add_task(name, total=STEPS)
            runs.append(
                Run(name, directory / name.replace(" ", "-"), lambda step: progress.update(bar, completed=step))
            )
            return runs[-1]

        unbroken = launch("unbroken run")
        unbroken.finish()
        broken = launch("run with faults")
        faults = [
            strike(broken, "one rank killed", [RANKS - 1], STEPS // 3, progress.console.print),
            strike(broken, "all ranks killed", [*range(RANKS)], STEPS * 2 // 3, progress.console.print),
        ]
        broken.finish()
    console.print(cost_of_faults(faults), cost_of_saving(runs))
    checks = {f"{f.name}: {f.lost} lost, from {f.place}": f.lost == 0 and f.place == "memory" for f in faults}
    checks["the job promised that: no step is lost that has returned"] = len(broken.of("promised")) == 1 + len(faults)
    checks |= compare(unbroken.root, broken.root)
    checks["all memory is given back"] = all([run.gone() for run in runs])
    records, _ = load_incidents(open_store(broken.root))
    incidents = [record for record in records if record.is_fault]
    console.print(
        "The job's own record, by 'rekindle incidents'", *make_incident_tables(incidents), summarize(add_up(records))
    )
    lost = [incident.lost for incident in incidents]
    checks["each fault has a record that outlives the job"] = lost == [fault.lost for fault in faults]
    for text, holds in checks.items():
        console.print("[green]ok    [/]" if holds else "[bold red]FAILED[/]", text, highlight=False)
    return all(checks.values())


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs are ended then, too
    console, runs, began = Console(), list[Run](), time.monotonic()
    roomy = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > ROOM
    tmpfs = "/dev/shm" if roomy else None  # else a plain folder does, which is only slower
    with (
        tempfile.TemporaryDirectory(prefix="rekindle-demo-") as directory,
        tempfile.TemporaryDirectory(prefix="rekindle-demo-", dir=tmpfs, ignore_cleanup_errors=True) as memory,
    ):
        os.environ["REKINDLE_MEMORY"] = memory
        try:
            good = demonstrate(Path(directory), console, runs)
        except Failed as error:
            good = False
            console.print("".join(runs[-1].output[-60:]), markup=False, highlight=False)
            console.print(f"[bold red]FAILED[/] {error}")
        finally:
            for run in runs:
                run.stop()
    console.print(f"{'All as promised' if good else 'Not as promised'}, after {time.monotonic() - began:.0f} s.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
