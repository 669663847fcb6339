"""Connects a rank with its node's agent: tells it of this rank's faults, and hears of those of others."""

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

__all__ = ["AgentLink"]

log = logging.getLogger("rekindle")

_RETRY, _RETRY_LONGEST = 0.05, 2.0
"""Seconds between attempts; doubled each time that an agent hangs up at once."""
_STABLE = 1.0
"""Seconds after which a connection counts as one that was made, not as an agent that hangs up."""
_START_AFTER = 2.0
"""Seconds without an agent after which a rank starts one itself: usually another one is doing so."""


class AgentLink:
    """Keeps a connection to the agent, in a thread that sleeps in the kernel until there is news. Thread-safe."""

    def __init__(self, job: JobDir, hello: dict[str, Any], hear: Callable[[dict[str, Any]], None]) -> None:
        """``hello`` is said to each agent first; ``hear`` is called with each of its messages, in the link's thread."""
        self._job, self._hello, self._hear = job, hello, hear
        self._closed = False
        self._socket: socket.socket | None = None
        self._spawned: subprocess.Popen[bytes] | None = None
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rekindle-link", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        alone_since, pause = time.monotonic(), _RETRY
        while not self._closed:
            began = time.monotonic()
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    with socket_address(self._job.paths.watch_socket) as name:
                        connection.connect(name)
                    connection.sendall(json.dumps(self._hello).encode() + b"\n")
                    self._socket = connection
                    self._first.set()
                    for text in connection.makefile("rb"):
                        self._hear(loads(text))
                if self._closed:
                    return
                if time.monotonic() - began > _STABLE:
                    pause = _RETRY
                    log.warning("the agent is gone; a new one is started")
                else:
                    pause = min(2 * pause, _RETRY_LONGEST)
                alone_since = time.monotonic() - _START_AFTER
            except (OSError, ValueError, TypeError):  # no agent, or one that talks nonsense
                pass
            self._socket = None
            if time.monotonic() - alone_since > _START_AFTER:
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
        """Tell the agent. Returns False when there is none."""
        connection = self._socket
        if connection is None or os.getpid() != self._hello["pid"]:
            return False
        try:
            connection.sendall(json.dumps(message).encode() + b"\n")
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Say goodbye: nothing that happens to this process from now on is a fault."""
        self._closed = True  # first: the agent hangs up at once
        self.say({"bye": True})
        connection = self._socket
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
