"""Describes the machine of a benchmark, and the memory that its processes hold. Linux only."""

from __future__ import annotations

import datetime
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

import rekindle

__all__ = [
    "describe",
    "evict",
    "free_memory",
    "fsync_tree",
    "held_bytes",
    "settle",
    "since_start",
    "status_bytes",
]


def describe(target: Path, memory: Path, threads: int) -> dict[str, Any]:
    """The machine and the software, without names of hosts or paths."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": int(meminfo["MemTotal"].split()[0]) * 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rekindle": rekindle.__version__,
        "threads": threads,
        "target_file_system": _file_system(target),
        "memory_file_system": _file_system(memory),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _file_system(path: Path) -> str:
    """Type of the file system that holds ``path``: that of the longest mount point above it."""
    best = ("", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if path.resolve().is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, after.split()[0])
    return best[1]


def fsync_tree(path: Path) -> None:
    """fsync a file, or a directory with all that is in it, and the directory above: then a power cut can't take it."""
    entries = [path.parent, path, *path.rglob("*")] if path.is_dir() else [path.parent, path]
    for entry in reversed(entries):
        fd = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def evict(path: Path) -> None:
    """Drop the files under ``path`` from the page cache, as far as the kernel lets us. They must be synced."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def status_bytes(pid: int | str, field: str) -> int:
    """A size from /proc/PID/status, in bytes; 0 for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{field}:")), 0)


def since_start() -> float:
    """Seconds since this process was started, by the kernel's word: resolution is 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def held_bytes(directory: Path) -> int:
    """Bytes that the files under ``directory`` take up."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue  # others remove files while we look
    return total


def free_memory() -> int:
    """Bytes that could be taken without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def settle(limit: float) -> float | None:
    """Wait until the machine has little else to do, ``limit`` seconds at most. The share of it that was idle last."""
    if not limit:
        return None
    deadline = time.monotonic() + limit
    while True:
        before = _cpu_times()
        time.sleep(0.25)
        spent = [after - earlier for after, earlier in zip(_cpu_times(), before, strict=True)]
        idle = (spent[3] + spent[4]) / max(sum(spent), 1)
        if idle >= 0.9 or time.monotonic() > deadline:
            return idle


def _cpu_times() -> list[int]:
    return [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
