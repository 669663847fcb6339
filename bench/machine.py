"""What a benchmark ran on, and how fast that machine's disk is without any of the contenders. Linux only."""

from __future__ import annotations

import datetime
import json
import mmap
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rekindle

__all__ = ["describe", "disk_speeds", "evict", "fsync_tree"]

_PIECE = 1 << 20
_PATTERN = 64 << 20
"""Random bytes that disk tests write again and again: zeros could be turned into holes by a clever disk."""


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


def disk_speeds(directory: Path, nbytes: int) -> dict[str, float | None]:
    """Seconds to write, and to read, ``nbytes`` with as little between us and the disk as there can be.

    ``fio_*`` is None where fio isn't installed, ``direct_*`` where the file system knows no direct I/O.
    """
    path = directory / "disk-floor"
    pattern = mmap.mmap(-1, min(_PATTERN, -(-nbytes // _PIECE) * _PIECE))  # page-aligned, as direct I/O wants it
    for at in range(0, len(pattern), _PIECE):
        pattern[at : at + _PIECE] = os.urandom(_PIECE)
    data = memoryview(pattern)
    fio = shutil.which("fio")
    try:
        return {
            "buffered_write_fsync": _timed(lambda: _write(path, data, nbytes, 0)),
            "direct_write": _timed(lambda: _write(path, data, nbytes, os.O_DIRECT)),
            "direct_read": _timed(lambda: _read(path, data, nbytes)),
            "fio_direct_write": _fio(fio, path, nbytes, "write") if fio else None,
            "fio_direct_read": _fio(fio, path, nbytes, "read") if fio else None,
        }
    finally:
        path.unlink(missing_ok=True)


def _timed(work: Callable[[], None]) -> float | None:
    began = time.perf_counter()
    try:
        work()
    except OSError:
        return None
    return time.perf_counter() - began


def _write(path: Path, data: memoryview, nbytes: int, flags: int) -> None:
    path.unlink(missing_ok=True)  # a new file each time, as for a new checkpoint
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
    try:
        for at in range(0, nbytes, _PIECE):
            os.write(fd, data[at % len(data) :][:_PIECE])
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path, data: memoryview, nbytes: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for at in range(0, nbytes, _PIECE):
            os.preadv(fd, [data[at % len(data) :][:_PIECE]], at)
    finally:
        os.close(fd)


def _fio(fio: str, path: Path, nbytes: int, what: str) -> float | None:
    """Seconds that fio says it took: 1 MiB direct requests, one after another, synced at the end."""
    options = f"--rw={what} --bs=1M --size={-(-nbytes // _PIECE)}M --direct=1 --ioengine=psync --end_fsync=1".split()
    command = [fio, "--name=floor", f"--filename={path}", *options, "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return None
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["job_runtime"]) / 1e3
