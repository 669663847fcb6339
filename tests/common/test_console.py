"""Tests the warnings that a script without logging shows, and those at its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def script(text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_warnings_carry_the_name_until_logging_is_set_up() -> None:
    done = script("""
import importlib, logging, sys
import rekindle
importlib.reload(rekindle)  # as notebooks do: still one handler
log, agent = logging.getLogger("rekindle"), logging.getLogger("rekindle.agent")
assert not logging.getLogger().handlers
log.warning("one %d", 1)
agent.error("two")
log.info("not shown")
logging.basicConfig(format="root: %(message)s")
log.warning("three")
logging.getLogger().handlers.clear()
own = logging.StreamHandler()
own.setFormatter(logging.Formatter("own: %(message)s"))
agent.addHandler(own)
agent.warning("four")
log.warning("five")
log.addHandler(logging.NullHandler())
log.warning("somebody wants silence")
""")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "rekindle: one 1",
        "rekindle: two",
        "root: three",
        "own: four",
        "rekindle: five",
    ]


def test_ctrl_c_says_what_is_safe_where(root: Path, memory: Path) -> None:
    """Inside of guard() first, which the script survives, then outside of it."""
    done = script(
        """
import os, signal, sys, torch, rekindle
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever shell has started the tests in its background
ckpt = rekindle.Checkpointer(sys.argv[1], {"values": rekindle.Values(weights=torch.zeros(10))})
ckpt.restore()
try:
    with ckpt.guard() as guard:
        assert guard.connected(30)
        ckpt.save(1, wait="durable")
        ckpt.step(2)
        os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    pass
ckpt.step(3)
os.kill(os.getpid(), signal.SIGINT)
ckpt.step(4)
""",
        root,
    )
    told = done.stderr
    assert done.returncode == -2, told
    first, last = told.splitlines()[0], told.splitlines()[-1]
    assert first.startswith("rekindle: step 2 secured in memory, 0."), told
    assert last.startswith("rekindle: ended without close(): step 3 is "), told
    assert "on storage" in last or last.endswith("the agent carries it to storage"), told
    assert told.count("ended without close()") == 1, told


def test_nothing_is_said_at_the_end_of_who_has_closed_or_made_no_step(root: Path, memory: Path) -> None:
    done = script(
        """
import sys, torch, rekindle
ckpt = rekindle.Checkpointer(sys.argv[1], {"values": rekindle.Values(weights=torch.zeros(10))})
ckpt.restore()
ckpt.step(1)
ckpt.close()
again = rekindle.Checkpointer(sys.argv[1], {"values": rekindle.Values(weights=torch.zeros(10))})
assert again.restore() == 1
""",
        root,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
