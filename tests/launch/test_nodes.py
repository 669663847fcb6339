"""A job on several nodes as its launchers see it: settings, spare nodes, and the loss of the store where they meet."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import UsageError
from rekindle.launch.meeting import SILENT_FOR, MeetingPoint
from rekindle.launch.places import VACANT_FOR, keep_places
from rekindle.launch.rendezvous_settings import fit_settings, forget_defaults

LONG = 150.0
"""Seconds that nothing here may take."""
SIGNS = ["keep_alive_interval=1", "keep_alive_max_attempt=3", "last_call_timeout=1"]
POWER_LOSS = Path(__file__).with_name("power_loss.py")


def fitted(*options: str) -> Any:
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    parser = get_args_parser()
    forget_defaults(parser)
    args = parser.parse_args([*options, "train.py"])
    fit_settings(args, parse_min_max_nnodes(args.nnodes)[1])
    return args


AT = "--rdzv-endpoint=a:29400"


@pytest.mark.parametrize(
    ("options", "backend", "conf"),
    [
        ([], "static", []),
        (["--standalone"], "static", []),
        (["--nnodes=2", AT], "c10d", SIGNS),
        (["--nnodes=1:4", AT, "--rdzv-conf=last_call_timeout=7"], "c10d", ["last_call_timeout=7", *SIGNS[:2]]),
        (["--nnodes=200", AT], "c10d", ["keep_alive_interval=4", *SIGNS[1:]]),
        (["--nnodes=2", AT, "--node-rank=0"], "static", []),
        (["--nnodes=2", AT, "--rdzv-backend=static"], "static", []),
        (["--nnodes=2", AT, "--rdzv-backend=etcd-v2"], "etcd-v2", SIGNS),
        (["--nnodes=2", "--node-rank=1", "--master-addr=a"], "static", []),
    ],
)
def test_settings_that_are_left_open_fit_the_number_of_nodes(options: list[str], backend: str, conf: list[str]) -> None:
    args = fitted(*options)
    assert args.rdzv_backend == backend
    assert args.rdzv_conf == ",".join(conf)
    assert isinstance(args.node_rank, int)


def test_nodes_that_have_no_place_to_meet_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--nnodes 2 needs --rdzv-endpoint HOST:PORT"):
        fitted("--nnodes=2")


def test_a_node_rank_in_the_environment_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "0")
    assert fitted("--nnodes=2", AT).rdzv_backend == "static"


@pytest.mark.parametrize("endpoint", [["--rdzv-endpoint", "a:29400"], ["--rdzv_endpoint=a:29400"]])
def test_the_command_that_goes_on_meets_at_another_node(endpoint: list[str]) -> None:
    arguments = ["--nnodes", "2", *endpoint, "--local-addr", "fe80::2", "train.py", "--rdzv-endpoint", "mine"]
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(arguments)
    assert MeetingPoint(args, 2).command(arguments) == shlex.join(
        [
            *("rekindle", "run", "--rdzv-endpoint", "[fe80::2]:29400", "--nnodes", "2", "--local-addr", "fe80::2"),
            *("train.py", "--rdzv-endpoint", "mine"),
        ]
    )


# -- spare nodes: torch's own rendezvous, over a store in this process ---------------------------------------------


class Node:
    """A node's handler of the rendezvous "job". It joins in a thread, as a launcher would by itself."""

    def __init__(self, store: Any, least: int, most: int) -> None:
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

        backend = C10dRendezvousBackend(store, "job")
        seconds = timedelta(seconds=1)
        settings = torchs.RendezvousSettings(
            "job", least, most, torchs.RendezvousTimeout(last_call=seconds), seconds, keep_alive_max_attempt=3
        )
        holder = torchs._BackendRendezvousStateHolder(backend, settings, cache_duration=0)
        name = torchs.DynamicRendezvousHandler._node_desc_generator.generate("localhost")
        self.handler = torchs.DynamicRendezvousHandler(name, settings, "c10d", store, holder)
        self.name = name
        self.joined = threading.Event()

    def join(self) -> None:
        self.joined.clear()
        threading.Thread(target=self._join, daemon=True).start()

    def _join(self) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousError

        with suppress(RendezvousError):  # nobody has come in time, long after the test
            self.handler.next_rendezvous()
            self.joined.set()

    def meet(self) -> None:
        """Joins a round, and tells the others nothing after that."""
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

        self.handler._op_executor.run(torchs._RendezvousJoinOp(), time.monotonic() + LONG, self.handler._get_deadline)

    def lose(self) -> None:
        """Show no sign of life any more."""
        with suppress(RuntimeError):  # their thread is about to start, and ends at once
            self.handler._stop_heartbeats()

    @property
    def state(self) -> Any:
        self.handler._state_holder.sync()
        return self.handler._state_holder.state


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes nodes that meet each other."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setattr(dynamic_rendezvous, "_delay", lambda seconds: time.sleep(0.01))
    store = HashStore()
    made: list[Node] = []

    def make(count: int, least: int, most: int) -> list[Node]:
        made.extend(Node(store, least, most) for _ in range(count))
        return made[-count:]

    with keep_places():
        yield make
        for node in made:
            node.lose()


def until(holds: Any) -> None:
    limit = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < limit, "it did not come to be"
        time.sleep(0.02)


def test_a_spare_node_takes_no_place_of_one_that_comes_back(nodes: Any) -> None:
    """Nor does a node that comes while places seem free, and none is waited for by a job that runs."""
    first, second, spare, later = nodes(4, 2, 2)
    for node in (first, second):
        node.join()
    until(lambda: first.joined.is_set() and second.joined.is_set())
    spare.join()
    until(lambda: spare.name in first.state.redundancy_list)
    first.join()  # its ranks have failed; those of the second have not ended yet
    until(lambda: first.name in second.state.wait_list)
    later.join()
    until(lambda: later.name in second.state.redundancy_list)
    second.join()
    until(lambda: first.joined.is_set() and second.joined.is_set())
    assert set(first.state.participants) == {first.name, second.name}
    assert first.handler.num_nodes_waiting() == 0
    assert first.state.redundancy_list == {spare.name, later.name}


def test_a_spare_node_takes_the_place_of_a_lost_one(nodes: Any) -> None:
    first, second, spare, further = nodes(4, 2, 2)
    for node in (first, second):
        node.join()
    until(lambda: first.joined.is_set() and second.joined.is_set())
    spare.join()
    further.join()
    until(lambda: first.state.redundancy_list == {spare.name, further.name})
    second.lose()
    began = time.monotonic()
    first.join()
    until(lambda: first.joined.is_set() and spare.joined.is_set())
    assert time.monotonic() - began >= VACANT_FOR
    assert set(first.state.participants) == {first.name, spare.name}
    assert first.handler.num_nodes_waiting() == 0 and first.state.redundancy_list == {further.name}


def test_a_node_that_was_taken_for_lost_becomes_the_spare(nodes: Any) -> None:
    """Three nodes want two places. The one that comes last waits without being waited for."""
    first, second, spare = nodes(3, 2, 2)
    for node in (first, second):
        node.join()
    until(lambda: first.joined.is_set() and second.joined.is_set())
    spare.join()
    until(lambda: spare.name in first.state.redundancy_list)
    second.lose()
    until(lambda: first.handler.num_nodes_waiting() == 1)
    second.join()
    until(lambda: first.handler.num_nodes_waiting() == 2)
    first.join()
    until(lambda: len(first.state.redundancy_list) == 1)
    assert first.handler.num_nodes_waiting() == 0 and len(first.state.participants) == 2


def test_a_job_that_may_grow_is_told_of_a_node_that_comes(nodes: Any) -> None:
    first, second, third = nodes(3, 2, 3)
    for node in (first, second):
        node.join()
    until(lambda: first.joined.is_set() and second.joined.is_set())
    third.join()
    until(lambda: first.handler.num_nodes_waiting() == 1)
    for node in (first, second):
        node.join()
    until(lambda: first.joined.is_set() and second.joined.is_set() and third.joined.is_set())
    assert len(first.state.participants) == 3


# -- the store: real launchers, whose ranks only sleep -------------------------------------------------------------

RUN = [sys.executable, "-m", "rekindle", "run", "--nnodes=2", "--local-addr=127.0.0.1", "--no-python"]
"""The launcher of one node of two, which meet on this machine."""
NO_ROOT = "rekindle: this run has saved nothing: no rank on this node has made a rekindle.Checkpointer or saved a file"


class Nodes:
    """Launchers of several nodes. Their ranks note that they have begun, and wait to be told to end."""

    def __init__(self, place: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._begun = place / "begun"
        self._begun.touch()
        self._word = place / "word"
        self.script = place / "rank.sh"
        self.script.write_text(f"echo $$ >> {self._begun}; until [ -e {self._word} ]; do sleep 0.1; done")
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Starts one more. The first one has the store."""
        command = [*RUN, f"--rdzv-endpoint=127.0.0.1:{self.port}", *options, "sh", str(self.script)]
        self.started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        until(self._store_is_there)
        return self.started[-1]

    def _store_is_there(self) -> bool:
        with socket.socket() as probe:
            return not probe.connect_ex(("127.0.0.1", self.port))

    @property
    def ranks(self) -> list[int]:
        return [int(pid) for pid in self._begun.read_text().split()]

    def finish(self) -> None:
        """Have the ranks end well."""
        self._word.touch()

    def end(self) -> None:
        for process in self.started:
            process.kill()
        for rank in self.ranks:  # which hold the launchers' stderr
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        for process in self.started:
            process.communicate(timeout=LONG)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.end()


def said(process: subprocess.Popen[str]) -> list[str]:
    """Returns what a launcher has said, once it has ended."""
    return process.communicate(timeout=LONG)[1].splitlines()


def test_the_end_of_the_launcher_with_the_store_is_told_in_few_lines(job: Nodes) -> None:
    with_store, other = job.start(), job.start()
    until(lambda: len(job.ranks) == 2)
    with_store.kill()
    told = said(other)
    assert other.returncode == 1
    place = f"127.0.0.1:{job.port}"
    assert told == [
        f"rekindle: ended: {place}, where the nodes met, is lost: the launcher that had the store has ended",
        NO_ROOT,
        f"rekindle: to go on, start this on 2 nodes: rekindle run --rdzv-endpoint {place} --nnodes=2 "
        f"--local-addr=127.0.0.1 --no-python sh {job.script}",
    ], "\n".join(told)


@pytest.mark.campaign(seconds=10)
@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("127.0.0.1:{}", "nobody listens there: start 'rekindle run' on that node too"),
        ("no-such-node.invalid:{}", "the name no-such-node.invalid is not known here"),
    ],
)
def test_a_launcher_that_reaches_nobody_says_why_in_one_line(job: Nodes, endpoint: str, why: str) -> None:
    options = [f"--rdzv-endpoint={endpoint.format(job.port)}", "--rdzv-conf=is_host=0,read_timeout=1"]
    done = subprocess.run([*RUN, *options, "true"], capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 1
    told = done.stderr.splitlines()
    assert ", where the nodes are to meet, was not reached: " in told[0] and why in told[0], done.stderr
    assert told[1:] == [NO_ROOT], done.stderr


def in_own_network(*command: str) -> Any:
    """Runs the program that cuts the network, in one of its own. Returns what it has printed."""
    line = ["unshare", "--map-root-user", "--net", sys.executable, str(POWER_LOSS), *command]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=2 * LONG, check=False)
    except FileNotFoundError:
        pytest.skip("no program unshare is here")
    if done.stderr.startswith("unshare:"):
        pytest.skip(f"no network of its own can be made here: {done.stderr.strip()}")
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_connections_to_a_node_without_power_end() -> None:
    """The one over which something was sent, and the one that awaits an answer. TCP itself would wait for minutes."""
    lost = in_own_network()
    assert len(lost) == 2 and max(lost) < 60.0  # the program itself gives up after two minutes


@pytest.mark.campaign(seconds=50)
def test_the_power_loss_of_the_node_with_the_store_is_told_in_few_lines(tmp_path: Path) -> None:
    code, seconds, told = in_own_network(*RUN, str(tmp_path / "begun"))
    assert code == 1
    assert SILENT_FOR * 0.9 < seconds < SILENT_FOR + LONG
    assert ", where the nodes met, is lost: it does not answer: that node is lost, or can't be reached" in told[-3]
    assert told[-2] == NO_ROOT and "to go on, start this on 2 nodes: rekindle run --rdzv-endpoint" in told[-1]
    assert len(told) == 3, "\n".join(told)


@pytest.mark.campaign(seconds=30)
def test_a_spare_node_steps_in_and_one_that_is_not_needed_ends_well(job: Nodes) -> None:
    with_store, second = job.start(), job.start()
    until(lambda: len(job.ranks) == 2)
    spares = [job.start(), job.start()]
    second.kill()
    for rank in job.ranks:
        os.kill(rank, signal.SIGKILL)
    until(lambda: len(job.ranks) == 4)
    assert [spare.poll() for spare in spares] == [None, None]
    job.finish()
    told = [said(process) for process in (with_store, *spares)]
    assert [process.returncode for process in (with_store, *spares)] == [0, 0, 0], told
    assert sorted(len(lines) for lines in told) == [0, 1, 1], told
    assert any("this node was a spare, and was not needed" in lines[-1] for lines in told[1:] if lines), told


@pytest.mark.campaign(seconds=25)
def test_when_a_node_is_lost_just_after_all_have_met_the_others_meet_again(job: Nodes) -> None:
    from torch.distributed import TCPStore

    first = job.start("--rdzv-id=job")
    Node(TCPStore("127.0.0.1", job.port, timeout=timedelta(seconds=LONG)), 2, 2).meet()
    second = job.start("--rdzv-id=job")
    until(lambda: len(job.ranks) == 2)
    job.finish()
    told = [said(process) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], told
    assert told == [
        [f"rekindle: a node was lost just after all had met at 127.0.0.1:{job.port}: the others meet again"],
        [],
    ]
