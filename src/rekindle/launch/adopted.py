"""A child process that this process has not started itself, with the part of subprocess.Popen that torchrun uses."""

from __future__ import annotations

import os
import select
import signal
import subprocess

__all__ = ["AdoptedProcess"]


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
        if self.returncode is None and timeout is not None and not self._ends_within(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout)
        code = self._reap(0)
        assert code is not None
        return code

    def send_signal(self, number: signal.Signals | int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ends_within(self, seconds: float) -> bool:
        descriptor = os.pidfd_open(self.pid)
        try:
            return bool(select.select([descriptor], [], [], seconds)[0])
        finally:
            os.close(descriptor)

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
