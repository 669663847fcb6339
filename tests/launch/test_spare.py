"""Restarts from a spare: what they run, and how a start falls back to a cold one, with one line that says why."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rekindle
from rekindle.faults.torchelastic import LAUNCH
from rekindle.launch.spare import _may_leave_idle
from tests.launch.launcher import WARM, Job, children, descriptors, parent

SAVING = Path(__file__).with_name("saving.py")


@contextmanager
def job(*arguments: object, **more: object) -> Iterator[Job]:
    with Job(*arguments, **more) as running:  # type: ignore[arg-type]
        yield running


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ("SIGKILL", "was killed by SIGKILL"),
        pytest.param("7", "ended with exit code 7", marks=pytest.mark.campaign(seconds=20)),
    ],
)
def test_a_warm_worker_ends_as_it_would_anyhow(tmp_path, order, told):
    with job(tmp_path) as run:
        run.wait_for(WARM)
        assert len(run.starts) == 1, "the spare has run the script"
        run.order("SIGKILL")
        run.stepped(1)
        assert parent(run.starts[1]) == run.process.pid
        assert len(run.spares()) == 1
        run.order(order)
        run.stepped(2)
        run.wait_until(lambda: len(run.restarts) == 2)
        assert f"rank 0 {told}: all ranks are started again, restart 1 of 20 since step " in run.restarts[1]
        run.order("end")
        assert run.process.wait(60) == 0
        assert not run.cold
        assert len(run.starts) == 3
        assert not run.spares()
    cold, *warm = map(int, (tmp_path / "objects").read_text().split())
    assert max(warm) < cold, "collections of a worker write to the memory that it shares with the spare"


@pytest.mark.campaign(seconds=23)
def test_a_killed_spare_is_replaced_while_training_goes_on(tmp_path):
    with job(tmp_path) as run:
        run.wait_for(WARM)
        (spare,) = run.spares()
        os.kill(spare, signal.SIGKILL)
        run.wait_for("the spare process was killed by SIGKILL: restarts are cold until another one is ready")
        run.wait_until(lambda: sum(WARM in line for line in run.lines) == 2)
        assert len(run.starts) == 1, "training has been disturbed"
        run.order("SIGKILL")
        run.stepped(1)
        assert not run.cold


@pytest.mark.campaign(seconds=20)
def test_a_spare_loads_at_idle_priority_and_sleeps_while_training_runs(tmp_path):
    with job(tmp_path) as run:
        run.wait_until(lambda: bool(run.spares()))
        (spare,) = run.spares()
        if _may_leave_idle():  # else it rests between imports
            run.wait_until(lambda: os.sched_getscheduler(spare) == os.SCHED_IDLE or WARM in run.output)
            assert WARM not in run.output
        run.wait_for(WARM)
        assert os.sched_getscheduler(spare) == os.SCHED_OTHER
        run.make_steps(20)  # by then it has gone to sleep
        woken = times_woken(spare)
        run.make_steps(50)
        assert times_woken(spare) == woken


def times_woken(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.campaign(seconds=30)
def test_restarts_leave_nothing_behind(tmp_path):
    """The same under random kills, many times: ``test_kills.py``."""
    with job(tmp_path) as run:
        run.wait_for(WARM)
        left = []
        for start in range(1, 9):
            run.order("SIGKILL")
            run.stepped(start)
            left.append((descriptors(run.process.pid), len(children(run.process.pid))))
        assert left == [left[0]] * len(left), "descriptors and children of the launcher after each restart"
        assert left[0][1] == 2, "a worker and the spare"
        assert not run.cold
        run.order("end")
        assert run.process.wait(60) == 0


@pytest.mark.parametrize("asleep", [True, False], ids=["asleep", "loading"])
@pytest.mark.campaign(seconds=15)
def test_a_spare_dies_with_its_launcher(tmp_path, asleep):
    with job(tmp_path) as run:
        if asleep:
            run.wait_for(WARM)
        run.wait_until(lambda: bool(run.spares()))
        (spare,) = run.spares()
        run.process.kill()
        run.wait_until(lambda: is_gone(spare))
        run.wait_until(lambda: (tmp_path / "starts").exists())
        run.order("end")  # the worker lives on, as any does
        run.wait_until(lambda: all(is_gone(pid) for pid in run.starts))


@pytest.mark.campaign(seconds=20)
def test_a_variable_that_the_script_sets_is_not_there_early_enough(tmp_path):
    with job(tmp_path, SET_BY_SCRIPT="OMP_DYNAMIC") as run:
        run.wait_for(WARM)
        run.order("SIGKILL")
        run.wait_for("started cold: the script sets OMP_DYNAMIC itself")
        run.stepped(1)
        run.order("end")
        assert run.process.wait(60) == 0


@pytest.mark.campaign(seconds=25)
def test_a_start_after_a_warm_one_that_came_nowhere_is_cold(tmp_path):
    (tmp_path / "fail-1").touch()
    with job(tmp_path) as run:
        run.wait_for(WARM)
        run.order("SIGKILL")
        run.wait_for("started cold: the last warm start did not come as far as its second step")
        run.stepped(2)
        run.order("SIGKILL")
        run.stepped(3)
        assert len(run.cold) == 1


@pytest.mark.campaign(seconds=17)
def test_a_state_that_does_not_fit_a_warm_start_ends_the_job(tmp_path):
    (tmp_path / "unlike-1").touch()
    with job(tmp_path) as run:
        run.wait_for(WARM)
        run.order("SIGKILL")
        assert run.process.wait(60) == rekindle.StateMismatchError.exit_code
        run.read_out()
        assert run.lines[-1].startswith("Error: ") and "the job is not started again" in run.lines[-1], run.output
        assert len(run.starts) == 2 and not run.cold


@pytest.mark.campaign(seconds=20)
def test_a_warm_start_waits_as_long_as_a_cold_one(tmp_path):
    """The pause between starts that make no progress: a warm start has cost the same error as a cold one."""
    for start in (1, 2):
        (tmp_path / f"fail-{start}").touch()
    with job(tmp_path) as run:
        run.wait_for(WARM)
        run.order("SIGKILL")
        run.wait_for("rank 0 ended with exit code 9: all ranks are started again, restart 2 of 20")
        run.wait_for("rank 0 ended with exit code 9: all ranks are started again in 1 s, restart 3 of 20")
        run.stepped(3)
        assert run.times[3] - run.times[2] >= 1.0
        assert len(run.cold) == 1 and "the last warm start did not come as far as its second step" in run.cold[0]


@pytest.mark.campaign(seconds=16)
def test_the_directory_of_a_launcher_is_locked_against_those_who_tidy_up(tmp_path):
    with job(tmp_path, options=("--no-warm",)) as run:
        run.stepped(0)
        told = (Path("/proc") / str(run.starts[0]) / "environ").read_bytes().split(b"\0")
        (place,) = (Path(os.fsdecode(one.partition(b"=")[2])) for one in told if one.startswith(f"{LAUNCH}=".encode()))
        directory = os.open(place, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        run.order("end")
        assert run.process.wait(60) == 0
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(directory)
        assert not place.exists()


@pytest.mark.campaign(seconds=11)
def test_no_warm_keeps_no_spare(tmp_path):
    with job(tmp_path, options=("--no-warm",)) as run:
        run.stepped(0)
        assert not run.spares()
        run.order("SIGKILL")
        run.stepped(1)
        run.order("end")
        assert run.process.wait(60) == 0
        assert WARM not in run.output
        assert not run.cold


@pytest.mark.parametrize("how", ["save", pytest.param("dcp", marks=pytest.mark.campaign(seconds=25))])
@pytest.mark.campaign(seconds=20)
def test_a_script_that_saves_by_other_means_than_step_is_started_warm(tmp_path, how):
    with job(tmp_path, how, script=SAVING) as run:
        run.wait_for(WARM)
        os.kill(run.starts[0], signal.SIGKILL)
        run.stepped(1)
        os.kill(run.starts[1], signal.SIGKILL)
        run.stepped(2)
        assert not run.cold


# -- installed packages -----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path):
    """Environment with a folder of installed packages, and that folder."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = tmp_path / "base" / "lib" / version / "site-packages"
    folder.mkdir(parents=True)
    return {"PYTHONUSERBASE": str(tmp_path / "base"), "PYTHONPATH": str(folder)}, folder


@pytest.mark.campaign(seconds=16)
def test_a_changed_file_of_an_imported_package_makes_a_start_cold(tmp_path, installed):
    environment, folder = installed
    file = folder / "changing.py"
    file.write_text("VALUE = 1\n")
    with job(tmp_path, "changing", **environment) as run:
        run.wait_for(WARM)
        file.write_text("VALUE = 'changed'\n")
        run.order("SIGKILL")
        run.wait_for(f"started cold: {file} has changed")
        run.stepped(1)
        run.wait_until(lambda: sum(WARM in line for line in run.lines) == 2)  # a new one has loaded the new file
        run.order("SIGKILL")
        run.stepped(2)
        assert len(run.cold) == 1


_WHILE_ITS_PARENT = "while kill -0 $PPID 2>/dev/null; do sleep 0.1; done"
UNFIT = {
    "import os; RANK = os.environ.get('RANK')": "reads RANK",
    "import os; ALL = dict(os.environ)": "reads the whole environment",
    "import os; os.environ['SOME_SETTING'] = '1'": "sets SOME_SETTING",
    "FILE = open(__file__)": "opens a file or device",
    "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()": "starts a thread",
    f"import subprocess; subprocess.Popen(['sh', '-c', {_WHILE_ITS_PARENT!r}])": "starts a process",
}


_FIRST, *_OTHERS = UNFIT


@pytest.mark.parametrize(
    "code", [_FIRST, *(pytest.param(code, marks=pytest.mark.campaign(seconds=20)) for code in _OTHERS)]
)
@pytest.mark.campaign(seconds=18)
def test_a_package_whose_import_leaves_more_than_objects_is_not_loaded_ahead(tmp_path, installed, code):
    environment, folder = installed
    (folder / "unfit.py").write_text(f"import os\nopen('imports', 'a').write(f'{{os.getpid()}}\\n')\n{code}\n")
    with job(tmp_path, "unfit", **environment) as run:
        assert f"without unfit: its import {UNFIT[code]}" in run.wait_for(WARM)
        run.order("SIGKILL")
        run.stepped(1)
        assert not run.cold
        assert str(run.starts[1]) in (tmp_path / "imports").read_text().split()


@pytest.mark.campaign(seconds=15)
def test_what_an_import_says_comes_from_the_worker(tmp_path, installed):
    environment, folder = installed
    (folder / "talking.py").write_text("import sys; print('said at the import', file=sys.stderr)\n")
    with job(tmp_path, "talking", **environment) as run:
        run.wait_for(WARM)
        run.order("SIGKILL")
        run.stepped(1)
        assert sum("said at the import" in line for line in run.lines) == 2


@pytest.mark.campaign(seconds=15)
def test_a_warm_start_takes_less_than_the_import_of_torch(tmp_path):
    """Seconds of processor time from the start of a worker to its third step."""
    with job(tmp_path) as run:
        run.stepped(0)
        cold = processor_time(run.starts[0])
        run.wait_for(WARM)
        run.order("SIGKILL")
        run.stepped(1)
        assert processor_time(run.starts[1]) < cold / 2


def processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
