"""Trouble around the stores: limits, clocks, mounts that vanish, files that somebody truncates."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.common.failpoints import POINTS
from rekindle.memory.job_dir import JobDir, memory_base
from tests import forked
from tests.faults.harness import Run, digest_of, finish, leftovers, restored, start, train, wait_for
from tests.stored import sound

REPO = Path(__file__).parents[2]

_TRAINER = """
import logging, os, resource, sys, time, torch, rekindle
logging.basicConfig(level=logging.WARNING)
root, steps = sys.argv[1], int(sys.argv[2])
weights = torch.zeros(int(sys.argv[3]))
ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(weights=weights)}, fallback_after=0.5, persist_seconds=0)
first = ckpt.restore()
"""


def run_script(
    body: str, root: Path, steps: int = 40, size: int = 1000, **env: str
) -> subprocess.CompletedProcess[str]:
    program = forked.Code(_TRAINER + body)
    return forked.run(program, root, steps, size, timeout=150, env={**os.environ, **env}, cwd=REPO)


@pytest.mark.campaign(seconds=10)
def test_a_process_out_of_file_descriptors_trains_on_and_saves_again_once_there_are_some(
    root: Path, memory: Path
) -> None:
    body = """
hoard = []
for step in range(first + 1, steps + 1):
    if step == 5:  # a larger state wants new files
        ckpt_state = torch.zeros(5000)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            while True:
                hoard.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
    if step == 15:
        for fd in hoard:
            os.close(fd)
    weights.fill_(step)
    ckpt.step(step)
    time.sleep(0.02)
ckpt.save(steps, wait="durable", timeout=60)
print(ckpt.metrics)
ckpt.close(timeout=60)
"""
    done = run_script(body, root)
    assert done.returncode == 0, done.stderr
    assert sound(root)[0] == 40
    assert "raise the limit of open files (ulimit -n)" in done.stderr


@pytest.mark.campaign
def test_a_drain_whose_mount_vanishes_goes_on_when_it_is_back(
    tmp_path: Path, memory: Path, mounted: Callable[..., Path]
) -> None:
    disk = mounted("disk", "-t", "tmpfs", "-o", "size=64m", "tmpfs")
    root = disk / "run"
    job = JobDir.of(root, memory_base(memory))
    weights = torch.zeros(500_000)
    ckpt = rekindle.Checkpointer(
        root, {"values": rekindle.Values(weights=weights)}, memory=memory, drain_limit="4MB/s", persist_seconds=0
    )
    ckpt.restore()
    ckpt.step(1)
    wait_for(lambda: list(root.glob("*.partial/.*.tmp")), what="a drain")
    subprocess.run(["umount", "-l", str(disk)], check=True)
    disk.chmod(0o555)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k,ro", "tmpfs", str(disk)], check=True)
    step = 1
    while "mount it writable again" not in job.notes.drain_error():
        step += 1
        ckpt.step(step)
        time.sleep(0.05)
        assert step < 400, job.notes.drain_error()
    subprocess.run(["umount", str(disk)], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
    ckpt.close(timeout=30)
    assert ckpt.metrics.failed == 0
    wait_for(lambda: not job.path.exists())
    assert sound(root)[0] == step and leftovers(root) == []


_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long offset(void) { /* seconds, as the file says at this moment */
    static int (*now)(clockid_t, struct timespec *);
    static long seconds, looked = -1;
    struct timespec t;
    if (!now) now = dlsym(RTLD_NEXT, "clock_gettime");
    now(CLOCK_MONOTONIC, &t);
    if (t.tv_sec * 10 + t.tv_nsec / 100000000 != looked) {
        FILE *file = fopen(getenv("JUMP"), "r");
        if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
        looked = t.tv_sec * 10 + t.tv_nsec / 100000000;
    }
    return seconds;
}
int clock_gettime(clockid_t clock, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, t);
    if (clock == CLOCK_REALTIME) t->tv_sec += offset();
    return result;
}
time_t time(time_t *to) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return to ? (*to = t.tv_sec) : t.tv_sec;
}
"""


@pytest.mark.campaign(seconds=13)
def test_a_clock_that_jumps_changes_nothing(root: Path, memory: Path, job: JobDir) -> None:
    source, library, clock = (root.parent / name for name in ("clock.c", "clock.so", "clock"))
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    source.write_text(_CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    clock.write_text("0")
    year = 365 * 86400
    body = f"""
import pathlib
for step in range(first + 1, steps + 1):
    offset = {{10: {10 * year}, 20: {-20 * year}, 30: 0}}.get(step)
    if offset is not None:
        pathlib.Path({str(clock)!r}).write_text(str(offset))
        time.sleep(0.3)
        assert abs(time.time() - offset - {time.time()}) < 600, "the clock has jumped"
    weights.fill_(step)
    ckpt.step(step)
    time.sleep(0.02)
ckpt.save(steps, wait="durable", timeout=60)
ckpt.close(timeout=60)
print("failed", ckpt.metrics.failed)
"""
    jump = {"LD_PRELOAD": str(library), "JUMP": str(clock)}  # the agent's clock jumps too
    done = run_script(body, root, **jump)
    assert done.returncode == 0 and "failed 0" in done.stdout, done.stderr
    wait_for(lambda: not job.path.exists(), what="the agent to leave")
    assert sound(root)[0] == 40
    clock.write_text(str(-5 * year))
    done = run_script("print('from', first); ckpt.close()", root, **jump)
    assert "from 40" in done.stdout, "the newest is what steps and generations say, not the clock"


@pytest.mark.campaign(seconds=11)
def test_a_memory_limit_that_kills_the_trainer_costs_what_a_kill_costs(root: Path, memory: Path, job: JobDir) -> None:
    groups = Path("/sys/fs/cgroup/memory")
    if not (groups / "memory.limit_in_bytes").exists() or not os.access(groups, os.W_OK):
        pytest.skip("needs a writable memory control group")
    group = groups / f"rekindle-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(700 << 20))
        body = f"""
import pathlib
for step in range(first + 1, steps + 1):
    weights.fill_(step)
    ckpt.step(step)
    time.sleep(0.02)
    if step == 10:
        ckpt.save(step, wait="memory")
        pathlib.Path({str(group / "cgroup.procs")!r}).write_text(str(os.getpid()))
        hoard = [bytearray(50 << 20) for _ in range(40)]
"""
        done = run_script(body, root)
        assert done.returncode == -signal.SIGKILL, done.stderr
        done = run_script("print('from', first); ckpt.close()", root)
        assert "from 10" in done.stdout, done.stderr
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text().strip(), what="the group to empty")
        group.rmdir()


# -- truncated under those who have it mapped ------------------------------------------------------------------------


def test_files_truncated_in_memory_cost_no_step_that_another_copy_has(
    root: Path, memory: Path, job: JobDir, unbroken: Callable[[Run], list[str]]
) -> None:
    """The trainer's slots, receipts and shards, over and over, while trainer and agent use them."""
    run = Run(root, memory, steps=60, pause=0.03, options={"fallback_after": 0.5})
    processes = start(run)
    wait_for(lambda: list(root.glob("step-*/checkpoint.json")), what="a durable step")
    for _ in range(10):
        for path in [*job.path.glob("step-*/*"), *job.paths.slots.glob("*")]:
            with suppress(FileNotFoundError), open(path, "ab") as file:  # it may just have been taken for another step
                file.truncate(100)
        time.sleep(0.1)
    codes = finish(processes)
    assert codes in ([0], [-signal.SIGBUS]), run.log(0).read_text()
    if codes != [0]:
        assert train(run) == [0], run.log(0).read_text()
        assert restored(run)[-1] > 0
    assert [digest_of(run)] == unbroken(run)
    wait_for(lambda: not job.path.exists(), what="the agent to leave")
    assert sound(root)[0] == 60 and leftovers(root, memory) == []


def test_a_truncated_status_page_does_not_end_rekindle_status(root: Path, memory: Path, job: JobDir) -> None:
    weights = torch.zeros(100)
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(weights=weights)}, memory=memory, persist_seconds=0)
    ckpt.restore()
    with ckpt.guard() as guard:
        ckpt.step(1)
        assert guard.connected(60)
        agent = job.agent()
        os.truncate(job.paths.status_page(0), 0)
        done = forked.run("rekindle", "status", root, "--json", timeout=100)
        assert done.returncode == 0, done.stderr
        time.sleep(0.3)  # the agent looks a hundred times a second
        ckpt.step(2)
        done = forked.run("rekindle", "status", root, "--json", timeout=100)
        assert done.returncode == 0 and '"step": 2' in done.stdout
        assert job.agent() == agent
    ckpt.close(timeout=60)


def test_every_failpoint_of_the_product_is_killed_at() -> None:
    """Two modules walk them: those of checkpoints in ``tests/faults``, those of files in ``tests/files``."""
    found = subprocess.run(
        ["grep", "-rhoE", r'reach\("[a-z.]+"', str(REPO / "src")], capture_output=True, text=True, check=True
    ).stdout
    reached = {line.split('"')[1] for line in found.splitlines()}
    assert reached == {point for group in POINTS.values() for point in group}
    walked = (REPO / "tests/faults/test_save_and_drain_points.py").read_text()
    assert 'parametrize("point", POINTS["save"])' in walked and '[p for p in POINTS["drain"] if p not in' in walked
    assert all(f'agent_point="{point}"' in walked for point in ("drain.aside", "drain.prune"))
    walked = (REPO / "tests/files/test_kills.py").read_text()
    assert 'parametrize("point", POINTS["files"])' in walked and '[point for point in POINTS["upload"] if' in walked
    assert 'point="upload.evicted"' in walked
