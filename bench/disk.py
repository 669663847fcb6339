"""Measures the speed of a disk with nothing in between: fio with direct I/O, or our own loop where there is no fio."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import time
from pathlib import Path

__all__ = ["Disk"]

_PIECE = 1 << 20
_PATTERN = 64 << 20
"""Random bytes that are written again and again: zeros could be turned into holes by a clever disk."""


class Disk:
    """The least that writing or reading ``nbytes`` at ``path`` can take: direct requests of 1 MiB, one after another.

    ``by`` says what measured it. One that reads must have written. Not thread-safe.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path, self._nbytes = path, -(-nbytes // _PIECE) * _PIECE
        self._fio = shutil.which("fio")
        self.by = "fio"
        if self._fio is None:
            self._without_fio("fio is not installed")

    def _without_fio(self, why: str) -> None:
        self._fio, self.by = None, f"own loop, direct I/O: {why}"
        self._pattern = mmap.mmap(-1, min(_PATTERN, self._nbytes))  # page-aligned, as direct I/O wants it
        for at in range(0, len(self._pattern), _PIECE):
            self._pattern[at : at + _PIECE] = os.urandom(_PIECE)

    def write(self) -> float:
        """Seconds to write a new file, synced, as a new checkpoint is one."""
        self._path.unlink(missing_ok=True)
        return self._run("write")

    def read(self) -> float:
        """Seconds to read it, past the page cache."""
        return self._run("read")

    def _run(self, what: str) -> float:
        if self._fio is not None:
            seconds = self._by_fio(self._fio, what)
            if seconds is not None:
                return seconds
            self._without_fio("fio refused")
        return self._by_hand(what, os.O_DIRECT)

    def _by_fio(self, fio: str, what: str) -> float | None:
        options = f"--rw={what} --bs=1M --size={self._nbytes} --direct=1 --ioengine=psync --end_fsync=1".split()
        command = [fio, "--name=floor", f"--filename={self._path}", *options, "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            return None
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return max(float(job["job_runtime"]), 0.5) / 1e3  # whole milliseconds

    def _by_hand(self, what: str, flags: int) -> float:
        data = memoryview(self._pattern)
        mode = os.O_WRONLY | os.O_CREAT if what == "write" else os.O_RDONLY
        try:
            fd = os.open(self._path, mode | flags, 0o600)
        except OSError:
            if not flags:
                raise
            self.by = "own loop, through the page cache: the file system has no direct I/O"
            return self._by_hand(what, 0)
        began = time.perf_counter()
        try:
            for at in range(0, self._nbytes, _PIECE):
                piece = data[at % len(data) :][:_PIECE]
                if what == "write":
                    os.pwrite(fd, piece, at)
                else:
                    os.preadv(fd, [piece], at)
            os.fsync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - began

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
