"""Runs parts of an experiment that may hang or die, each in a process of its own.

The process says JSON objects, one a line, through a pipe; if asked to, it waits for a word before the part that counts.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Case", "Speaker", "end_after", "find_work", "pack", "run_case", "unpack"]

_SCRIPT = Path(__file__).resolve().parents[1] / "gpu.py"
_GONE = 20.0
"""Seconds that a killed process gets to be gone: unpinning 64 GiB takes some of them."""


class Case:
    """The process of ``work``, "module:function", seen from outside. The function gets a Speaker and ``options``."""

    def __init__(
        self, work: str, options: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.ending = "hung"
        """done, died or hung: the reason for which ``words`` has ended."""
        self.said: dict[str, Any] = {}
        """All that the process has said so far, as one object."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        self._buffer = b""
        self._read, write = os.pipe()
        # In the caller's process group, so that whoever ends the experiment ends this too.
        self.process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), "case", work, json.dumps(dict(options or {})), str(write)],
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=[write],
        )
        os.close(write)

    def wait_ready(self, limit: float) -> bool:
        """Wait until the process has prepared everything. False if it has died, or after ``limit`` seconds."""
        return any(word.get("ready") for word in self.words(limit))

    def go(self) -> None:
        """Let the process begin the part that counts."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # ``words`` tells that it has died

    def words(self, limit: float) -> Iterator[dict[str, Any]]:
        """Yield what the process says, until it says that it is ready or done, dies, or ``limit`` seconds are over."""
        deadline = time.monotonic() + limit
        self.ending = "hung"
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if found:
                self._buffer = rest
                word = json.loads(line)
                if "done" in word:
                    self.ending = "done"
                    return
                self.said.update(word)
                yield word
                if "ready" in word:
                    return
                continue
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                return
            data = os.read(self._read, 1 << 16)
            if not data:
                self.ending = "died"
                return
            self._buffer += data

    def listen(self, limit: float, until: str = "") -> str:
        """Hear what the process says, at most until it says the word ``until``. Returns ``ending``."""
        for word in self.words(limit):
            if until in word:
                break
        return self.ending

    def result(self, limit: float) -> dict[str, Any]:
        """Returns all that the process says, as one object. Raises RuntimeError unless it says that it is done."""
        if self.listen(limit) != "done":
            raise RuntimeError(f"a process of the experiment {self.ending}: {self.errors()}")
        return self.said

    def exit_code(self, limit: float) -> int | None:
        """Returns the exit code, or None if the process has not ended within ``limit`` seconds."""
        try:
            return self.process.wait(max(limit, 0.0))
        except subprocess.TimeoutExpired:
            return None

    def output(self) -> str:
        """Returns all that the process has written to stdout and stderr."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def errors(self) -> str:
        """Returns the last lines of ``output``."""
        return "\n".join(self.output().splitlines()[-15:])

    def killed(self) -> bool:
        """True if the process has ended, and a SIGKILL was what ended it."""
        return self.process.poll() == -signal.SIGKILL

    def kill(self) -> float | None:
        """Kill the process. Returns the seconds until it was gone, or None if it is still there."""
        began = time.monotonic()
        self.process.kill()
        gone = self.exit_code(_GONE) is not None
        return time.monotonic() - began if gone else None

    def close(self) -> None:
        """Kill the process and let go of the pipes."""
        self.kill()
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass
        self._errors.close()
        if self._read >= 0:
            os.close(self._read)
            self._read = -1

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Speaker:
    """The process of a case, seen from inside."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.Lock()

    def say(self, **words: Any) -> None:
        """Tell the experiment. Thread-safe; never waits for a full pipe, as all that is said is short."""
        with self._lock:
            os.write(self._fd, json.dumps(words).encode() + b"\n")

    def ready(self) -> None:
        """Say that all is prepared, and wait for the word to begin."""
        self.say(ready=True)
        sys.stdin.readline()

    def done(self) -> None:
        self.say(done=True)


def pack(value: Any) -> str:
    """Returns ``value`` as text that another process of this machine can unpack; tensors on a device are shared."""
    from multiprocessing.reduction import ForkingPickler

    return base64.b64encode(bytes(ForkingPickler.dumps(value))).decode()


def unpack(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def find_work(work: str) -> Callable[..., object]:
    """Returns the function of "module:function"."""
    module, _, name = work.partition(":")
    found: Callable[..., object] = getattr(importlib.import_module(module), name)
    return found


def run_case(work: str, options: dict[str, Any], fd: int) -> None:
    """Be the process of a case."""
    os.set_inheritable(fd, False)  # else an agent that outlives this process would hold the pipe open
    speaker = Speaker(fd)

    def whole() -> None:
        find_work(work)(speaker, **options)
        speaker.done()

    end_after(whole)


def end_after(work: Callable[[], object]) -> NoReturn:
    """End this process with ``work``: at once, as a stuck or failed device would hold up, or abort, a usual end."""
    code = 0
    try:
        work()
    except BaseException as error:
        traceback.print_exc()
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
