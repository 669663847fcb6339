"""Processes that another one has started, and the cause of their end."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.agent.process import OomKills, Process, describe_end
from tests.agent.cgroups import cgroup as cgroup  # a fixture
from tests.agent.cgroups import run_out_of_memory

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


def test_the_memory_of_a_process_is_what_it_holds_until_it_is_over() -> None:
    code = "held = b'x' * 200_000_000; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        process = Process(child.pid)
        assert 200_000_000 < process.look().resident < 300_000_000
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        look = process.look()
        assert look.over and look.resident == 0
        process.close()


def test_no_descriptor_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    Process(os.getpid()).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_the_kernel_has_killed_elsewhere_or_before_is_no_cause(cgroup: Path) -> None:
    """Of two processes one is in the group whose memory runs out."""
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as here,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as there,
    ):
        (cgroup / "cgroup.procs").write_text(str(there.pid))
        elsewhere, group = OomKills(here.pid, 0.0), OomKills(there.pid, 0.0)
        assert not elsewhere.any_new() and not group.any_new()
        run_out_of_memory(cgroup)
        assert group.any_new() and not elsewhere.any_new()
        assert not OomKills(there.pid, 0.0).any_new(), "as of a rank that comes later"
        group.look(3.0)
        assert group.any_new(), "what was killed may take a while to end"
        there.kill()
        there.wait()
        assert group.any_new()
        group.look(6.0)
        assert not group.any_new()
        here.kill()
