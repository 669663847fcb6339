"""Programs in processes that are forked from the tests' server, which has loaded torch already.

A fresh interpreter takes 3 s of a core before a launcher does anything. It is for tests of that beginning: for those of
another ``PYTHONPATH``, of closed streams, and for those that change the program first.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import util
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from rekindle.common.failpoints import arm
from tests.fork_server import context

__all__ = ["Code", "Program", "run"]


class Code(str):
    """A program that is given as its text, as behind ``python -c``."""


class Program:
    """A module, a script given as a Path, or Code, that runs as Python's ``__main__``. Its standard input is empty.

    It has the attributes and methods of a ``subprocess.Popen`` with text streams that the tests use.
    """

    def __init__(
        self,
        program: str | Path,
        *arguments: object,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.returncode: int | None = None
        streams = [_Stream(stdout), _Stream(stderr)]
        self.stdout, self.stderr = (stream.reader for stream in streams)
        self._process = context.Process(
            target=_become,
            args=(
                program,
                [str(argument) for argument in arguments],
                streams,
                str(cwd or Path.cwd()),
                dict(os.environ if env is None else env),
                start_new_session,
            ),
        )
        self._process.start()
        for stream in streams:
            stream.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Returns what it says until it has ended. One that does not end is killed."""
        read = [stream.read if stream is not None else str for stream in (self.stdout, self.stderr)]
        with ThreadPoolExecutor(2) as pool:
            try:
                found = [pool.submit(each) for each in read]
                out, err = (each.result(timeout) for each in found)
                self.wait(timeout)
            except BaseException:
                self.kill()
                raise
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(program: str | Path, *arguments: object, timeout: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended, and what it has said."""
    running = Program(program, *arguments, **more)
    out, err = running.communicate(timeout)
    assert running.returncode is not None
    return subprocess.CompletedProcess([program, *arguments], running.returncode, out, err)


class _Stream:
    """One of the two, as it is given to the process."""

    def __init__(self, given: int) -> None:
        self.reader: IO[str] | None = None
        self._own = given == subprocess.PIPE
        self._fd = given
        if self._own:
            reader, self._fd = os.pipe()
            self.reader = os.fdopen(reader)

    def close(self) -> None:
        if self._own:
            os.close(self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (DupFd(self._fd),)


def _detach(fd: Any) -> int:
    return int(fd.detach())


def _become(
    program: str | Path,
    arguments: list[str],
    streams: list[int],
    place: str,
    environment: dict[str, str],
    session: bool,
) -> None:
    if session:
        os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate([null, *streams]):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    arm(environment.get("REKINDLE_FAILPOINT", ""))
    util.Finalize(None, atexit._run_exitfuncs, exitpriority=0)  # the server's children leave them out
    sys.argv = ["-c" if isinstance(program, Code) else str(program), *arguments]
    if isinstance(program, Code):
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    elif isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        sys.path.insert(0, place)
        runpy.run_module(program, run_name="__main__", alter_sys=True)
