"""The command line: tables for people, JSON for programs, exit codes that can be trusted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import rekindle
from rekindle.cli.main import main
from rekindle.cli.terminal import asks_for_json
from rekindle.launch.torchrun import _saved, _say_what_is_saved
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.status import StatusPage
from tests import forked
from tests.faults.harness import Run, finish, kill, restored, start, train, wait_for


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def parsed(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def trained(root: Path, memory: Path) -> Path:
    """A root with two durable checkpoints and nothing in memory."""
    assert train(Run(root, memory, steps=3, wait="durable", options={"keep": 2})) == [0]
    wait_for(lambda: not JobDir.of(root, memory_base(memory)).path.exists())
    return root


@pytest.fixture
def crashed(root: Path, memory: Path) -> JobDir:
    """A job whose trainer and agent were killed after step 3; nothing is on storage."""
    dying = Run(root, memory, points={0: "save.committed@3"}, options={"persist_every": 1000}, executable="/bin/false")
    assert train(dying) == [-9]
    return JobDir.of(root, memory_base(memory))


def test_ls_shows_every_copy(trained: Path) -> None:
    listed = parsed("ls", trained)
    assert [entry["step"] for entry in listed] == [3, 2]
    assert {entry["place"] for entry in listed} == {"storage"}
    table = run("ls", trained)
    assert table.exit_code == 0
    assert "step" in table.stdout and "scratch" in table.stdout


def test_ls_of_nothing_is_an_error(tmp_path: Path, memory: Path) -> None:
    result = run("ls", tmp_path / "none")
    assert result.exit_code == rekindle.NotFoundError.exit_code
    assert result.stderr.startswith("Error: ")


def test_ls_lists_what_memory_holds_and_fails_while_storage_is_away(crashed: JobDir, root: Path) -> None:
    assert run("ls", root).exit_code == 0
    crashed.notes.write_durable(2)
    result = run("ls", root, "--json")
    error = json.loads(result.stderr)["error"]
    assert result.exit_code == error["exit_code"] == 1
    assert error["message"].startswith(f"{root}: step 2 was there, and nothing is now")
    assert [(entry["step"], entry["place"]) for entry in json.loads(result.stdout)] == [(3, "memory"), (2, "memory")]
    crashed.snapshots.remove()
    result = run("ls", root)
    assert result.exit_code == 1 and "step 2 was there" in result.stderr and not result.stdout


def test_inspect_shows_tensors_and_values(trained: Path) -> None:
    found = parsed("inspect", trained, 2)
    assert found["step"] == 2
    names = {tensor["name"]: tensor for tensor in found["shards"][0]["tensors"]}
    assert names["model.0.weight"]["sizes"] == [16, 16]
    assert "model.3.weight" not in names, "tied to model.0.weight, so stored once"
    assert found["shards"][0]["values"]["scheduler.last_epoch"] == 2
    table = run("inspect", trained)
    assert "optimizer.param_groups[0].lr" in table.stdout


def test_verify_reads_every_byte(trained: Path) -> None:
    assert {entry["verdict"] for entry in parsed("verify", trained)} == {"sound"}
    assert run("verify", trained, 99).exit_code == rekindle.NotFoundError.exit_code


def test_status_of_a_live_job(root: Path, memory: Path) -> None:
    processes = start(Run(root, memory, steps=10_000, pause=0.02))
    job = JobDir.of(root, memory_base(memory))
    wait_for(lambda: job.agent() and job.paths.agent_socket.exists() and job.notes.durable())
    (found,) = parsed("status", root)
    assert found["trainers"] == {"0": processes[0].pid}
    assert found["agent"] == job.agent() == found["drain"]["pid"]
    assert found["memory_steps"] and found["memory_bytes"] > 0
    assert run("status").exit_code == 0
    busy = run("stop", root)
    assert busy.exit_code == rekindle.BusyError.exit_code
    kill(processes[0].pid or 0)
    assert finish(processes) == [-9]
    ended = run("stop", root)
    assert ended.exit_code == 0, ended.output
    assert not job.path.exists()
    assert parsed("status") == []
    (found,) = parsed("status", root)
    assert found["durable_step"] == parsed("ls", root)[0]["step"] and found["trainers"] == {}
    assert "has ended, and its step" in run("stop", root).stdout
    assert run("status", root.with_name("elsewhere")).exit_code == rekindle.NotFoundError.exit_code


def test_status_of_a_job_without_an_agent_is_a_failure(root: Path, memory: Path) -> None:
    job = JobDir.of(root, memory_base(memory))
    job.create()
    with open(job.paths.rank_lock(0), "w") as held:
        code = (
            "import fcntl, sys, time\n"
            "fcntl.flock(int(sys.argv[1]), fcntl.LOCK_EX)\n"
            "print(1, flush=True)\n"
            "time.sleep(60)"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(held.fileno())], pass_fds=[held.fileno()], stdout=subprocess.PIPE
        )
    assert child.stdout is not None and child.stdout.readline()
    result = run("status", root)
    child.kill()
    child.wait()
    child.stdout.close()
    assert result.exit_code == 1
    assert "no agent" in result.stderr


def test_status_names_a_job_of_unknown_root_by_its_directory(root: Path, memory: Path) -> None:
    job = JobDir.of(root, memory_base(memory))
    lock, page = job.lock_rank(0, 5.0), StatusPage(job.paths.status_page(0), 1)
    job.paths.fault.write_text(json.dumps(Fault("exit", 0, 1, 7, "rank 0 ended").to_json()))
    result = run("status", root)
    assert result.exit_code == 1 and page.step == -1
    assert result.stdout.count(str(job.path)) == 1 and "None" not in result.output
    lock.release()


def test_snapshots_of_an_unknown_job_are_a_problem_and_stay(crashed: JobDir, root: Path, memory: Path) -> None:
    """The job's description was removed: its snapshots can't be drained, so the memory must stay."""
    (crashed.path / "job.json").unlink()
    for command in (["status"], ["status", root], ["stop", root], ["stop", "--stale"]):
        result = run(*command)
        assert result.exit_code in (1, rekindle.NotDurableError.exit_code), result.output
        assert "step 3 stays in memory" in result.stderr and "Start the job again" in result.stderr
    with subprocess.Popen([sys.executable, "-m", "rekindle.agent", str(crashed.path)]) as agent:
        wait_for(lambda: crashed.agent() == agent.pid and "step 3 stays in memory" in crashed.notes.drain_error())
        result = run("stop", root)
        assert result.exit_code == rekindle.NotDurableError.exit_code and "Start the job again" in result.stderr
        agent.kill()
    again = Run(root, memory, steps=4, wait="durable")
    assert train(again) == [0] and restored(again)[-1] == 3
    assert parsed("ls", root)[0]["step"] == 4


def test_storage_that_is_away_is_named_once_and_with_what_to_do(crashed: JobDir, root: Path) -> None:
    crashed.notes.write_durable(2)
    away = f"{root}: step 2 was there, and nothing is now: see that it is mounted"
    alone = run("stop", root, "--timeout", "1")
    assert alone.exit_code == rekindle.NotDurableError.exit_code and away in alone.stderr
    with subprocess.Popen([sys.executable, "-m", "rekindle.agent", str(crashed.path)]) as agent:
        wait_for(lambda: crashed.agent() == agent.pid and "step 2 was there" in crashed.notes.drain_error())
        wait_for(lambda: run("status", root).stderr.startswith(f"Error: {away}"))
        stopping = run("stop", root, "--timeout", "1")
        assert stopping.exit_code == rekindle.NotDurableError.exit_code and away in stopping.stderr
        agent.kill()


def test_stop_carries_what_only_memory_holds_to_storage(crashed: JobDir, root: Path) -> None:
    result = run("stop", root)
    assert result.exit_code == 0, result.output
    assert not crashed.path.exists()
    assert [entry["step"] for entry in parsed("ls", root)] == [3]


def test_stop_stale_finds_jobs_that_are_gone(crashed: JobDir, root: Path) -> None:
    result = run("stop", "--stale")
    assert result.exit_code == 0, result.output
    assert str(crashed.path) in result.stdout
    assert not crashed.path.exists()
    assert [entry["step"] for entry in parsed("ls", root)] == [3]
    assert "nothing is stale" in run("stop", "--stale").stdout


def test_stop_never_drops_what_storage_does_not_take(crashed: JobDir, root: Path) -> None:
    root.write_text("a file where the directory should be")
    result = run("stop", root, "--timeout", "1")
    assert result.exit_code == rekindle.NotDurableError.exit_code
    assert crashed.path.exists()
    assert run("stop", root, "--discard").exit_code == 0
    assert not crashed.path.exists()


def test_pin_and_unpin_answer_programs_too(root: Path, memory: Path) -> None:
    with rekindle.Checkpointer(root, {"values": rekindle.Values(x=0)}) as ckpt:
        ckpt.save(1, wait="durable", timeout=60, pin=False)
    for command, pinned in (("pin", True), ("unpin", False)):
        told = run(command, root, 1, "--json")
        assert told.exit_code == 0 and json.loads(told.stdout) == {"step": 1, "pinned": pinned}
        assert run("ls", root).stdout.count("pinned") == pinned
    missing = run("pin", root, 2, "--json")
    assert missing.exit_code == 3 and json.loads(missing.stderr)["error"]["type"] == "NotFoundError"


def test_stop_wants_one_of_root_and_stale(memory: Path) -> None:
    assert run("stop").exit_code == 2
    assert run("stop", "x", "--stale").exit_code == 2


_RUN = [sys.executable, "-m", "rekindle", "run"]


def launch(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A run of ``rekindle run`` in a process of its own, once it has ended."""
    return forked.run("rekindle", "run", *arguments, timeout=100)


def eight_steps(root: Path) -> str:
    """A script that makes 8 guarded steps. Lines that follow in the guarded block may be added."""
    return (
        "import os, signal, time, torch, rekindle\n"
        f"ckpt = rekindle.Checkpointer({str(root)!r}, {{'model': torch.nn.Linear(2, 2)}})\n"
        "ckpt.restore()\n"
        "with ckpt.guard(watchdog='fast') as guard:\n"
        "    assert guard.connected(30)\n"
        "    for step in range(1, 9):\n"
        "        time.sleep(0.02)\n"
        "        ckpt.step(step)\n"
    )


def test_run_is_torchrun_with_what_restarts_need(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys\n"
        "assert ('TORCH_DISABLE_SHARE_RDZV_TCP_STORE' in os.environ) == (len(sys.argv) > 1)\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "os.write(1, f\"start {os.environ['RANK']} {os.environ['WORLD_SIZE']}\\n\".encode())\n"  # in one piece
        "sys.exit(1 if first else 0)\n"
    )
    for options, arguments in ([], []), (["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"], ["torch's"]):
        done = launch(*options, "--nproc-per-node", 2, script, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("start 0 2") == done.stdout.count("start 1 2") == 2


def test_run_ends_with_the_first_fault_and_what_is_saved(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 raises at each start, rank 0 ends because of it: rank 1 is named, and that nothing is saved."""
    monkeypatch.delenv("OMP_NUM_THREADS")  # torchrun says that it sets it
    root, script = tmp_path / "run", tmp_path / "worker.py"
    script.write_text(
        "import os, sys, torch, rekindle, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.Linear(2, 2)\n"
        "wrapped = torch.nn.parallel.DistributedDataParallel(model)\n"
        f"ckpt = rekindle.Checkpointer({str(root)!r}, {{'model': model}})\n"
        "ckpt.restore()\n"
        "with ckpt.guard() as guard:\n"
        "    assert guard.connected(30)\n"
        "    dist.barrier()\n"
        "    if dist.get_rank() == 1:\n"
        "        raise RuntimeError('a bad batch')\n"
        "    wrapped(torch.ones(2, 2)).sum().backward()\n"
    )
    done = launch("--standalone", "--max-restarts", 0, "--nproc-per-node", 2, script)
    assert done.returncode == 1
    first, tries, saved = done.stderr.splitlines()[-3:]
    assert first == "rekindle: rank 1 raised RuntimeError: a bad batch", done.stderr
    assert tries == "rekindle: the job is not started again: --max-restarts is 0", done.stderr
    for rank in (0, 1):
        assert f"rekindle: rank {rank}'s part of step 0 secured in memory, 0." in done.stderr, done.stderr
    assert saved.startswith(f"rekindle: {root}: step 0 is the newest saved"), "the state that had been made was secured"
    assert sum(line.endswith("RuntimeError: a bad batch") for line in done.stderr.splitlines()) == 3, done.stderr
    for noise in ("in torchrun", "launch/torchrun.py", "closing signal", "OMP_NUM_THREADS", "====", "error file"):
        assert noise not in done.stderr, done.stderr


@pytest.mark.campaign(seconds=7)
def test_run_tells_each_restart_in_a_line_and_why_a_rank_was_killed(tmp_path: Path, memory: Path) -> None:
    """The first start raises, the second stands still and is killed by the agent."""
    root, script = tmp_path / "run", tmp_path / "worker.py"
    raises_first = "import os\n1 / int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    script.write_text(raises_first + eight_steps(root) + "    os.kill(os.getpid(), signal.SIGSTOP)\n")
    done = launch("--max-restarts", 1, "--count-restarts", "job", script)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if not line.startswith((" ", "Traceback", "ZeroDivisionError"))]
    assert lines[:-1] == [
        "rekindle: rank 0 ended with exit code 1: all ranks are started again, restart 1 of 1",
        "rekindle: rank 0 was killed by SIGKILL (rank 0 hangs after step 8, before its next update)",
        "rekindle: the job was started 2 times and failed each time: --max-restarts 1 allows no more",
    ], done.stderr
    assert lines[-1].startswith(f"rekindle: {root}: step 8 is the newest saved, "), done.stderr
    assert done.stderr.count("ZeroDivisionError") == 1


@pytest.mark.campaign(seconds=9)
def test_run_names_a_rank_that_hung_and_could_still_end_itself(tmp_path: Path, memory: Path) -> None:
    root, script = tmp_path / "run", tmp_path / "worker.py"
    script.write_text(eight_steps(root) + "    time.sleep(100)\n")
    command = [*_RUN, "--max-restarts", "1", str(script)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stderr is not None
        told = next((line for line in launcher.stderr if "restart 1 of 1" in line), "")
        launcher.terminate()
        launcher.communicate(timeout=60)
    assert told == (
        "rekindle: rank 0 ended with exit code 75 (rank 0 hangs after step 8, before its next update): all ranks are "
        "started again, restart 1 of 1 since step 8\n"
    )


@pytest.mark.campaign(seconds=9)
def test_run_ends_at_once_where_another_job_trains_the_root(tmp_path: Path, memory: Path) -> None:
    """Each further start would wait for it again, and end alike."""
    root, script = tmp_path / "run", tmp_path / "worker.py"
    script.write_text(
        "import torch, rekindle\n"
        "import rekindle.session.session as session\n"
        "session._SOON = session._DYING = 0.1\n"
        f"rekindle.Checkpointer({str(root)!r}, {{'model': torch.nn.Linear(2, 2)}})\n"
    )
    with rekindle.Checkpointer(root, {"values": rekindle.Values(x=0)}):
        done = launch(script)
    assert done.returncode == rekindle.BusyError.exit_code, done.stderr
    assert "restart 1 of" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Error: ") and f"process {os.getpid()}" in last and "the job is not started again" in last


@pytest.mark.campaign(seconds=7)
def test_run_that_is_interrupted_says_what_is_saved(tmp_path: Path, memory: Path) -> None:
    root, script = tmp_path / "run", tmp_path / "worker.py"
    script.write_text(
        "import time, torch, rekindle\n"
        f"ckpt = rekindle.Checkpointer({str(root)!r}, {{'model': torch.nn.Linear(2, 2)}})\n"
        "for step in range(ckpt.restore() + 1, 4):\n"
        "    ckpt.save(step, wait='memory')\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [*_RUN, "--standalone", str(script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
        _, told = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, told
    assert "rekindle: ended by SIGINT\n" in told and "launch/torchrun.py" not in told, told
    assert f"rekindle: {root}: step 3 is the newest saved, " in told, told


def test_run_of_what_is_not_there_starts_nothing(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("PET_MAX_RESTARTS", "20")
    for arguments, why in (
        ([str(tmp_path / "nosuch.py")], "nosuch.py: No such file or directory: nothing was started"),
        ([str(tmp_path / "nosuch.py"), "--compile", "--restart", "--log", "x"], "nosuch.py: No such file or directory"),
        ([str(tmp_path)], f"{tmp_path}: No such file or directory: nothing was started"),
        (["-m", "no_such_module.train"], "there is no module 'no_such_module'"),
        (["--no-python", "no-such-program"], "no-such-program: there is no such program"),
    ):
        done = run("run", "--nproc-per-node", "2", *arguments)
        assert done.exit_code == 2 and why in done.stderr and len(done.stderr.splitlines()) == 1, done.output
    for arguments in (["--help"], ["--nproc-per-node", "2", "--help"]):
        done = run("run", *arguments)
        assert done.exit_code == 0 and "Restarts: when a rank ends" in done.stdout, done.output


def test_the_newest_saved_step_is_told_with_its_place(crashed: JobDir, root: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    _say_what_is_saved(tmp_path, lines.append)
    assert lines == [
        "this run has saved nothing: no rank on this node has made a rekindle.Checkpointer or saved a file"
    ]
    base = crashed.path.parent
    told = _saved(root, base)
    assert told.startswith("step 3 is the newest saved, in this node's memory, and nothing is on storage yet"), told
    assert run("stop", root).exit_code == 0
    assert _saved(root, base).startswith("step 3 is the newest saved, on storage; the next start")


def test_an_interrupt_is_one_line_and_130(memory: Path) -> None:
    """A real SIGINT, once the command is at work."""
    main_thread = threading.main_thread().ident

    def at_work() -> bool:
        frame = sys._current_frames().get(main_thread or 0)
        while frame is not None and frame.f_code.co_name != "_watch":
            frame = frame.f_back
        return frame is not None

    def interrupt() -> None:
        wait_for(at_work)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        done = run("status", "--watch")
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 130 and done.stderr == "Error: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "kind", "code", "message"),
    [
        (["ls", "nosuch"], "NotFoundError", 3, "nosuch: no checkpoint"),
        (["ls", "ftp://host/run"], "UsageError", 2, "root 'ftp://host/run': only paths"),
        (["ls"], "UsageError", 2, "Missing argument 'ROOT'"),
        (["inspect", "nosuch", "many"], "UsageError", 2, "'many' is not a valid integer"),
        (["verify", "nosuch", "--nosuch"], "UsageError", 2, "No such option"),
        (["nosuch"], "UsageError", 2, "No such command 'nosuch'"),
        (["status", "--watch"], "UsageError", 2, "either --watch or --json"),
        (["export", "nosuch", "out", "--format", "tar"], "UsageError", 2, "'tar' is not one of"),
        (["ls", "nosuch", "--memory", "/dev/null/x"], "NotADirectoryError", 1, "should be"),
    ],
)
def test_errors_are_json_for_who_asks_for_json(
    memory: Path, arguments: list[str], kind: str, code: int, message: str
) -> None:
    result = run(*arguments, "--json")
    assert result.exit_code == code and result.stdout == ""
    error = json.loads(result.stderr)["error"]
    assert (error["type"], error["exit_code"]) == (kind, code) and message in error["message"]


def test_what_a_script_is_given_is_not_ours(tmp_path: Path) -> None:
    """Neither after 'run', nor after '--', is a --json said to us."""
    assert not asks_for_json(["run", "train.py", "--json"])
    assert not asks_for_json(["ls", "--", "--json"])


def test_every_command_says_what_it_does() -> None:
    for name, command in main.commands.items():
        assert command.help, name
    assert "..." not in run("--help").stdout.partition("Commands:")[2], "a command's one line is cut"
    assert run("--version").stdout == f"rekindle {rekindle.__version__}\n"
