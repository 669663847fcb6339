"""The example for Slurm, on a small Slurm of three nodes, all of them this machine. Ranks only note that they began."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/slurm/train.sbatch"
LONG = 150.0
"""Seconds that nothing here may take."""
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
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
ReturnToService=2
SlurmdTimeout=6
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP
"""

pytestmark = [
    pytest.mark.campaign(seconds=10),
    pytest.mark.timeout(400),
    pytest.mark.skipif(not (shutil.which("slurmctld") and shutil.which("slurmd")), reason="no Slurm is installed"),
]


def until(holds: Callable[[], object]) -> None:
    limit = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < limit, "it did not come to be"
        time.sleep(0.1)


class Cluster:
    """A controller, three nodes, and the example as its job: two nodes train, one is a spare."""

    def __init__(self, place: Path) -> None:
        self._place, self._begun, self._word = place, place / "begun", place / "word"
        self._begun.touch()
        os.mkfifo(self._word)
        for name in ("state", "spool-n1", "spool-n2", "spool-n3"):
            (place / name).mkdir()
        conf = place / "slurm.conf"
        ports = _free_ports(5)
        conf.write_text(CONF.format(host=socket.gethostname(), ports=ports, user=getpass.getuser(), place=place))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": path}
        self._daemons = {"": self._start("slurmctld", "-D")}
        for node in ("n1", "n2", "n3"):
            self.start_node(node)
        until(lambda: self.tell("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "3")
        self._job = self._submit(ports[4])

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        log = (self._place / "daemons.log").open("ab")
        with log:
            return subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    def _submit(self, port: int) -> str:
        rank = self._place / "rank.sh"
        rank.write_text(f"echo $SLURMD_NODENAME $$ >> {self._begun}; exec cat {self._word}")
        text = SCRIPT.read_text()
        for pattern, replacement in (
            (r"#SBATCH --(gpus|exclusive|time).*", ""),
            (r"--nodes=\d+", "--nodes=3"),
            (r"train=\d+", "train=2"),
            (r"--nproc-per-node \d+", "--nproc-per-node 1 --no-python"),
            (r"\$head:\d+", f"127.0.0.1:{port}"),
            (r"train\.py .*", f"sh {rank}"),
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

    @property
    def begun(self) -> list[tuple[str, int]]:
        """Node and process of each rank that has begun."""
        return [(line.split()[0], int(line.split()[1])) for line in self._begun.read_text().splitlines()]

    @property
    def state(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S+)", self.tell("scontrol", "show", "job", self._job)))

    @property
    def output(self) -> str:
        return (self._place / "output").read_text()

    def finish(self) -> None:
        """Have the ranks end well."""
        os.close(os.open(self._word, os.O_WRONLY | os.O_NONBLOCK))

    def terminate(self) -> None:
        """Do what Slurm does at the time of --signal."""
        self.tell("scancel", "--signal=TERM", self._job)

    def requeue(self) -> None:
        self.tell("scontrol", "requeue", self._job)

    def lose(self, node: str) -> None:
        """Kill all of a node at once."""
        self._daemons[node].kill()
        found = _processes_of(node, self._environment["SLURM_CONF"])
        for pid in [*filter(_is_slurms, map(_parent, found)), *found]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        self.tell("scancel", self._job)
        for node in ("n1", "n2", "n3"):
            self.lose(node)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _processes_of(node: str, conf: str) -> list[int]:
    """Returns the processes of a node's steps: its batch script, launcher and ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            told = (path / "environ").read_bytes().split(b"\0")
            if f"SLURMD_NODENAME={node}".encode() in told and f"SLURM_CONF={conf}".encode() in told:
                found.append(int(path.name))
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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.end()


def test_the_spare_steps_in_for_a_lost_node(cluster: Cluster) -> None:
    until(lambda: len(cluster.begun) == 2)
    nodes = {node for node, _ in cluster.begun}
    lost = max(nodes)  # not the first one, which has the batch script
    (left, rank) = next(one for one in cluster.begun if one[0] != lost)
    cluster.lose(lost)
    os.kill(rank, signal.SIGKILL)  # as by the collective that fails
    until(lambda: len(cluster.begun) == 4)
    assert {node for node, _ in cluster.begun[2:]} == {"n1", "n2", "n3"} - {lost} and left in ("n1", "n2")
    cluster.finish()
    until(lambda: cluster.state["JobState"] in ("COMPLETED", "FAILED", "NODE_FAIL"))
    assert cluster.state["JobState"] == "COMPLETED", cluster.output
    assert cluster.state["Restarts"] == "0"


def test_the_job_begins_anew_by_hand_when_its_first_node_is_lost(cluster: Cluster) -> None:
    until(lambda: len(cluster.begun) == 2)
    cluster.lose("n1")
    until(lambda: "n1" not in cluster.state["NodeList"])
    cluster.requeue()
    until(lambda: cluster.state["Restarts"] == "1")  # Slurm itself waits for two minutes then


def test_the_job_begins_anew_when_its_time_is_over(cluster: Cluster) -> None:
    until(lambda: len(cluster.begun) == 2)
    cluster.terminate()
    until(lambda: cluster.state["Restarts"] == "1")
    assert "ended by SIGTERM" in cluster.output
