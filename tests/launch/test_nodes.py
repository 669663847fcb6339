"""A job on several nodes as its launchers see it: settings, and real launchers whose ranks only wait."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import UsageError
from rekindle.faults.torchelastic import FRESH_STORE, SURVIVOR_EXIT
from rekindle.launch.rendezvous.handler import SPARE, Rendezvous
from rekindle.launch.rendezvous_settings import fit_settings, forget_defaults
from tests import forked
from tests.forked import Program
from tests.launch.launcher import WARM, parent

LONG = 150.0
"""Seconds that nothing here may take."""


def fitted(*options: str) -> Any:
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    parser = get_args_parser()
    forget_defaults(parser)
    args = parser.parse_args([*options, "train.py"])
    fit_settings(args, parse_min_max_nnodes(args.nnodes)[1])
    return args


AT = "--rdzv-endpoint=a:29400"


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ([], "alone"),
        (["--standalone"], "alone"),
        (["--standalone", "--rdzv-backend=c10d", AT], "alone"),
        (["--nnodes=1:1", "--rdzv-id=mine"], "alone"),
        (["--nnodes=2", AT], "rekindle"),
        (["--nnodes=1:4", f"{AT},b:29400"], "rekindle"),
        (["--rdzv-endpoint=localhost:29400"], "alone"),
        (["--rdzv-endpoint=a:0"], "alone"),
        ([AT, "--node-rank=0"], "alone"),
        (["--node-rank=0", "--master-addr=a", "--master-port=29500"], "alone"),
        (["--master-port=29501"], "alone"),
        ([AT, "--rdzv-backend=rekindle"], "rekindle"),
        (["--rdzv-backend=c10d"], "c10d"),
        (["--rdzv-backend=static"], "static"),
        (["--nnodes=2", AT, "--node-rank=0"], "static"),
        (["--nnodes=2", AT, "--rdzv-backend=static"], "static"),
        (["--nnodes=2", AT, "--rdzv-backend=c10d"], "c10d"),
        (["--nnodes=2", "--node-rank=1", "--master-addr=a"], "static"),
    ],
)
def test_the_backend_that_is_left_open_fits_the_number_of_nodes(options: list[str], backend: str) -> None:
    args = fitted(*options)
    alone = backend == "alone"
    assert args.rdzv_backend == ("rekindle" if alone else backend)
    assert args.rdzv_conf == "" and isinstance(args.node_rank, int) and not args.standalone
    if alone:
        assert args.rdzv_endpoint == "" and (args.rdzv_id == "mine" or len(args.rdzv_id) == 36)


def test_nodes_that_have_no_place_to_meet_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--nnodes 2 needs --rdzv-endpoint HOST:PORT"):
        fitted("--nnodes=2")

    with pytest.raises(UsageError, match="--standalone is a job of one node, and --nnodes is 2"):
        fitted("--nnodes=2", "--standalone")


@pytest.mark.parametrize("endpoint", ["a:29400", "a"])
def test_a_job_of_one_node_at_another_one_is_a_usage_error(endpoint: str) -> None:
    """As a spare it would train the whole job anew, beside the first one."""
    with pytest.raises(UsageError, match=f"{endpoint} is another one: for a spare give --rdzv-backend rekindle"):
        fitted(f"--rdzv-endpoint={endpoint}")


def test_a_node_rank_in_the_environment_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "0")
    assert fitted("--nnodes=2", AT).rdzv_backend == "static"


# -- real launchers ----------------------------------------------------------------------------------------------------

RUN = ["run", "--nnodes=2", "--no-python"]
"""The launcher of one node of two, which meet on this machine."""
NO_ROOT = "rekindle: this run has saved nothing: no rank on this node has made a rekindle.Checkpointer or saved a file"

OTHERS_FAILED = "rekindle: all ranks are started again with those of other nodes"


def until(holds: Any) -> None:
    limit = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < limit, "it did not come to be"
        time.sleep(0.02)


class Nodes:
    """Launchers of several nodes. Their ranks note that they have begun, and wait to be told to end."""

    def __init__(self, place: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._begun = place / "begun"
        self._begun.touch()
        self._word = place / "word"
        self._refused = place / "refused-by"
        self.script = place / "rank.sh"
        note = "$$ $RANK $WORLD_SIZE $TORCHELASTIC_USE_AGENT_STORE $MASTER_ADDR"
        refuse = f"mv {self._refused}-$PPID-{{}} $REKINDLE_LAUNCH/refused"
        self.script.write_text(
            f"exec 2>/dev/null\ntrap '{refuse.format('end')}; exit 1' TERM\necho {note} >> {self._begun}\n"
            f"{refuse.format('start')} && exit 1\nuntil [ -e {self._word} ]; do sleep 0.1; done"
        )
        self.started: list[Program] = []

    def start(self, *options: str) -> Program:
        """Starts one more. The first one leads."""
        return self._start(RUN, *options, "sh", str(self.script))

    def start_spare(self) -> Program:
        """Starts one more, and waits until it has heard that it is one: then it knows who may lead next."""
        started = self.start()
        assert started.stderr is not None and f"rekindle: {SPARE}\n" in started.stderr
        return started

    def write_python(self) -> Path:
        """Writes a script of which a spare node says that it has loaded what it imports."""
        script = self.script.with_name("train.py")
        note = "os.getpid(), *map(os.environ.get, ('RANK', 'WORLD_SIZE')), 'torch' in sys.modules"
        script.write_text(
            f"import os, sys, time\nloaded = ({note})\nimport rekindle\n"
            f"open({str(self._begun)!r}, 'a').write(' '.join(map(str, loaded)) + '\\n')\n"
            f"while not os.path.exists({str(self._word)!r}): time.sleep(0.1)\n"
        )
        return script

    def start_python(self, script: Path, *options: str) -> Program:
        return self._start(RUN[:-1], *options, str(script))

    def _start(self, run: list[str], *rest: str) -> Program:
        command = [*run, f"--rdzv-endpoint=127.0.0.1:{self.port}", *rest]
        null = os.open(os.devnull, os.O_WRONLY)
        self.started.append(Program("rekindle", *command, stdout=null))
        os.close(null)
        if len(self.started) == 1:
            until(self._is_listened_to)
        return self.started[-1]

    def _is_listened_to(self) -> bool:
        with socket.socket() as probe:
            return not probe.connect_ex(("127.0.0.1", self.port))

    @property
    def begun(self) -> list[list[str]]:
        """The notes of all ranks that have begun, in order."""
        return [line.split() for line in self._begun.read_text().splitlines()]

    @property
    def pids(self) -> list[int]:
        return [int(words[0]) for words in self.begun]

    def refuse(self, launcher: Program, when: str, error: str) -> None:
        """Have a rank of this launcher leave an error at its start, or when it is told to end. It ends with 1 then."""
        draft = self._refused.with_name("draft")
        draft.write_text(json.dumps([error, "for a test"]))
        draft.rename(f"{self._refused}-{launcher.pid}-{when}")

    def lose(self, launcher: Program, rank: int) -> None:
        """Ends a launcher and its rank."""
        launcher.kill()
        os.kill(rank, signal.SIGKILL)

    def rank_of(self, launcher: Program) -> int:
        """Returns the rank of a launcher, which has one."""
        (pid,) = [pid for pid in self.pids if Path(f"/proc/{pid}").exists() and parent(pid) == launcher.pid]
        return pid

    def kill_ranks(self) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def finish(self) -> None:
        """Have the ranks end well."""
        self._word.touch()

    def end(self) -> None:
        for process in self.started:
            process.kill()
        self.kill_ranks()  # they hold the launchers' stderr
        for process in self.started:
            process.communicate(timeout=LONG)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.end()


SLOW = ("[W", "rekindle: waits for other nodes, ")
"""Beginnings of what is said on a busy machine: torch's warnings of sockets, and that another launcher is slow."""


def said(process: Program) -> list[str]:
    """Returns what a launcher has said, once it has ended, without what only a busy machine has it say."""
    return [line for line in process.communicate(timeout=LONG)[1].splitlines() if not line.startswith(SLOW)]


def test_a_killed_rank_has_all_nodes_start_again_on_the_ranks_that_they_had(job: Nodes) -> None:
    both = job.start(), job.start()
    until(lambda: len(job.begun) == 2)
    before = {words[1]: parent(int(words[0])) for words in job.begun}
    os.kill(job.pids[0], signal.SIGKILL)
    until(lambda: len(job.begun) == 4)
    assert {words[1]: parent(int(words[0])) for words in job.begun[2:]} == before
    assert {tuple(words[2:]) for words in job.begun} == {("2", "True", "127.0.0.1")}
    job.finish()
    told = [said(process) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    failed, other = sorted(told, key=lambda lines: OTHERS_FAILED in lines)
    assert other == [OTHERS_FAILED] and len(failed) == 1, told
    assert "was killed by SIGKILL: all ranks are started again" in failed[0]


SAVES = """
import os, time, torch, rekindle
torch.distributed.init_process_group("gloo")
ckpt = rekindle.Checkpointer({root!r}, {{"model": torch.nn.Linear(2, 2)}})
ckpt.restore()
ckpt.save(1, wait="memory")
open({begun!r}, "a").write(f"{{os.getpid()}} {{os.environ['RANK']}}\\n")
time.sleep(600)
"""


@pytest.mark.campaign(seconds=15)
def test_launchers_that_share_a_memory_store_all_learn_what_is_saved(
    job: Nodes, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_MEMORY", str(memory))
    script = job.script.with_name("saves.py")
    script.write_text(SAVES.format(root=str(root), begun=str(job._begun)))
    both = job.start_python(script), job.start_python(script)
    until(lambda: len(job.begun) == 2)
    for each in both:
        each.send_signal(signal.SIGTERM)
    for each in both:
        assert [line for line in said(each) if line.startswith(f"rekindle: {root}: step 1 is the newest saved")]


@pytest.mark.campaign(seconds=15)
def test_a_launcher_whose_ranks_have_survived_a_fault_tells_of_it(
    job: Nodes, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_MEMORY", str(memory))
    script = job.script.with_name("survives.py")
    guarded = "with ckpt.guard():\n    while True:\n        torch.distributed.barrier()"
    script.write_text(SAVES.format(root=str(root), begun=str(job._begun)).replace("time.sleep(600)", guarded))
    first, other = job.start_python(script), job.start_python(script)
    until(lambda: len(job.begun) == 2)
    rank = next(words[1] for words in job.begun if parent(int(words[0])) == first.pid)
    os.kill(job.rank_of(first), signal.SIGKILL)
    assert other.stderr is not None
    told = next(line for line in other.stderr if "all ranks are started again" in line)
    why = f"(rank {rank} was killed by SIGKILL)"  # who looks first at its ranks is chance
    itself = f"rekindle: local rank 0 ended with exit code {SURVIVOR_EXIT} {why}: all ranks are started again"
    assert told == f"{OTHERS_FAILED} {why}\n" or told.startswith(itself), told


def one_ends_first(job: Nodes, ends: int, *options: str) -> tuple[Program, Program]:
    """Starts two nodes. Returns that of rank ``ends`` once this has ended well, as the launcher says, and the other."""
    waiting = f"until [ -e {job._word} ]; do sleep 0.1; done"
    job.script.write_text(f"echo $$ $RANK >> {job._begun}; [ $RANK = {ends} ] || {waiting}")
    both = job.start(*options), job.start(*options)
    until(lambda: len(job.begun) == 2)
    waits = both[ends]
    assert waits.stderr is not None
    assert next(line for line in waits.stderr if not line.startswith(SLOW)) == f"{WAITS}\n"
    return waits, both[1 - ends]


WAITS = "rekindle: all ranks of this node have ended well: waits for those of others"


@pytest.mark.campaign(seconds=12)
def test_a_launcher_that_waits_for_the_ranks_of_others_answers_a_signal(job: Nodes) -> None:
    waits, _ = one_ends_first(job, 0)
    waits.send_signal(signal.SIGTERM)
    assert said(waits)[:2] == [
        "rekindle: all ranks of this node had ended well; those of others may not have",
        "rekindle: ended by SIGTERM",
    ]
    assert waits.returncode == 128 + signal.SIGTERM


@pytest.mark.campaign(seconds=15)
def test_ranks_that_have_ended_well_are_started_again_for_others_that_fail_later(job: Nodes) -> None:
    waits, other = one_ends_first(job, 0)
    os.kill(job.rank_of(other), signal.SIGKILL)
    until(lambda: len(job.begun) == 4)
    job.finish()
    told = said(waits), said(other)
    assert [waits.returncode, other.returncode] == [0, 0], told
    assert told[0][0] == OTHERS_FAILED and "was killed by SIGKILL: all ranks are started again" in told[1][0]


@pytest.mark.campaign(seconds=12)
@pytest.mark.parametrize("ends", [0, 1])
def test_a_node_whose_ranks_have_ended_well_ends_with_a_job_that_is_given_up(ends: int, job: Nodes) -> None:
    waits, other = one_ends_first(job, ends, "--max-restarts=0")
    os.kill(job.rank_of(other), signal.SIGKILL)
    told = said(waits), said(other)
    assert [waits.returncode, other.returncode] == [1, 1], told
    assert told[0] == ["rekindle: ended, because the job has ended on another node", NO_ROOT]


@pytest.mark.campaign(seconds=20)
@pytest.mark.parametrize("ends", [0, 1])
def test_a_spare_takes_the_place_of_a_node_that_goes_when_the_ranks_of_others_have_ended_well(
    ends: int, job: Nodes
) -> None:
    """That of the launcher that leads, and keeps the store of the round, as well as another one's."""
    waits, other = one_ends_first(job, ends)
    spare = job.start_spare()
    job.lose(other, job.rank_of(other))
    until(lambda: len(job.begun) == 4)
    job.finish()
    told = said(waits), said(spare)
    assert [waits.returncode, spare.returncode] == [0, 0], told
    assert OTHERS_FAILED in told[0] and not any("not needed" in line for line in told[1]), told


@pytest.mark.campaign(seconds=25)
def test_the_job_goes_on_without_the_launcher_that_led(job: Nodes) -> None:
    first, second = job.start(), job.start()
    until(lambda: len(job.begun) == 2)
    spare = job.start_spare()
    first.kill()
    job.kill_ranks()
    until(lambda: len(job.begun) == 4)
    job.finish()
    told = [said(process) for process in (second, spare)]
    assert [process.returncode for process in (second, spare)] == [0, 0], told
    leads = [line for lines in told for line in lines if "the launcher that led is lost: this one leads on" in line]
    assert len(leads) == 1, told


@pytest.mark.campaign(seconds=15)
def test_jobs_of_one_node_at_the_same_endpoint_start_again_side_by_side(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    os.kill(os.getpid(), 9) if dist.get_rank() else dist.barrier()\n"
        "print('trained', flush=True)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:  # as by any other program
        options = ["--nproc-per-node=2", "--restart-pause=0", f"--rdzv-endpoint=127.0.0.1:{taken.getsockname()[1]}"]
        jobs = [Program("rekindle", "run", *options, script) for _ in range(2)]
        told = [job.communicate(timeout=LONG)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0] and [text.count("trained") for text in told] == [2, 2], told


@pytest.mark.campaign(seconds=45)
def test_a_job_of_one_node_has_spares_too(job: Nodes) -> None:
    script = job.write_python()
    one = ("--nnodes=1", "--rdzv-backend=rekindle")
    first = job.start_python(script, *one)
    until(lambda: len(job.begun) == 1)
    spares = [job.start_python(script, *one) for _ in range(2)]
    for spare in spares:
        assert spare.stderr is not None and any(WARM in line for line in spare.stderr)
    first.kill()
    job.kill_ranks()
    until(lambda: len(job.begun) == 2)
    assert {parent(job.pids[1])} < {spare.pid for spare in spares}
    job.finish()
    told = [said(process) for process in spares]
    assert [process.returncode for process in spares] == [0, 0], told
    assert sum("this node was a spare, and was not needed" in line for lines in told for line in lines) == 1, told
    assert len(job.begun) == 2


@pytest.mark.campaign(seconds=10)
@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("127.0.0.1:{}", "nobody listens there: start 'rekindle run' on that node too"),
        ("no-such-node.invalid:{}", "its name is not known here"),
    ],
)
def test_a_launcher_that_reaches_nobody_says_why_in_one_line(job: Nodes, endpoint: str, why: str) -> None:
    options = [f"--rdzv-endpoint={endpoint.format(job.port)}", "--rdzv-conf=is_host=0,read_timeout=2"]
    done = forked.run("rekindle", *RUN, *options, "true", timeout=LONG)
    assert done.returncode == 1
    told = done.stderr.splitlines()
    assert ", where the nodes are to meet, was not reached: " in told[0] and why in told[0], done.stderr
    assert told[1:] == [NO_ROOT], done.stderr


@pytest.mark.campaign(seconds=18)
def test_a_spare_node_steps_in_and_one_that_is_not_needed_ends_well(job: Nodes) -> None:
    leader, second = job.start(), job.start()
    until(lambda: len(job.begun) == 2)
    spares = [job.start_spare(), job.start_spare()]
    second.kill()
    job.kill_ranks()
    until(lambda: len(job.begun) == 4)
    assert [spare.poll() for spare in spares] == [None, None]
    job.finish()
    told = [said(process) for process in (leader, *spares)]
    assert [process.returncode for process in (leader, *spares)] == [0, 0, 0], told
    assert any("this node was a spare, and was not needed" in lines[-1] for lines in told[1:] if lines), told


@pytest.mark.campaign(seconds=18)
def test_a_root_that_is_busy_ends_no_job_that_goes_on_with_other_nodes(job: Nodes) -> None:
    """Neither where ranks were ended for a node that takes a place, nor on that node, which had none before."""
    leader, second = job.start(), job.start()
    until(lambda: len(job.begun) == 2)
    spare = job.start()
    for launcher in (leader, spare):
        job.refuse(launcher, "start", "BusyError")
    job.lose(second, job.rank_of(second))
    until(lambda: len(job.begun) == 6)
    job.finish()
    told = [said(process) for process in (leader, spare)]
    assert [process.returncode for process in (leader, spare)] == [0, 0], told


@pytest.mark.campaign(seconds=12)
def test_nodes_that_meet_wait_for_the_pause_of_any_of_them(job: Nodes) -> None:
    first, second = job.start(), job.start()
    for starts in (2, 4, 6):
        until(lambda starts=starts: len(job.begun) == starts)
        killed = time.monotonic()
        os.kill(job.rank_of(first), signal.SIGKILL)
    until(lambda: len(job.begun) == 8)
    assert time.monotonic() - killed >= 2.0
    job.finish()
    told = [said(process) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], told
    assert "all ranks are started again in 2 s, restart 3 of 20" in told[0][-1]


@pytest.mark.campaign(seconds=18)
def test_what_a_rank_leaves_when_it_is_ended_for_another_node_is_not_taken_for_the_next_failure(job: Nodes) -> None:
    leader, second = job.start(), job.start()
    until(lambda: len(job.begun) == 2)
    spare = job.start()
    job.refuse(leader, "end", "UsageError")
    job.lose(second, job.rank_of(second))
    until(lambda: len(job.begun) == 4)
    os.kill(job.rank_of(leader), signal.SIGTERM)
    until(lambda: len(job.begun) == 6)
    job.finish()
    told = [said(process) for process in (leader, spare)]
    assert [process.returncode for process in (leader, spare)] == [0, 0], told


@pytest.mark.campaign(seconds=40)
def test_the_ranks_of_a_spare_node_find_loaded_what_the_script_imports(job: Nodes) -> None:
    script = job.write_python()
    leader, second = job.start_python(script), job.start_python(script)
    until(lambda: len(job.begun) == 2)
    spare = job.start_python(script)
    assert spare.stderr is not None and any(WARM in line for line in spare.stderr)
    second.kill()
    job.kill_ranks()
    until(lambda: len(job.begun) == 4)
    assert sorted(words[3] for words in job.begun) == ["False", "False", "False", "True"]
    job.finish()
    assert said(spare) == said(leader)[1:] == []


@pytest.mark.campaign(seconds=17)
def test_when_a_node_is_lost_just_after_all_have_met_the_others_meet_again(
    job: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    monkeypatch.setenv(FRESH_STORE, "")  # so that it is taken back: a handler sets it for the ranks
    first = job.start("--rdzv-id=job")
    lost = Rendezvous(RendezvousParameters("rekindle", f"127.0.0.1:{job.port}", "job", 2, 2))
    lost.next_rendezvous()
    lost._hub.stop()
    second = job.start("--rdzv-id=job")
    until(lambda: len(job.begun) == 2)
    job.finish()
    told = [said(process) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], told
    assert told[0] == ["rekindle: a node was lost just after all had met: the others meet again"]
    assert told[1] in ([], [f"rekindle: {SPARE}"]), "the lost one's place was not free at first"
