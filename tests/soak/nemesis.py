"""What befalls the job: a fault of each kind, and how it heals. Real signals, real full disks, real flipped bits."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from rekindle.common.failpoints import POINTS
from tests.soak.job import Spec, Start

__all__ = ["AGENT_POINTS", "FAULTS", "RANK_POINTS", "Places", "flip", "mounted"]

_HURT = 4.0
"""Seconds that what can heal goes on."""


@dataclass(frozen=True)
class Places:
    """Where the job's files are. ``mounts`` tells whether the two are file systems of their own."""

    spec: Spec
    mounts: bool


@contextmanager
def mounted(place: Path) -> Iterator[Places]:
    """A small tmpfs for memory, and a small ext4 for storage; where those can't be mounted, plain directories."""
    memory, storage, image = place / "memory", place / "storage", place / "image"
    memory.mkdir()
    storage.mkdir()
    with open(image, "wb") as file:
        file.truncate(192 << 20)
    commands = (
        ["mount", "-t", "tmpfs", "-o", "size=160m,mode=700", "tmpfs", str(memory)],
        ["mkfs.ext4", "-q", "-F", str(image)],
        ["mount", "-o", "loop", str(image), str(storage)],
    )
    done = [_run(command) for command in commands]
    try:
        yield Places(Spec(place, storage / "run", memory), all(done))
    finally:
        for log in memory.glob("*/*/agent.log"):  # the ranks' are in place
            shutil.copy(log, place)
        for path in (storage, memory):
            _run(["umount", "-l", str(path)])


def _run(command: list[str]) -> bool:
    with suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


@dataclass(frozen=True)
class Fault:
    """``strike`` returns when the fault is over, or the job has it.

    memory
        Whether what memory holds is still to be relied on.
    ends
        Whether the job ends by it, to be started anew.
    steps
        Completed steps that it may cost, where memory is to be relied on.
    damages
        Whether a bit of the newest checkpoint on storage flips then, so that the one before is what is left.
    mounts
        Whether it needs file systems of its own.
    watched
        Whether only an agent notices it.
    """

    strike: Callable[[Places, Start, random.Random], None]
    memory: bool = True
    ends: bool = True
    steps: int = 0
    damages: bool = False
    mounts: bool = False
    watched: bool = False


# -- ranks and agent ------------------------------------------------------------------------------------------------


def _signal(number: int, everybody: bool = False) -> Callable[[Places, Start, random.Random], None]:
    def strike(places: Places, start: Start, dice: random.Random) -> None:
        pids = start.pids
        for pid in pids if everybody else [dice.choice(pids)]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    return strike


def _kill_agent(places: Places, start: Start, dice: random.Random) -> None:
    pid = places.spec.job.agent()
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _kill_agent_and_rank(places: Places, start: Start, dice: random.Random) -> None:
    _kill_agent(places, start, dice)
    _signal(signal.SIGKILL)(places, start, dice)


def _stop_agent(places: Places, start: Start, dice: random.Random) -> None:
    pid = places.spec.job.agent()
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(dice.uniform(0.5, _HURT))
            os.kill(pid, signal.SIGCONT)


def _starve_agent(places: Places, start: Start, dice: random.Random) -> None:
    """It can open no more files for a while: EMFILE."""
    pid = places.spec.job.agent()
    if pid is not None:
        with suppress(ProcessLookupError, FileNotFoundError):
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (dice.randint(1, 12), before[1]))
            time.sleep(_HURT)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


# -- memory ---------------------------------------------------------------------------------------------------------


@contextmanager
def _full(directory: Path) -> Iterator[None]:
    ballast = directory / "ballast"
    try:
        with open(ballast, "wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1 << 20)) == 1 << 20:
                pass
        yield
    finally:
        ballast.unlink(missing_ok=True)


def _fill_memory(places: Places, start: Start, dice: random.Random) -> None:
    with _full(places.spec.memory):
        time.sleep(_HURT)


def _remove_memory(places: Places, start: Start, dice: random.Random) -> None:
    shutil.rmtree(places.spec.job.path, ignore_errors=True)
    time.sleep(dice.uniform(0, _HURT))
    _signal(signal.SIGKILL)(places, start, dice)


def _lose_node(places: Places, start: Start, dice: random.Random) -> None:
    agent = places.spec.job.agent()
    for pid in [*start.pids, *([agent] if agent is not None else [])]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    shutil.rmtree(places.spec.job.path, ignore_errors=True)


def _flip_memory(places: Places, start: Start, dice: random.Random) -> None:
    """A byte of the newest snapshot, between two starts."""
    _signal(signal.SIGKILL, everybody=True)(places, start, dice)
    time.sleep(0.3)
    flip(_in_memory(places, "step-*/*.safetensors")[-2:], dice)


def _in_memory(places: Places, *patterns: str) -> list[Path]:
    """What is there at the moment, while others come and go: ``Path.glob`` raises when a directory goes."""
    return [Path(path) for pattern in patterns for path in sorted(glob(f"{places.spec.job.path}/{pattern}"))]


def flip(files: list[Path], dice: random.Random) -> None:
    if files:
        path = dice.choice(files)
        with suppress(FileNotFoundError, ValueError), open(path, "r+b") as file:
            at = dice.randrange(path.stat().st_size)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ (1 << dice.randrange(8))]))


def _truncate_memory(places: Places, start: Start, dice: random.Random) -> None:
    """A file that is mapped becomes shorter: SIGBUS for whoever touches it."""
    files = _in_memory(places, "slots/*", "step-*/*.safetensors")
    if files:
        with suppress(FileNotFoundError):
            os.truncate(dice.choice(files), 4096)
    time.sleep(1.0)
    if start.over() is None:
        _signal(signal.SIGKILL)(places, start, dice)


# -- storage --------------------------------------------------------------------------------------------------------


def _fill_storage(places: Places, start: Start, dice: random.Random) -> None:
    with _full(places.spec.root.parent):
        time.sleep(_HURT)


def _read_only_storage(places: Places, start: Start, dice: random.Random) -> None:
    storage = str(places.spec.root.parent)
    until = time.monotonic() + _HURT
    while not _run(["mount", "-o", "remount,ro", storage]) and time.monotonic() < until:
        time.sleep(0.005)  # somebody is writing
    time.sleep(_HURT)
    _run(["mount", "-o", "remount,rw", storage])


def _unmount_storage(places: Places, start: Start, dice: random.Random) -> None:
    storage = places.spec.root.parent
    _run(["umount", "-l", str(storage)])
    time.sleep(_HURT)
    if storage.is_mount():
        return
    shutil.rmtree(places.spec.root, ignore_errors=True)  # what was written below the mount point meanwhile
    _run(["mount", "-o", "loop", str(places.spec.place / "image"), str(storage)])


FAULTS: dict[str, Fault] = {
    "rank killed": Fault(_signal(signal.SIGKILL)),
    "all ranks killed": Fault(_signal(signal.SIGKILL, everybody=True), steps=1),
    "rank told to go": Fault(_signal(signal.SIGTERM)),
    "all told to go": Fault(_signal(signal.SIGTERM, everybody=True)),
    "rank stopped": Fault(_signal(signal.SIGSTOP), watched=True),
    "segfault": Fault(_signal(signal.SIGSEGV)),
    "agent killed": Fault(_kill_agent, ends=False),
    "agent and rank killed": Fault(_kill_agent_and_rank, steps=1),
    "agent stopped": Fault(_stop_agent, ends=False),
    "agent without files": Fault(_starve_agent, ends=False),
    "memory full": Fault(_fill_memory, memory=False, ends=False, mounts=True),
    "memory removed": Fault(_remove_memory, memory=False),
    "memory truncated": Fault(_truncate_memory, memory=False),
    "bit flipped in memory": Fault(_flip_memory, memory=False),
    "node lost": Fault(_lose_node, memory=False),
    "bit flipped on storage": Fault(_lose_node, memory=False, damages=True),
    "storage full": Fault(_fill_storage, ends=False, mounts=True),
    "storage read-only": Fault(_read_only_storage, ends=False, mounts=True),
    "storage unmounted": Fault(_unmount_storage, ends=False, mounts=True),
}
"""By the name that people see."""

RANK_POINTS, AGENT_POINTS = POINTS["save"], POINTS["drain"]
