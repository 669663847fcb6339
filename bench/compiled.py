"""The first step of a compiled model after a restart, with and without a compile cache: ``python bench/compiled.py``.

``examples/train_gpt.py --compile`` trains under ``rekindle run --compile-cache --no-warm``, one rank. Its first step is
timed from the end of the restore to the line that it logs. It needs a C++ compiler. Linux only.
"""

from __future__ import annotations

import json
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
from pathlib import Path

import click
from machine import describe
from rich.console import Console
from rich.table import Table

from rekindle.format.names import root_path
from rekindle.memory.job_dir import JobDir, memory_base

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
_LIMIT = 900.0
"""Seconds that any wait may take: a compilation on a busy machine is slow."""
_STEP = re.compile(r"\[0\] step (\d+) loss ")
_READY = re.compile(r"\[0\] (restored step|nothing to restore)")
CASES = (
    "not compiled",
    "compiled, nothing cached",
    "restart on the same node",
    "start on a fresh node, from storage",
    "start on a fresh node, without a cache",
)


class Job:
    """One ``rekindle run`` of the example, and the time of each line that matters."""

    def __init__(self, directory: Path, *, compiled: bool = True, cached: bool = True) -> None:
        self._root = directory / "root"
        self._memory = directory / "memory"
        self._memory.mkdir(exist_ok=True)
        self.job = JobDir.of(root_path(self._root), memory_base(self._memory))
        cache = [f"--compile-cache={self._root}"] if cached else []
        script = [str(_EXAMPLE), str(self._root), "--steps=1000000", *(["--compile"] if compiled else [])]
        # Else torch caches in the directory of temporary files, from one case to the next.
        elsewhere = {} if cached else {"TORCHINDUCTOR_CACHE_DIR": str(directory / "unshared")}
        self._lines: list[tuple[float, str]] = []
        self._ended = False
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rekindle", "run", "--standalone", "--no-warm", *cache, *script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "REKINDLE_MEMORY": str(self._memory), "CUDA_VISIBLE_DEVICES": "", **elsewhere},
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._lines.append((time.monotonic(), line))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def first_step(self, start: int = 0) -> float:
        """Seconds of the first step of the launcher's ``start``, the first of which is 0."""
        with self._news:
            self._news.wait_for(lambda: self._ended or len(self._steps_of(start)) > 2, _LIMIT)
            if len(self._steps_of(start)) < 2:
                raise SystemExit("".join(line for _, line in self._lines[-30:]))
            return self._steps_of(start)[1] - self._steps_of(start)[0]

    def _steps_of(self, start: int) -> list[float]:
        """Times: of the end of a start's restore, and of each of its steps."""
        begun = [index for index, (_, line) in enumerate(self._lines) if _READY.search(line)]
        if len(begun) <= start:
            return []
        lines = self._lines[begun[start] :]
        return [lines[0][0], *(at for at, line in lines if _STEP.search(line))]

    def kill_rank(self) -> None:
        os.kill(self.job.trainers()[0], signal.SIGKILL)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        """End the job, and what is left of it in memory: its agent carries what has been compiled."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(_LIMIT)
        told = [sys.executable, "-m", "rekindle", "stop", str(self._root), "--memory", str(self._memory)]
        subprocess.run(told, check=False, capture_output=True)
        shutil.rmtree(self._memory, ignore_errors=True)


def _measure(directory: Path) -> dict[str, float]:
    """One round: seconds of the first step in each case."""
    found: dict[str, float] = {}

    def note(case: str, seconds: float) -> None:
        found[case] = seconds
        click.echo(f"{case}: {seconds:.2f} s", err=True)  # the next one may take minutes

    with Job(directory / "plain", compiled=False) as job:
        note(CASES[0], job.first_step())
    here = directory / "cached"
    with Job(here) as job:
        note(CASES[1], job.first_step())
        job.kill_rank()
        note(CASES[2], job.first_step(1))
    if not list((here / "root").glob("compile/*/*.json")):
        raise SystemExit("nothing was carried to storage")
    for case, cached in ((CASES[3], True), (CASES[4], False)):
        with Job(here, cached=cached) as job:
            note(case, job.first_step())
    return found


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--rounds", type=click.IntRange(1), default=3, help="Times that each case has its turn.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for every sample.")
def main(rounds: int, output: Path | None) -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise click.UsageError("torch.compile on the CPU needs a C++ compiler")
    rows: list[dict[str, float]] = []
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-", dir=parent) as place:
        machine = describe(Path(place), Path(place), os.cpu_count() or 1)
        for number in range(rounds):
            directory = Path(place) / str(number)
            for name in ("plain", "cached"):
                (directory / name).mkdir(parents=True)
            rows.append(_measure(directory))
    if output is not None:
        output.write_text(json.dumps({"machine": machine, "rounds": rows}, indent=1) + "\n")
    table = Table("", "first step, s (median)", "from", "to")
    for case in CASES:
        seconds = [row[case] for row in rows]
        table.add_row(case, *(f"{value:.2f}" for value in (statistics.median(seconds), min(seconds), max(seconds))))
    Console(width=None if sys.stdout.isatty() else 120).print(f"{rounds} rounds", table)


if __name__ == "__main__":
    main()
