"""Processes that another one has started, and the cause of their end."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys

import pytest

from rekindle.agent.process import Process, describe_end

_KERNEL = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))


@pytest.mark.skipif(sys.platform != "linux" or _KERNEL < (6, 15), reason="the kernel doesn't tell")
@pytest.mark.parametrize("number", [signal.SIGKILL, None])
def test_the_cause_is_known_though_the_parent_has_collected_the_process(number: int | None) -> None:
    child = subprocess.Popen([sys.executable, "-ISc", "input(); raise SystemExit(3)"], stdin=subprocess.PIPE, text=True)
    process = Process(child.pid)
    try:
        assert not process.look().over
        if number is None:
            child.communicate("\n", timeout=60)
        else:
            child.send_signal(number)
            child.communicate(timeout=60)
        look = process.look()
    finally:
        process.close()
    assert look.over
    cause = ("exit", "ended with exit code 3") if number is None else ("signal", "was killed by SIGKILL")
    assert describe_end(look.status, oom=False) == cause


def test_no_descriptor_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    Process(os.getpid()).close()
    assert len(os.listdir("/proc/self/fd")) == before
