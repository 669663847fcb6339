"""When ``rekindle run`` starts a job again, and when it ends it: with real processes, under the real launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rekindle
from rekindle.launch.torchrun import _newest
from rekindle.storage.catalog import MEMORY
from tests import forked
from tests.faults.harness import wait_for

TRAINING = """
import os, sys, torch, rekindle
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.write(1, f"start {start}\\n".encode())
ckpt = rekindle.Checkpointer(ROOT, {"model": torch.nn.Linear(2, 2)})
first = ckpt.restore() + 1
"""
"""A script's beginning. ROOT is replaced."""

GUARDED = """
with ckpt.guard() as guard:
    assert guard.connected(30)
    for step in range(first, 10):
        if step == 7 and start < TIMES:
            raise RuntimeError(f"a bad batch at {id(object()):#x}")  # another text at each start
        ckpt.step(step)
"""

PLAIN = """
for step in range(first, 10):
    if step == 7:
        raise RuntimeError(f"a bad batch, process {os.getpid()}")
    ckpt.save(step, wait="memory")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "worker.py"


NOTHING_SAVED = "this run has saved nothing: no rank on this node has made a rekindle.Checkpointer or saved a file"
COMMAND = [sys.executable, "-m", "rekindle", "run", "--standalone"]


def run(script: Path, *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return forked.run("rekindle", "run", "--standalone", *options, script, timeout=200, **more)


def starts(done: subprocess.CompletedProcess[str]) -> int:
    return done.stdout.count("start")


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.removeprefix("rekindle: ") for line in done.stderr.splitlines() if line.startswith("rekindle: ")]


def restarts(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.partition("again, ")[2] for line in told(done) if ": all ranks are started again, " in line]


@pytest.mark.parametrize(
    ("body", "where", "limit"),
    [
        pytest.param(GUARDED, "at step 7", 2, id="guarded"),
        pytest.param(PLAIN, "after step 6, the newest saved", 3, id="plain", marks=pytest.mark.campaign(seconds=15)),
    ],
)
def test_the_same_error_time_and_again_at_one_step_ends_the_job(
    script: Path, tmp_path: Path, memory: Path, body: str, where: str, limit: int
) -> None:
    """Three times, if nobody says another number."""
    root = tmp_path / "run"
    script.write_text((TRAINING + body).replace("ROOT", repr(str(root))).replace("TIMES", "100"))
    done = run(script, *(["--same-error-limit", "2"] if limit == 2 else []))
    assert done.returncode == 1 and starts(done) == limit, done.stderr
    assert restarts(done) == [f"restart {number} of 20 since step 6" for number in range(1, limit)], done.stderr
    rest = told(done)
    assert rest[-3].startswith("rank 0 raised RuntimeError: a bad batch"), done.stderr
    assert rest[-2] == f"the same error {limit} times {where}: the job is not started again", done.stderr
    assert rest[-1].startswith(f"{root}: step 6 is the newest saved, "), done.stderr
    last = done.stderr.splitlines()
    assert last[-1].startswith("RuntimeError: a bad batch"), done.stderr
    head = len(last) - 1 - last[::-1].index("Traceback (most recent call last):")
    assert any(f'File "{script}"' in line for line in last[head:]), "the traceback is last"
    assert not any(line.startswith("rekindle: ") for line in last[head:]), done.stderr


KILLED = """
import contextlib, signal
with ckpt.guard() if GUARDED else contextlib.nullcontext():
    for step in range(first, 10):
        dist.all_reduce(torch.zeros(1))
        ckpt.step(step)
        if step == 3 and start == 0 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.campaign(seconds=10))])
def test_a_rank_that_is_killed_before_there_is_an_agent_is_named(
    script: Path, tmp_path: Path, memory: Path, guarded: bool
) -> None:
    """Another rank has lost its connection, said so, and was about to end when the launcher ended it."""
    text = "import torch.distributed as dist\ndist.init_process_group('gloo')\n" + TRAINING + KILLED
    script.write_text(text.replace("ROOT", repr(str(tmp_path / "run"))).replace("GUARDED", str(guarded)))
    done = run(script, "--nproc-per-node=2")
    assert done.returncode == 0, done.stderr
    named = [line.partition(":")[0] for line in told(done) if "all ranks are started again" in line]
    assert named == ["rank 1 was killed by SIGKILL"], done.stderr


@pytest.mark.campaign(seconds=19)
def test_an_error_that_comes_once_is_got_over(script: Path, tmp_path: Path, memory: Path) -> None:
    text = (TRAINING + GUARDED).replace("ROOT", repr(str(tmp_path / "run"))).replace("TIMES", "1")
    script.write_text(text + "print('reached', step)\n")
    done = run(script)
    assert done.returncode == 0 and starts(done) == 2 and "reached 9" in done.stdout, done.stderr
    assert len(restarts(done)) == 1, done.stderr


@pytest.mark.campaign(seconds=8)
def test_a_script_that_never_gets_to_a_checkpointer_ends_after_three_starts(script: Path, memory: Path) -> None:
    """Nothing is said of a checkpoint, as there is none."""
    script.write_text("import os\nos.write(1, b'start\\n')\nimport no_such_module\n")
    done = run(script)
    assert done.returncode == 1 and starts(done) == 3, done.stderr
    assert told(done) == [
        "rank 0 ended with exit code 1: all ranks are started again, restart 1 of 20",
        "rank 0 ended with exit code 1: all ranks are started again in 1 s, restart 2 of 20",
        "rank 0 ended with exit code 1",
        "the same exit code 3 times without progress: the job is not started again",
        NOTHING_SAVED,
    ], done.stderr


@pytest.mark.campaign(seconds=10)
def test_the_number_of_like_errors_is_an_option(script: Path, memory: Path) -> None:
    script.write_text("import os, sys\nos.write(1, b'start\\n')\nsys.exit(3)\n")
    assert starts(run(script, "--same-error-limit", "1")) == 1
    done = run(script, "--same-error-limit", "0", "--max-restarts", "4", "--restart-pause", "0")
    assert starts(done) == 5 and " in " not in told(done)[3], done.stderr
    assert told(done)[-2] == "the job was started 5 times and failed each time: --max-restarts 4 allows no more"


MISMATCH = """
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
if start == "1":
    ckpt.close()
    ckpt = rekindle.Checkpointer(ROOT, {"model": torch.nn.Linear(3, 2)})
    ckpt.restore()
ckpt.save(first, wait="memory")
1 / 0
"""


@pytest.mark.campaign(seconds=11)
def test_a_state_that_does_not_fit_ends_the_job_at_once(script: Path, tmp_path: Path, memory: Path) -> None:
    root = repr(str(tmp_path / "run"))
    script.write_text((TRAINING + MISMATCH).replace("ROOT", root))
    done = run(script, "--same-error-limit", "0")
    assert done.returncode == rekindle.StateMismatchError.exit_code and starts(done) == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Error: ") and "model.weight" in last and "the job is not started again" in last, last


def test_a_usage_error_ends_the_job_at_once(script: Path, tmp_path: Path, memory: Path) -> None:
    script.write_text(TRAINING.replace("ROOT", "'ftp://host/run'"))
    done = run(script)
    assert done.returncode == rekindle.UsageError.exit_code and starts(done) == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: root 'ftp://host/run': only paths"), done.stderr


@pytest.mark.campaign(seconds=12)
def test_an_error_that_the_script_catches_ends_nothing(script: Path, tmp_path: Path, memory: Path) -> None:
    """What ends the first start is another one, which deserves another try."""
    script.write_text(
        "import os, rekindle\n"
        "os.write(1, b'start\\n')\n"
        "try:\n"
        "    rekindle.Checkpointer('ftp://host/run', {'values': rekindle.Values(x=0)})\n"
        "except rekindle.UsageError:\n"
        "    1 / int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    done = run(script)
    assert done.returncode == 0 and starts(done) == 2, done.stderr


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.campaign(seconds=10))])
def test_a_launcher_whose_lines_nobody_gets_goes_on(script: Path, memory: Path, full: bool) -> None:
    """Such as ``rekindle run train.py 2>&1 | tee log`` once tee has been killed, or when the disk of a log is full."""
    script.write_text("import os, sys\nos.write(1, b'start\\n')\nsys.exit(3)\n")
    reader, writer = os.pipe()
    os.close(reader)
    if full:
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    done = run(script, "--max-restarts", "2", "--restart-pause", "0", stderr=writer)
    os.close(writer)
    assert starts(done) == 3, "the job is started again all the same"
    assert done.returncode == 1, "and has not ended well"


def test_a_hangup_that_is_ignored_ends_nothing(script: Path, memory: Path) -> None:
    """nohup ignores it, and torchrun alone would take it for an order to end."""
    script.write_text("import os, signal\nos.write(1, b'start\\n')\nos.kill(os.getppid(), signal.SIGHUP)\n")
    nohup = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\nfrom rekindle.cli.main import main\nmain()\n"
    done = forked.run(forked.Code(nohup), "run", "--standalone", script, timeout=200)
    assert done.returncode == 0 and starts(done) == 1, done.stderr


@pytest.mark.campaign(seconds=9)
def test_the_end_of_a_rank_is_seen_where_the_launchers_parent_ignores_the_ends_of_its_own(
    script: Path, memory: Path
) -> None:
    """The kernel keeps no exit codes then, and what starts a process takes their absence for success."""
    script.write_text("raise SystemExit(3)\n")
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", ignoring, *COMMAND, "--max-restarts", "0", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "rank 0 ended with exit code 3" in done.stderr, done.stderr


def test_a_signal_that_comes_while_ranks_are_started_leaves_none_behind(tmp_path: Path, memory: Path) -> None:
    """The first rank sends it before the launcher has started the last one."""
    rank = tmp_path / "rank.sh"
    rank.write_text(f"echo $$ >> {tmp_path}/pids\n[ $RANK = 0 ] && kill -INT $PPID\nexec sleep 300\n")
    done = run(rank, "--nproc-per-node", "16", "--no-python", "sh")
    assert done.returncode == 130 and done.stderr.startswith("rekindle: ended by SIGINT\n"), done.stderr
    pids = (tmp_path / "pids").read_text().split()
    assert pids and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.campaign(seconds=15)
def test_a_torch_that_names_its_handler_otherwise_is_ended_all_the_same(script: Path, memory: Path) -> None:
    script.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(300)\n")
    later = (
        "import inspect, textwrap\n"
        "from torch.distributed.elastic.multiprocessing import api\n"
        "source = textwrap.dedent(inspect.getsource(api.PContext.start))\n"
        "exec(source.replace('_terminate_process_handler', '_answer_signal'), vars(api))\n"
        "api.PContext.start = vars(api).pop('start')\n"
        "api._answer_signal = vars(api).pop('_terminate_process_handler')\n"
        "from rekindle.cli.main import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", later, "run", "--standalone", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 130 and "\nrekindle: ended by SIGINT\n" in done.stderr, done.stderr


def test_a_second_signal_ends_the_launcher_at_once(script: Path, memory: Path) -> None:
    """It comes while the launcher waits for storage, which hangs, to tell what is saved."""
    script.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(300)\n")
    hanging = (
        "import sys, time\n"
        "import rekindle.launch.torchrun as torchrun\n"
        "def hang(*_):\n"
        "    print('asking', flush=True)\n"
        "    time.sleep(300)\n"
        "torchrun._say_what_is_saved = hang\n"
        "from rekindle.cli.main import main\n"
        "main()\n"
    )
    launcher = forked.Program(forked.Code(hanging), "run", "--standalone", script)
    assert launcher.stdout is not None and launcher.stdout.readline() == "asking\n"
    launcher.send_signal(signal.SIGINT)
    _, told = launcher.communicate(timeout=100)
    assert launcher.returncode == 130, told
    assert told.splitlines()[-1] == "rekindle: ended by SIGINT", "and no traceback of the launcher's"


@pytest.mark.campaign(seconds=12)
def test_signals_that_go_on_coming_leave_the_launchers_end_as_it_is(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    command = [*COMMAND, "--no-python", "sh", "-c", f"touch {begun}; exec sleep 300"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        wait_for(begun.exists)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.stderr is not None and "ended by SIGTERM" in launcher.stderr.readline()
        while launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        assert launcher.stderr.read().splitlines() in ([], [f"rekindle: {NOTHING_SAVED}"])
    assert launcher.returncode == 128 + signal.SIGTERM


def test_a_standard_stream_that_is_closed_is_the_null_device_for_all_ranks(script: Path, memory: Path) -> None:
    """Otherwise a file of the launcher's gets its number."""
    script.write_text(
        "import os, sys\n"
        "os.write(1, f'start with {os.readlink(\"/proc/self/fd/0\")}\\n'.encode())\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout == "start with /dev/null\n" * 2, done


FALLING = """
import os, signal, sys, torch, rekindle
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.write(1, f"start {start}\\n".encode())
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = rekindle.Checkpointer(ROOT, {"model": model, "optimizer": optimizer})
first = ckpt.restore() + 1
for step in range(first, first + 2):
    if step > 2 * FAULTS:
        sys.exit(0)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    ckpt.step(step)
if start % 2:
    raise OSError("something")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("faults", [2, pytest.param(100, marks=pytest.mark.campaign(seconds=120))])
@pytest.mark.campaign(seconds=10)
def test_faults_with_progress_between_them_never_use_up_the_restarts(
    script: Path, tmp_path: Path, memory: Path, faults: int
) -> None:
    """A SIGKILL and an error by turns, after two steps each."""
    script.write_text(FALLING.replace("ROOT", repr(str(tmp_path / "run"))).replace("FAULTS", str(faults)))
    done = forked.run("rekindle", "run", "--standalone", "--max-restarts", 1, script, timeout=1400)
    assert done.returncode == 0 and starts(done) == faults + 1, done.stderr
    assert restarts(done) == [f"restart 1 of 1 since step {2 * fault + 2}" for fault in range(faults)], done.stderr
    for start in range(faults + 1):
        assert f"start {start}\n" in done.stdout, "a script can tell its starts apart"


DCP = """
import os
os.write(1, b"start\\n")
import torch, torch.distributed.checkpoint as dcp
from rekindle.integrations.dcp import RekindleWriter
step = 1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dcp.save({"x": torch.ones(2)}, checkpoint_id=f"step-{step}", storage_writer=RekindleWriter(ROOT), no_dist=True)
if step < 3:
    raise OSError("something")
"""


@pytest.mark.campaign(seconds=18)
def test_steps_saved_through_dcp_are_progress(script: Path, tmp_path: Path, memory: Path) -> None:
    script.write_text(DCP.replace("ROOT", repr(str(tmp_path / "run"))))
    done = run(script)
    assert done.returncode == 0 and starts(done) == 3, done.stderr
    assert restarts(done) == [f"restart 1 of 20 since step {step}" for step in (1, 2)], done.stderr


@pytest.mark.campaign(seconds=27)
def test_the_node_that_gives_up_ends_the_job_on_the_other_one_too(script: Path, tmp_path: Path, memory: Path) -> None:
    """Two launchers, as on two nodes. The rank of one raises, that of the other one waits for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script.write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "os.write(1, f'start of {dist.get_rank()}\\n'.encode())\n"
        "if dist.get_rank() == 1:\n"
        "    raise ValueError('bad')\n"
        "dist.barrier()\n"
    )
    command = [sys.executable, "-m", "rekindle", "run", "--nnodes", "2", "--rdzv-id", "x"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", str(script)]
    nodes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        found = [node.communicate(timeout=150) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [1, 1], found
    assert sum(out.count("start of 1") for out, _ in found) == 3, found
    assert any("the same exit code 3 times" in err for _, err in found), found
    assert not any("launch/torchrun.py" in err for _, err in found), "no traceback of the launcher's"


FILES = """
import os, sys
import rekindle
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.write(1, f"start {start}\\n".encode())
rekindle.save(b"epoch", os.path.join(ROOT, f"{EPOCH}.bin"))
sys.exit(3 if start < 6 else 0)
"""


@pytest.mark.parametrize(
    ("epoch", "begun"),
    [
        pytest.param("start", 7, id="new ones"),
        pytest.param("0", 3, id="the same one", marks=pytest.mark.campaign(seconds=10)),
    ],
)
def test_files_that_are_saved_by_their_paths_are_progress(
    script: Path, tmp_path: Path, memory: Path, epoch: str, begun: int
) -> None:
    """A job without a Checkpointer would be given up after two restarts: as one that repeats an error, or as idle."""
    files = tmp_path / "files"
    script.write_text(FILES.replace("ROOT", repr(str(files))).replace("EPOCH", epoch))
    done = run(script, "--max-restarts", "2", "--restart-pause", "0")
    assert starts(done) == begun, done.stderr
    if begun == 7:
        assert done.returncode == 0, done.stderr
        expected = [f"restart 1 of 2 since {files / str(number)}.bin was saved" for number in range(6)]
        assert restarts(done) == expected, done.stderr
    else:
        again = f"after {files}/0.bin, the newest file saved: the job is not started again"
        assert told(done)[-2] == f"the same exit code 3 times {again}", done.stderr
        assert told(done)[-1].startswith(f"{files}/0.bin: the only file saved, "), done.stderr


@pytest.mark.parametrize(("ranks", "hope"), [([0, 1], ""), ([0], ", if the other nodes have their parts of it")])
def test_what_one_node_of_several_has_is_said_to_need_the_others(ranks: list[int], hope: str) -> None:
    copy = SimpleNamespace(step=3, place=MEMORY, ranks=ranks, world=2)
    words = _newest([SimpleNamespace(copy=copy, condition="complete")])  # type: ignore[list-item]
    assert words.endswith(f"and nothing is on storage yet; the next start goes on from there{hope}")
