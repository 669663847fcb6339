"""The launcher's side of warm workers, in this process: how it keeps a spare, and where it does without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle.faults.imports import IMPORTS
from rekindle.launch import warm
from rekindle.launch.adopted import AdoptedProcess
from rekindle.launch.warm import WarmWorkers, warm_workers

COMMAND = [sys.executable, "-u", "-c", "raise SystemExit('the script itself has run')"]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def workers(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmWorkers]:
    monkeypatch.setattr(warm, "_REPLACED_WITHIN", 0.06)
    workers = WarmWorkers(tmp_path, tmp_path, said.append)
    yield workers
    workers.close()


def begin(workers: WarmWorkers, command: list[str] = COMMAND) -> None:
    """A first start, which is always cold."""
    assert workers.start(0, command, dict(os.environ), [0, 1, 2]) is None


def next_spare(workers: WarmWorkers, after: int = 0) -> int:
    """Process id of the spare that comes after another one."""
    pause = threading.Event()
    for _ in range(6000):
        workers.tend()
        if workers._spare is not None and workers._spare.pid != after:
            return workers._spare.pid
        pause.wait(0.01)
    raise AssertionError("no spare is started")


def learn(workers: WarmWorkers, place: Path, monkeypatch: pytest.MonkeyPatch, command: list[str] = COMMAND) -> int:
    """Has a spare that will make workers, once it has come up. Returns its process id."""
    monkeypatch.setattr(warm, "_ANSWERS_WITHIN", 100.0)
    (place / IMPORTS).write_text(json.dumps({"modules": {}, "changed": []}))
    begin(workers, command)
    return next_spare(workers)


def kill(workers: WarmWorkers) -> int:
    spare = next_spare(workers)
    os.kill(spare, signal.SIGKILL)
    os.waitid(os.P_PID, spare, os.WEXITED | os.WNOWAIT)
    return spare


def test_a_spare_that_is_killed_time_and_again_is_given_up_until_the_next_restart(
    workers: WarmWorkers, said: list[str]
) -> None:
    begin(workers)
    for _ in range(3):
        next_spare(workers, after=kill(workers))
    kill(workers)
    workers.tend()
    assert [line.partition(": ")[2] for line in said] == [
        *["restarts are cold until another one is ready"] * 3,
        "4 times in a row, so the next restart is cold",
    ]
    assert all(line.startswith("the spare process was killed by SIGKILL: ") for line in said)
    workers.tend()
    assert workers._spare is None
    begin(workers)
    next_spare(workers)


def test_a_spare_that_can_not_be_started_costs_a_line(
    workers: WarmWorkers, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    begin(workers)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        before = len(os.listdir("/proc/self/fd"))
        workers.tend()
        assert len(os.listdir("/proc/self/fd")) == before
    assert len(said) == 1 and said[0].startswith("the spare process can't be started: Resource temporarily unavailable")
    next_spare(workers)


def test_a_spare_that_ends_by_itself_is_told_of_and_left_to_the_next_restart(
    workers: WarmWorkers, said: list[str], tmp_path: Path
) -> None:
    begin(workers)
    (tmp_path / IMPORTS).write_text("no record")
    os.waitid(os.P_PID, next_spare(workers), os.WEXITED | os.WNOWAIT)
    workers.tend()
    workers.tend()
    assert workers._spare is None
    assert said == ["the spare process ended with exit code 1: the next restart is cold"]


def test_a_process_that_a_spare_was_making_ends_with_it(workers: WarmWorkers) -> None:
    code = "import os, time; made = os.fork(); made and print(made, flush=True); time.sleep(100)"
    with warm._adopting():
        spare = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert spare.stdout is not None
        made = int(spare.stdout.readline())
        spare.stdout.close()
        spare.kill()
        os.waitid(os.P_PID, spare.pid, os.WEXITED | os.WNOWAIT)
    assert warm._is_own_child(made)
    workers._spare = spare  # type: ignore[assignment]
    workers.close()
    assert not warm._is_own_child(made) and not Path(f"/proc/{made}").exists()


class Stuck:
    """A spare that waits in the kernel for a file, where no signal reaches it."""

    pid = 1 << 30

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> None:
        assert timeout is not None, "nobody would ever return from this"
        raise subprocess.TimeoutExpired([], timeout)


def test_a_spare_that_can_not_be_killed_is_not_waited_for(workers: WarmWorkers) -> None:
    workers._spare = Stuck()  # type: ignore[assignment]
    workers.close()
    assert workers._spare is None


def test_a_worker_is_made_by_a_python_that_was_built_for_old_systems(
    workers: WarmWorkers, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of conda are: they have neither of these."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    learn(workers, tmp_path, monkeypatch)
    worker = workers.start(0, COMMAND, dict(os.environ), [0, 1, 2])
    assert worker is not None and not said, said
    assert worker.wait(100) == 1 and worker.returncode == 1, "the script's own exit code"


def test_another_environment_than_the_spares_makes_a_start_cold(
    workers: WarmWorkers, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = learn(workers, tmp_path, monkeypatch)
    monkeypatch.setenv("SOME_SETTING", "1")
    begin(workers)
    assert said == ["started cold: SOME_SETTING has changed since the spare was started"]
    assert next_spare(workers, after=spare), "one with the new environment"


def test_a_launcher_that_has_a_rank_itself_gives_it_to_no_import(
    workers: WarmWorkers, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubeflow sets RANK in each pod. It is that of one rank, and must not be read by an import for all of them."""
    monkeypatch.setenv("RANK", "0")
    assert workers.start(0, COMMAND, dict(os.environ), [0, 1, 2]) is None
    assert workers.start(1, COMMAND, {**os.environ, "RANK": "1"}, [0, 1, 2]) is None
    spare = learn(workers, tmp_path, monkeypatch)
    told = Path(f"/proc/{spare}/environ").read_bytes().split(b"\0")
    assert not any(entry.startswith(b"RANK=") for entry in told)
    for rank in (0, 1):
        worker = workers.start(rank, COMMAND, {**os.environ, "RANK": str(rank)}, [0, 1, 2])
        assert worker is not None and worker.wait(100) == 1 and not said, said


def test_the_first_start_of_a_node_that_has_waited_is_warm(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def foresee(record: Path) -> bool:
        return bool(record.write_text(json.dumps({"modules": {}, "changed": [], "foreseen": True})))

    monkeypatch.setattr(warm, "_ANSWERS_WITHIN", 100.0)
    monkeypatch.setenv("MASTER_PORT", "1")
    workers = WarmWorkers(tmp_path, tmp_path, said.append, foresee)
    try:
        workers.expect(COMMAND)
        spare = next_spare(workers)
        workers.expect(COMMAND)
        assert next_spare(workers) == spare, "one is enough"
        assert b"MASTER_PORT=" not in Path(f"/proc/{spare}/environ").read_bytes()
        started = {**os.environ, "RANK": "1", "MASTER_PORT": "2"}
        worker = workers.start(0, COMMAND, started, [0, 1, 2])
        assert worker is not None and worker.wait(100) == 1 and not said, said
        begin(workers)
        assert said == [
            "started cold: the last warm start did not come as far as its second step (with DCP: its first save)"
        ]
    finally:
        workers.close()


def test_a_node_whose_script_can_not_be_foreseen_starts_cold_and_then_as_ever(said: list[str], tmp_path: Path) -> None:
    workers = WarmWorkers(tmp_path, tmp_path, said.append, lambda record: False)
    workers.expect(COMMAND)
    assert workers._spare is None
    begin(workers)
    try:
        assert next_spare(workers) and not said
    finally:
        workers.close()


def test_a_worker_has_the_launchers_scheduling(
    workers: WarmWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-u", "-c", "import os; raise SystemExit(100 + os.sched_getscheduler(0))"]
    before = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        learn(workers, tmp_path, monkeypatch, command)
        worker = workers.start(0, command, dict(os.environ), [0, 1, 2])
        assert worker is not None and worker.wait(100) == 100 + os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


def test_a_folder_that_a_pth_file_puts_first_stays_in_the_path(
    workers: WarmWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of setuptools does for packages in development."""
    real, environment, eggs = Path(sys.executable).resolve(), tmp_path / "venv", tmp_path / "eggs"
    packages = environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for folder in (environment / "bin", packages, eggs):
        folder.mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text(f"home = {real.parent}\n")
    python = environment / "bin" / "python"
    python.symlink_to(real)
    source = Path(rekindle.__file__).parents[1]
    (packages / "eggs.pth").write_text(f"{source}\nimport sys; sys.path.insert(0, {str(eggs)!r})\n")
    (eggs / "laid.py").write_text("CODE = 7\n")
    told = "import laid, sys; raise SystemExit(laid.CODE + sum(path.endswith('/hold') for path in sys.path))"
    command = [str(python), "-u", "-c", told]
    monkeypatch.setattr(sys, "executable", str(python))
    learn(workers, tmp_path, monkeypatch, command)
    worker = workers.start(0, command, dict(os.environ), [0, 1, 2])
    assert worker is not None and worker.wait(100) == 7


def test_a_rank_with_other_arguments_is_started_cold(
    workers: WarmWorkers, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(workers, tmp_path, monkeypatch)
    first = workers.start(0, COMMAND, dict(os.environ), [0, 1, 2])
    assert first is not None and first.wait(100) == 1
    assert workers.start(1, [*COMMAND, "more"], dict(os.environ), [0, 1, 2]) is None
    assert said == ["started cold: the ranks of this node have different arguments"]


def test_a_spare_that_does_not_answer_is_ended_and_the_start_is_cold(
    workers: WarmWorkers, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = learn(workers, tmp_path, monkeypatch)
    monkeypatch.setattr(warm, "_ANSWERS_WITHIN", 0.5)
    os.kill(spare, signal.SIGSTOP)
    begin(workers)
    assert len(said) == 1 and said[0].startswith("started cold: the spare process did not answer within"), said
    assert not Path(f"/proc/{spare}").exists()
    next_spare(workers, after=spare)


def test_a_spare_keeps_what_imports_say_where_python_has_no_memfd(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; del os.memfd_create\n"
        "from rekindle.launch.spare import _Streams\n"
        "streams = _Streams(Path(sys.argv[1]))\n"
        "os.write(1, b'said')\n"
        "said = streams.end()\n"
        "os._exit(said != {1: b'said'} or os.listdir(sys.argv[1]) != [])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == "", done.stderr


def test_an_adopted_process_that_does_not_end_is_waited_for_as_long_as_that() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    adopted = AdoptedProcess(child.pid, [])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            adopted.wait(0.05)
    finally:
        child.kill()
    assert adopted.wait(100) == -signal.SIGKILL
    child.communicate()


def test_another_interpreter_has_no_spare(workers: WarmWorkers, said: list[str]) -> None:
    begin(workers, ["/bin/sh", "-c", "true"])
    workers.tend()
    assert workers._spare is None and not said


@pytest.mark.parametrize("missing", ["function", "module", "method"])
def test_a_torch_that_starts_workers_in_another_way_starts_them_cold(
    missing: str, workers: WarmWorkers, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.elastic.multiprocessing.api as api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    if missing == "function":
        monkeypatch.delattr(api, "get_subprocess_handler")
    elif missing == "module":
        monkeypatch.setitem(sys.modules, SubprocessHandler.__module__.rpartition(".")[0], None)
    else:
        monkeypatch.delattr(SubprocessHandler, "_popen")
    before = vars(api).copy()
    with warm_workers(workers) as given:
        assert given is None
        assert vars(api) == before
    assert len(said) == 1 and said[0].startswith("restarts are cold: torch ")


def test_threads_are_noticed_where_warnings_are_errors() -> None:
    """Python warns of a fork beside threads from 3.12 on; here every version does."""
    code = (
        "import _thread, os, warnings\n"
        "plain = os.fork\n"
        "def fork():\n"
        "    pid = plain()\n"
        "    if pid: warnings.warn('the process is multi-threaded', DeprecationWarning, stacklevel=2)\n"
        "    return pid\n"
        "os.fork = fork\n"
        "from rekindle.launch.preload import _has_threads\n"
        "assert not _has_threads()\n"
        "lock = _thread.allocate_lock()\n"
        "lock.acquire()\n"
        "_thread.start_new_thread(lock.acquire, ())\n"
        "assert _has_threads()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=100)
