"""A rank's line to its node's agent: says what befalls this rank, hears of what befalls others."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rekindle.agent.address import socket_address
from rekindle.format.fields import loads
from rekindle.memory.job_dir import JobDir
from rekindle.session.agent_keeper import spawn

__all__ = ["Line"]

log = logging.getLogger("rekindle")

_RETRY, _RETRY_LONGEST = 0.05, 2.0
"""Seconds between attempts; doubled each time that an agent hangs up at once."""
_SETTLED = 1.0
"""Seconds after which a connection counts as one that was made."""
_PATIENCE = 2.0
"""Seconds without an agent after which a rank starts one itself: usually another one is doing so."""


class Line:
    """A thread that sleeps in the kernel until there is news. ``hear`` is called in it."""

    def __init__(self, job: JobDir, hello: dict[str, Any], hear: Callable[[dict[str, Any]], None]) -> None:
        self._job, self._hello, self._hear = job, hello, hear
        self._closed = False
        self._socket: socket.socket | None = None
        self._spawned: subprocess.Popen[bytes] | None = None
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rekindle-line", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        alone_since, pause = time.monotonic(), _RETRY
        while not self._closed:
            began = time.monotonic()
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                    with socket_address(self._job.paths.watch_socket) as name:
                        line.connect(name)
                    line.sendall(json.dumps(self._hello).encode() + b"\n")
                    self._socket = line
                    self._first.set()
                    for text in line.makefile("rb"):
                        self._hear(loads(text))
                if self._closed:
                    return
                if time.monotonic() - began > _SETTLED:
                    pause = _RETRY
                    log.warning("the agent is gone; a new one is started")
                else:
                    pause = min(2 * pause, _RETRY_LONGEST)
                alone_since = time.monotonic() - _PATIENCE
            except (OSError, ValueError, TypeError):  # no agent, or one that talks nonsense
                pass
            self._socket = None
            if time.monotonic() - alone_since > _PATIENCE:
                alone_since = time.monotonic()
                if self._job.agent() is None and self._job.path.is_dir():
                    with suppress(OSError):
                        self._spawned = spawn(self._job)
            if self._spawned is not None:
                self._spawned.poll()  # one that finds another agent there ends at once, and wants to be collected
            time.sleep(pause)

    def connected(self, timeout: float) -> bool:
        """Wait for the first contact."""
        return self._first.wait(timeout)

    def say(self, message: dict[str, Any]) -> bool:
        """Tell the agent. False when there is none."""
        line = self._socket
        if line is None or os.getpid() != self._hello["pid"]:
            return False
        try:
            line.sendall(json.dumps(message).encode() + b"\n")
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Take leave: what happens to this process from now on is no fault."""
        self._closed = True  # first: the agent hangs up at once
        self.say({"bye": True})
        line = self._socket
        if line is not None:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
