"""The watchdog with real processes: what it lets live, and what it ends."""

from __future__ import annotations

import os
import pdb
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import read_status
from tests.faults.harness import wait_for
from tests.faults.test_guard import Play, Trainer
from tests.faults.test_guard import play as play  # a fixture

PAUSE = 2.0
"""Seconds: more than the one second and a bit that "fast" allows to steps of 10 ms."""

ATTACH = f"""
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(0x4206, int(sys.argv[1]), 0, 0):  # PTRACE_SEIZE: what has attached so is detached by its end
    sys.exit("no right to")
print("attached", flush=True)
time.sleep({PAUSE})
"""


def _type_later(into: int) -> None:
    time.sleep(PAUSE)
    os.write(into, b"continue\n")


def _stand_in_a_debugger() -> None:
    """Stand at the prompt that ``breakpoint()`` opens."""
    reading, writing = os.pipe()
    threading.Thread(target=_type_later, args=(writing,)).start()
    with open(reading) as keys, open(os.devnull, "w") as screen:
        sys.breakpointhook = pdb.Pdb(stdin=keys, stdout=screen, nosigint=True).set_trace
        breakpoint()
        time.sleep(0)


def _be_attached_to() -> bool:
    """Let a process attach itself as gdb and strace do, for as long. False when it has no right to."""
    with subprocess.Popen([sys.executable, "-c", ATTACH, str(os.getpid())], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        attached = bool(other.stdout.readline())
        time.sleep(PAUSE if attached else 0.0)
    return attached


class _Stuck(IterableDataset[torch.Tensor]):
    """Its worker gives one item, starts a process of its own, and then does nothing for ten minutes."""

    def __init__(self, pids: Path) -> None:
        self.pids = pids

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(())
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        written = self.pids.with_suffix(".tmp")
        written.write_text(f"{os.getpid()} {child.pid}")
        written.rename(self.pids)
        time.sleep(600)


def _held_up(trainer: Trainer) -> None:
    ckpt = trainer.begin()
    page = JobDir.of(trainer.root, next(trainer.memory.glob("rekindle-*"))).paths.status_page(0)
    watchdog = "fast" if trainer.attempt != 1 else True
    with ckpt.guard(watchdog=watchdog) as guard:
        assert guard.connected(30)
        trainer.train(ckpt, 5)
        if trainer.attempt == 0:
            _stand_in_a_debugger()
            trainer.train(ckpt, 5)
            trainer.note("attached", _be_attached_to())
            trainer.train(ckpt, 5)
        elif trainer.attempt == 1:
            time.sleep(PAUSE)  # an evaluation, say, that nobody has declared
            trainer.train(ckpt, 5)
        trainer.note("pause", read_status(page).pause)
        if trainer.attempt == 2:
            pids = trainer.root.with_name("pids")
            with ckpt.pause_watchdog("the loader's start"):
                loader = iter(DataLoader(_Stuck(pids), num_workers=1, batch_size=None))
                next(loader)
                wait_for(pids.exists)
            trainer.train(ckpt, 1)
            next(loader)


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.campaign(seconds=18)
def test_a_debugger_a_pause_and_a_loader_that_hangs(play: Play, root: Path, job: JobDir) -> None:
    """Three starts: a debugger holds the first one, the second pauses longer than its steps tell, the third hangs in
    its loader; no process of that outlives it."""
    codes, notes, log = play(_held_up, 3)
    assert codes == [0, 0, 75], log
    assert ["attached", True] in notes, "no right to trace a process here"
    first, second, third = (seconds for what, *seconds in notes if what == "pause")
    assert first[0] < PAUSE, "what a debugger takes is no measure of pauses"
    assert second[0] >= PAUSE and third[0] >= second[0], "the third start knows what the second has seen"
    assert "rank 0 hangs after step" in log and "pause_watchdog(" in log and "guard(watchdog=SECONDS)" in log
    worker, child = root.with_name("pids").read_text().split()
    wait_for(lambda: not _alive(worker) and not _alive(child), what="the loader's processes to end")
