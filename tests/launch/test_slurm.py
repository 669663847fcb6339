"""The example for Slurm, on a Slurm of four nodes, all of them this machine.

They train a sharded model. What they end with is what an unbroken run ends with, bit for bit. Each node has a memory
store of its own, which is lost with it.
"""

from __future__ import annotations

import functools
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fork_server import context
from tests.launch import sharded
from tests.stored import newest

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "examples/slurm/train.sbatch"
NODES = ("n1", "n2", "n3", "n4")
LIMIT = 40
"""Step at which a job waits for the test, so that a fault comes before its end."""
LONG = 150.0
"""Seconds that nothing here may take."""
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=6
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=8
NodeName=n4 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[4]} CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP
"""

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not (shutil.which("slurmctld") and shutil.which("slurmd")), reason="no Slurm is installed"),
]


def until(holds: Callable[[], object]) -> None:
    limit = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < limit, "it did not come to be"
        time.sleep(0.1)


class Begun(NamedTuple):
    """A rank that has begun, and the step that it goes on from."""

    node: str
    pid: int
    step: int


class Process(NamedTuple):
    pid: int
    again: bool
    """Belongs to the start behind the queue."""


class Cluster:
    """A controller, four nodes, and the example as its job, for so many nodes that train, and so many spares."""

    def __init__(self, place: Path, train: int, spares: int) -> None:
        self.train, self._nodes = train, train + spares
        self._place, self._told, self._limit = place, place / "told", place / "limit"
        self._told.touch()
        self.go_on(LIMIT)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (place / name).mkdir()
        conf = place / "slurm.conf"
        ports = _free_ports(6)
        conf.write_text(CONF.format(host=socket.gethostname(), ports=ports, user=getpass.getuser(), place=place))
        # All nodes are one machine, with one /dev/shm: each has a file system of its own in its place.
        wrapped = place / "bin/rekindle"
        wrapped.parent.mkdir()
        wrapped.write_text(
            f'#!/bin/sh\nexport REKINDLE_MEMORY="{place}/$SLURMD_NODENAME"\n'
            f'exec "{Path(sys.executable).parent}/rekindle" "$@"\n'
        )
        wrapped.chmod(0o755)
        self._environment = {
            **os.environ,
            "SLURM_CONF": str(conf),
            "PATH": f"{wrapped.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPO),
            "TOLD": str(self._told),
            "LIMIT": str(self._limit),
            "PET_NO_WARM": str(int(not spares)),  # its processes cost more than they save where little is tested
        }
        self._daemons = {"": self._start("slurmctld", "-D")}
        for node in NODES:
            self.start_node(node)
        until(lambda: self.tell("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(len(NODES)))
        self._job = self._submit(ports[-1])

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        log = (self._place / "daemons.log").open("ab")
        with log:
            return subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    def _submit(self, port: int) -> str:
        text = SCRIPT.read_text()
        for pattern, replacement in (
            (r"#SBATCH --(gpus|exclusive|time).*", ""),
            (r"--nodes=\d+", f"--nodes={self._nodes}"),
            (r"train=\d+", f"train={self.train}"),
            (r"root=.*", f"root={self._place}/run"),
            (r"--nproc-per-node \d+", "--nproc-per-node 1"),
            (r"\$head:\d+", f"127.0.0.1:{port}"),
            (r"train\.py ", f"{sharded.__file__} "),
        ):
            text, count = re.subn(pattern, replacement, text)
            assert count, f"{pattern} is not in the example"
        script = self._place / "job.sbatch"
        script.write_text(text)
        output = self._place / "output"
        return self.tell("sbatch", "--parsable", f"--output={output}", str(script)).strip()

    def tell(self, *command: str) -> str:
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout

    def start_node(self, node: str) -> None:
        self._daemons[node] = self._start("slurmd", "-D", "-N", node)

    def _lines(self, word: str) -> list[list[str]]:
        lines = [line.split() for line in self._told.read_text().splitlines()]
        return [line[1:] for line in lines if line[0] == word]

    @property
    def begun(self) -> list[Begun]:
        """Ranks that have begun, those of the first start first."""
        return [Begun(node, int(pid), int(step)) for _, node, pid, step in self._lines("begun")]

    @property
    def ended(self) -> dict[int, str]:
        """Digest of what each rank has ended with."""
        return {int(rank): digest for rank, digest in self._lines("ended")}

    @property
    def done(self) -> int:
        """Newest step that all ranks have completed."""
        newest = {int(rank): int(step) for rank, step in self._lines("did")}
        return min(newest.values()) if len(newest) == self.train else 0

    @property
    def safe(self) -> int:
        """Newest step that survives the loss of a node, as a rank has been told."""
        return max((int(step) for _, step in self._lines("safe")), default=0)

    @property
    def durable(self) -> int:
        """Newest step on storage; -1 for none."""
        return newest(self._place / "run")

    @property
    def state(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S+)", self.tell("scontrol", "show", "job", self._job)))

    @property
    def output(self) -> str:
        return (self._place / "output").read_text()

    def go_on(self, limit: int) -> None:
        """Let the ranks train up to a step."""
        new = self._limit.with_suffix(".new")
        new.write_text(str(limit))
        new.rename(self._limit)

    def complete(self) -> None:
        """Let the job train to its end, and see that this is the end of an unbroken run."""
        self.go_on(sharded.STEPS)
        until(lambda: self.state["JobState"] in ("COMPLETED", "FAILED", "NODE_FAIL"))
        assert self.state["JobState"] == "COMPLETED", self.output
        assert self.ended == unbroken(self.train) and len(self.ended) == self.train

    def terminate(self) -> None:
        """Do what Slurm does at the time of --signal."""
        self.tell("scancel", "--signal=TERM", self._job)

    def requeue(self) -> None:
        self.tell("scontrol", "requeue", self._job)
        self.await_requeue()

    def await_requeue(self) -> None:
        """Kill what the first start has left, the agents, as Slurm does where it has cgroups."""
        until(lambda: self.state["Restarts"] == "1")
        for node in NODES:
            self._kill(found for found in self._processes(node) if not found.again)

    def lose(self, node: str) -> None:
        """Kill all of a node at once, and take its memory."""
        self._daemons[node].kill()
        self._kill(self._processes(node))
        shutil.rmtree(self._place / node, ignore_errors=True)

    def _processes(self, node: str) -> list[Process]:
        return _processes_with(f"SLURMD_NODENAME={node}", f"SLURM_CONF={self._environment['SLURM_CONF']}")

    def _kill(self, processes: Iterable[Process]) -> None:
        found = [process.pid for process in processes]
        for pid in [*filter(_is_slurms, map(_parent, found)), *found]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        self.tell("scancel", self._job)
        for node in NODES:
            self.lose(node)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        # What watched over a step that has ended may wait for a controller that is gone.
        self._kill(_processes_with(f"SLURM_CONF={self._environment['SLURM_CONF']}"))


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _processes_with(*settings: str) -> list[Process]:
    """Returns the processes with these in their environment: of a node its batch script, launcher, ranks and agent."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            told = (path / "environ").read_bytes().split(b"\0")
            if all(setting.encode() in told for setting in settings):
                found.append(Process(int(path.name), b"SLURM_RESTART_COUNT=1" in told))
    return found


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 1


def _is_slurms(pid: int) -> bool:
    """True for a process that watches the tasks of a step."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")
    return False


@functools.cache
def unbroken(world: int) -> dict[int, str]:
    """Returns the digest of what each rank of a run ends with that has no fault, no Checkpointer and no Slurm."""
    with tempfile.TemporaryDirectory() as place:
        ranks = [context.Process(target=sharded.alone, args=(rank, world, Path(place))) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LONG)
        lines = [line.split() for line in (Path(place) / "told").read_text().splitlines()]
    return {int(rank): rest[0] for word, rank, *rest in lines if word == "ended"}


@pytest.fixture
def made(tmp_path: Path, mounted: Callable[..., Path]) -> Iterator[Callable[..., Cluster]]:
    with ExitStack() as clusters:

        def make(train: int, spares: int) -> Cluster:
            for node in NODES:
                mounted(node, "-t", "tmpfs", "-o", "size=256m,mode=700", "tmpfs")
            cluster = Cluster(tmp_path, train, spares)
            clusters.callback(cluster.end)
            return cluster

        yield make


@pytest.fixture
def cluster(made: Callable[..., Cluster]) -> Cluster:
    """Three nodes train, one is a spare."""
    return made(train=3, spares=1)


@pytest.mark.parametrize("train", [1, pytest.param(2, marks=pytest.mark.campaign(seconds=45))])
def test_a_requeued_job_goes_on(train: int, made: Callable[..., Cluster]) -> None:
    cluster = made(train, spares=0)
    until(lambda: cluster.done >= 5)
    done = cluster.done
    cluster.requeue()
    unbroken(train)  # while Slurm waits, as it does after that
    until(lambda: len(cluster.begun) == 2 * train)
    assert [rank.step for rank in cluster.begun[:train]] == [0] * train
    assert all(done <= rank.step <= LIMIT for rank in cluster.begun[train:]), cluster.output
    cluster.complete()


@pytest.mark.campaign(seconds=25)
def test_a_rank_is_killed_and_the_job_is_requeued(cluster: Cluster) -> None:
    until(lambda: cluster.done >= 5)
    done = cluster.done
    os.kill(cluster.begun[0].pid, signal.SIGKILL)
    until(lambda: len(cluster.begun) == 6)
    assert cluster.state["Restarts"] == "0"
    cluster.requeue()
    until(lambda: len(cluster.begun) == 9)
    steps = [rank.step for rank in cluster.begun]
    assert done <= steps[3] <= steps[6] <= LIMIT, cluster.output
    cluster.complete()


@pytest.mark.campaign(seconds=40)
def test_the_spare_steps_in_for_a_lost_node(cluster: Cluster) -> None:
    until(lambda: cluster.safe >= 5)
    safe = cluster.safe
    nodes = {rank.node for rank in cluster.begun}
    lost = max(nodes)  # not the first one, which has the batch script
    cluster.lose(lost)
    until(lambda: len(cluster.begun) == 6)
    assert {rank.node for rank in cluster.begun[3:]} == set(NODES) - {lost}
    assert all(rank.step >= safe for rank in cluster.begun[3:]), cluster.output
    cluster.complete()
    assert cluster.state["Restarts"] == "0"


@pytest.mark.campaign(seconds=25)
def test_training_goes_on_without_the_first_node_and_begins_anew_by_hand(cluster: Cluster) -> None:
    """Storage bounds what the new start loses: a second node may have become the spare, whose memory is not read."""
    until(lambda: cluster.durable > 0)
    durable = cluster.durable
    cluster.lose("n1")
    until(lambda: "n1" not in cluster.state["NodeList"])
    cluster.go_on(LIMIT + 5)
    until(lambda: cluster.done >= LIMIT + 5)
    assert cluster.state["JobState"] == "RUNNING" and cluster.state["Restarts"] == "0"
    cluster.start_node("n1")  # its memory is gone
    cluster.requeue()
    cluster.complete()
    assert all(rank.step >= durable for rank in cluster.begun[-3:]), cluster.output


@pytest.mark.campaign(seconds=20)
def test_the_job_begins_anew_when_its_time_is_over(cluster: Cluster) -> None:
    until(lambda: cluster.done >= 5)
    done = cluster.done
    cluster.terminate()
    cluster.await_requeue()
    assert "ended by SIGTERM" in cluster.output
    cluster.complete()
    assert all(rank.step >= done for rank in cluster.begun[-3:]), cluster.output
