"""A child process that this process has not started itself, with the part of subprocess.Popen that torchrun uses."""

from __future__ import annotations

import os
import signal
import subprocess
import time

__all__ = ["AdoptedProcess"]

_LONGEST_PAUSE = 0.005
"""Seconds between two looks for the end of a process, at most. A look takes a microsecond."""


class AdoptedProcess:
    """A child by its process id: the kernel gives its exit status to this process, as for any other child."""

    def __init__(self, pid: int, args: list[str]) -> None:
        self.pid, self.args = pid, args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code as subprocess gives it, negative for a signal; None while the process runs."""
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        if timeout is not None:
            self._wait_within(timeout)
        code = self._reap(0)
        assert code is not None
        return code

    def send_signal(self, number: signal.Signals | int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait_within(self, seconds: float) -> None:
        # By looks, as subprocess does: pidfd_open is not in every Python, nor in kernels before Linux 5.3.
        until = time.monotonic() + seconds
        while self.poll() is None:
            if (left := until - time.monotonic()) <= 0:
                raise subprocess.TimeoutExpired(self.args, seconds)
            time.sleep(min(left, _LONGEST_PAUSE))

    def _reap(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, flags)
            except ChildProcessError:  # somebody else has waited for it: subprocess answers 0 then, too
                self.returncode = 0
            else:
                if pid == self.pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode
