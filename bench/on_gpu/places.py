"""Finds memory for experiments: file systems of their own where this user may mount them, else /dev/shm."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle.memory.job_dir import JobDir

__all__ = ["Places", "clear", "open_places"]

_SIZE = "80G"
"""Bound on each mounted file system, not a reservation. /dev/shm may be half of the memory that was there at boot."""


@dataclass(frozen=True)
class Places:
    """Directories that an experiment may fill."""

    memory: str
    huge: str | None
    """In a tmpfs of huge pages, if there is one."""
    disk: str
    kind: str
    """The kinds of file system, for people."""


@contextmanager
def open_places(disk: Path | None = None) -> Iterator[Places]:
    """Mount what may be mounted; take it away, with all that is in it, at the end."""
    with ExitStack() as undo:
        memory, huge = _mount(undo, ""), _mount(undo, ",huge=always")
        said = ["a tmpfs mounted for this run" if memory else "/dev/shm: this user may not mount a tmpfs"]
        said.append("another one with huge=always" if huge else "no tmpfs with huge=always")
        if memory is None:
            base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            memory = undo.enter_context(_directory(base))
        elif huge is not None and not _has_huge_pages():
            huge, said[1] = None, "no huge pages: the kernel has none for shared memory"
        yield Places(str(memory), huge and str(huge), str(undo.enter_context(_directory(disk))), ", ".join(said))


def _has_huge_pages() -> bool:
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return path.exists() and "[deny]" not in path.read_text()


def _mount(undo: ExitStack, more: str) -> Path | None:
    path = undo.enter_context(_directory(None))
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE},mode=700{more}", "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    if done.returncode:
        return None
    undo.callback(subprocess.run, ["umount", "-l", str(path)], capture_output=True, check=False)
    return path


@contextmanager
def _directory(parent: Path | str | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="bench-gpu-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def clear(places: Places) -> None:
    """End the agents that an experiment has left, at once, and remove all files."""
    for directory in Path(places.memory).glob("**/rekindle-*/*"):
        try:
            pid = JobDir(directory).agent()
            if pid is not None:
                os.kill(pid, 9)  # one that may finish would carry the snapshots of a killed trainer to storage first
        except OSError:
            continue
    for parent in filter(None, (places.memory, places.huge, places.disk)):
        for path in Path(parent).iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
