"""Runs a job under a launcher, strikes it, and knows when each part of its way back was done. Linux only."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scratch import Failed

__all__ = ["LAUNCHERS", "PARTS", "Launched", "split"]

_JOB = Path(__file__).with_name("recovery_job.py")
_RANKS = 2
_LIMIT = 120.0
"""Seconds that any one wait may take."""
_STEPS_BETWEEN = 3
"""Steps of each start before the next fault. At the second one a start has imported all that it uses."""

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=1000")
_REKINDLE = ("-m", "rekindle", "run", "--standalone")
_NVRX = ("-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--standalone", "--max-restarts=1000")

LAUNCHERS: dict[str, tuple[tuple[str, ...], str]] = {
    "rekindle run": (_REKINDLE, "rekindle"),
    "rekindle run --no-warm": ((*_REKINDLE, "--no-warm"), "rekindle"),
    "torchrun": (_TORCHRUN, "rekindle"),
    "torchrun, torch.save": (_TORCHRUN, "torch"),
    "NVRx ft_launcher": (_NVRX, "rekindle"),
}
"""Arguments of Python for each launcher, and whose checkpoints the script makes."""

PARTS = ("noticed", "processes gone", "processes started", "imported", "group formed", "restored", "first step")
"""Moments after a fault, in the order in which they come."""

_NOTICED = re.compile(r"fault: rank|are started again|failed \(exitcode")
"""Line by which a launcher, or a survivor that was told of the fault, shows that it knows."""
_READY, _COLD = "restarts are warm from now on", "started cold"

Moment = dict[str, Any]


class Launched:
    """A job under one launcher, from its start to its end."""

    def __init__(
        self,
        name: str,
        directory: Path,
        memory: Path,
        steps: int,
        options: object,
        *,
        job: Path = _JOB,
        ranks: int = _RANKS,
        limit: float = _LIMIT,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        """``options``: last argument of the script ``job``. ``env``: variables for it; one that is None is unset."""
        arguments, checkpoints = LAUNCHERS[name]
        self.name, self.lines = name, list[tuple[float, str]]()
        self._job, self._ranks, self._limit = job, ranks, limit
        self._warm = name == "rekindle run"
        directory.mkdir()
        memory.mkdir()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(directory / "socket"))
        self._starts: dict[int, list[dict[str, Moment]]] = {rank: [] for rank in range(ranks)}
        self._steps: dict[int, dict[int, float]] = {rank: {} for rank in range(ranks)}
        self.digests: set[tuple[int, int, str]] = set()
        """Rank, step and digest of each step that any start has made."""
        command = [sys.executable, *arguments, f"--nproc-per-node={ranks}", str(job), checkpoints]
        self._launcher = subprocess.Popen(
            [*command, str(directory / "root"), str(steps), str(options)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_environment(directory, memory, env or {}),
            cwd=directory,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes of the job, the launcher's way if it has one."""
        self._launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        self._take_all()
        for starts in self._starts.values():
            for start in starts:
                if _runs(self._job, pid := start["started"]["pid"]):
                    os.kill(pid, signal.SIGKILL)
        self._launcher.wait()
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        for line in self._launcher.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    # -- what the ranks tell --------------------------------------------------------------------------------------

    def _take(self, message: Moment) -> None:
        rank, kind = message["rank"], message["kind"]
        if kind == "started":
            self._starts[rank].append({})
        if kind == "digest":
            self.digests.add((rank, message["step"], message["digest"]))
            return
        self._starts[rank][-1].setdefault(kind, message)  # of steps the first
        if kind == "step":
            self._steps[rank][message["step"]] = message["at"]

    def _take_all(self, seconds: float = 0.0, watched: tuple[int, ...] = ()) -> list[int]:
        """Takes what has been told, after ``seconds`` at most. Returns those of ``watched`` that have ended."""
        ready, _, _ = select.select([self._socket, *watched], [], [], seconds)
        while select.select([self._socket], [], [], 0)[0]:
            self._take(json.loads(self._socket.recv(1 << 12)))
        return [descriptor for descriptor in ready if descriptor in watched]

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._limit
        while not ready():
            ended = self._launcher.poll() is not None
            self._take_all(0 if ended else 0.1)
            if ended and not ready():
                raise Failed(f"{self.name} ended with {self._launcher.returncode} before {what}:\n{self._said()}")
            if time.monotonic() > deadline:
                raise Failed(f"{self.name}: {what} did not come within {self._limit:.0f} s:\n{self._said()}")

    def _said(self) -> str:
        return "\n".join(line for _, line in self.lines[-40:])

    def _completed(self) -> int:
        """The newest step that all ranks have completed."""
        return min(max(steps, default=0) for steps in self._steps.values())

    def _step_seconds(self) -> float:
        times = sorted(self._steps[0].values())[-2 * _STEPS_BETWEEN :]
        return statistics.median(b - a for a, b in itertools.pairwise(times))

    def _is_ready(self) -> bool:
        """True if this launcher has its spare, or has none at all."""
        if not self._warm:
            return True
        told = [text for _, text in list(self.lines) if _READY in text or _COLD in text]
        return bool(told) and _READY in told[-1]

    # -- striking -------------------------------------------------------------------------------------------------

    def run_to(self, step: int) -> None:
        """Wait until all ranks have completed ``step``."""
        self._wait(lambda: self._completed() >= step, f"step {step}")

    def wait_for_end(self) -> None:
        """Wait until the job has ended by itself, and well. Raises Failed."""
        try:
            code = self._launcher.wait(self._limit)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.name} does not end") from None
        self._take_all()
        if code:
            raise Failed(f"{self.name} ended with {code}:\n{self._said()}")

    def strike(self, ranks: tuple[int, ...]) -> dict[str, Any]:
        """Kill ``ranks`` in the middle of a step. Returns what each part of the way back took, and what was lost."""
        settled = self._completed() + _STEPS_BETWEEN
        self._wait(lambda: self._completed() >= settled and self._is_ready(), "the time for a fault")
        old = {rank: starts[-1]["started"]["pid"] for rank, starts in self._starts.items()}
        before = {rank: len(starts) for rank, starts in self._starts.items()}
        watched = {os.pidfd_open(pid) for pid in old.values()}
        time.sleep(self._step_seconds() / 2)
        self._take_all()
        completed, killed = self._completed(), time.monotonic()
        for rank in ranks:
            os.kill(old[rank], signal.SIGKILL)
        gone = self._wait_until_back(watched, before)
        new = [starts[-1] for starts in self._starts.values()]
        notices = [at for at, line in list(self.lines) if at > killed and _NOTICED.search(line)]
        moments = [min(notices, default=gone), gone]
        moments += [max(start[kind]["at"] for start in new) for kind in ("started", "imported", "grouped", "restored")]
        moments.append(max(start["step"]["at"] for start in new))
        return {
            "parts": dict(zip(PARTS, split(killed, moments), strict=True)),
            "seconds": moments[-1] - killed,
            "warm": all(start["started"]["warm"] for start in new),
            "lost": max(0, completed - new[0]["restored"]["step"]),
            "restored": {rank: starts[-1]["restored"] for rank, starts in self._starts.items()},
            "starts": max(len(starts) - before[rank] for rank, starts in self._starts.items()),
        }

    def _wait_until_back(self, watched: set[int], before: dict[int, int]) -> float:
        """Waits for a new start's first step on all ranks. Returns the time at which the last old one had ended."""
        gone, deadline = 0.0, time.monotonic() + self._limit
        while not all(len(s) > before[rank] and "step" in s[-1] for rank, s in self._starts.items()):
            for descriptor in self._take_all(0.1, tuple(watched)):
                gone = time.monotonic()
                watched.discard(descriptor)
                os.close(descriptor)
            if self._launcher.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"{self.name} did not come back after a fault:\n{self._said()}")
        for descriptor in watched:
            os.close(descriptor)
        if watched:
            raise Failed(f"{self.name}: the ranks were started again while old ones still ran")
        return gone


def _environment(directory: Path, memory: Path, more: Mapping[str, str | None]) -> dict[str, str]:
    own: dict[str, str | None] = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # torchrun's own choice, made for all
        "RECOVERY_SOCKET": str(directory / "socket"),
        "REKINDLE_MEMORY": str(memory),
        "TMPDIR": str(directory),
        # Without this, plain torchrun's restarted ranks meet the addresses of dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return {key: value for key, value in {**os.environ, **own, **more}.items() if value is not None}


def split(began: float, moments: list[float]) -> list[float]:
    """Returns the seconds of each moment after all those before it: one that comes early takes none."""
    parts, reached = [], began
    for moment in moments:
        parts.append(max(0.0, moment - reached))
        reached = max(reached, moment)
    return parts


def _runs(job: Path, pid: int) -> bool:
    """True if a process with this id still runs this benchmark's training: ids are used again."""
    try:
        return str(job).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
