"""Agents of several nodes on one host: each serves a memory directory and an address of its own. Ranks are small
processes, whose status pages the test writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rekindle.agent.http import send_request
from rekindle.common.process_start import clock_id
from rekindle.errors import AgentError
from rekindle.format.fields import loads
from rekindle.format.lineage import Incarnation
from rekindle.memory.fault import Fault
from rekindle.memory.incidents import StartRecord, write_start
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.memory.nodes import Node, Nodes
from rekindle.memory.status import STABLE, StatusPage
from rekindle.peers.wire import Credentials, WireError, connect
from tests.faults.harness import end_agent, wait_for

RANK = """
import json, os, socket, sys, threading, time
rank, path, floor, now = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), time.monotonic()
hello = {"rank": rank, "pid": os.getpid(), "watchdog": floor, "deadline": 25.0, "stacks": 0}
hello |= {"since": now, "joined": now}
leaves = 0

def listen():
    while True:
        try:
            link = socket.socket(socket.AF_UNIX)
            link.connect(path)
            link.sendall(json.dumps(hello).encode() + b"\\n")
            threading.current_thread().link = link
            for text in link.makefile("rb"):
                message = json.loads(text)
                if "debugger" in message:
                    link.sendall(b'{"debugger": null}\\n')
                print(json.dumps([time.monotonic(), message]), flush=True)
        except OSError:
            pass
        if leaves:
            os._exit(0)
        time.sleep(0.02)

thread = threading.Thread(target=listen, daemon=True)
thread.start()
while not hasattr(thread, "link"):
    time.sleep(0.01)
for words in sys.stdin:
    leaves += "bye" in words
    thread.link.sendall(words.encode())
thread.join()
"""


class Rank:
    """A process that is connected to its node's agent as a rank."""

    def __init__(self, job: JobDir, number: int, generation: int, floor: float | None) -> None:
        self.number, self.generation = number, generation
        self.page = StatusPage(job.paths.status_page(number), generation)
        self.page.phase = STABLE
        command = [sys.executable, "-S", "-c", RANK, str(number), str(job.paths.watch_socket), json.dumps(floor)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.heard: list[tuple[float, dict[str, Any]]] = []
        """Messages of the agent, with their times."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.heard.append(tuple(json.loads(line)))

    def joined(self) -> bool:
        """True once it has called its agent: a fault after that concerns it."""
        with suppress(OSError):  # a file is closed as we look
            files = Path(f"/proc/{self.process.pid}/fd").iterdir()
            return any(os.readlink(file).startswith("socket:") for file in files)
        return False

    def say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def raises(self, what: str) -> None:
        fault = Fault("exception", self.number, self.generation, self.page.step, f"rank {self.number} raised {what}")
        self.say({"fault": fault.to_json()})

    def kill(self) -> float:
        """Kills it. Returns the time of that."""
        at = time.monotonic()
        self.process.send_signal(signal.SIGKILL)
        return at

    def faults(self) -> list[tuple[float, Fault]]:
        return [(at, Fault.from_json(message["fault"])) for at, message in self.heard if "fault" in message]

    def fault(self) -> tuple[float, Fault]:
        """Waits for the agent to tell of a fault. Returns when it did, and the fault."""
        found: tuple[float, Fault] = wait_for(self.faults, what=f"a fault that rank {self.number} is told of")[0]
        return found

    def end(self) -> None:
        with suppress(OSError):  # it is dead
            self.say({"bye": True})
        with suppress(subprocess.TimeoutExpired):  # until its agent hangs up
            self.process.wait(10.0)
        self.process.kill()
        self.process.wait()


class Host:
    """One node: its memory directory, and the agent that serves it."""

    def __init__(self, place: Path, number: int) -> None:
        self.number, self.address = number, f"127.0.0.{number + 2}"
        place.mkdir(mode=0o700)
        self.job = JobDir(place / "rekindle" / "job")
        self.job.create()
        self.trainer = Lock(self.job.paths.rank_lock(number))
        """Held while the rank trains: an agent without trainers gives the memory back."""
        self.agent: subprocess.Popen[bytes] | None = None

    def run_agent(self) -> None:
        with open(self.job.paths.agent_log, "ab") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "rekindle.agent", str(self.job.path)], stdout=log, stderr=log
            )

    def signal_agent(self, number: int) -> None:
        assert self.agent is not None
        self.agent.send_signal(number)
        if number == signal.SIGKILL:
            self.agent.wait()

    def port(self) -> int:
        def read() -> int:
            with suppress(OSError, ValueError, KeyError):
                address = loads(self.job.paths.address.read_bytes())
                if address["pid"] == self.job.agent():
                    return int(address["port"])
            return 0

        found: int = wait_for(read, what=f"address of node {self.number}")
        return found

    def is_in(self, nodes: Nodes) -> bool:
        """True if its agent speaks with those who know the secret of a start, as trainers see to before they train."""
        credentials = Credentials(nodes.secret, nodes.start, "a trainer")
        try:
            connect(nodes.here.host, nodes.here.port, credentials, 10.0).close()
        except (OSError, WireError):
            return False
        return True

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes, as this one's agent sees them."""
        with suppress(AgentError):
            found: list[dict[str, Any]] = send_request(self.job.paths.agent_socket, "GET", "/status")["nodes"]
            return found
        return []

    def state(self, other: int) -> str:
        nodes = self.nodes()
        return str(nodes[other]["state"]) if nodes else "no answer"

    def fault(self) -> Fault | None:
        with suppress(FileNotFoundError):
            return Fault.from_json(loads(self.job.paths.fault.read_bytes()))
        return None

    def held(self) -> int:
        """The threads and the open files of its agent."""
        assert self.agent is not None
        return sum(len(os.listdir(f"/proc/{self.agent.pid}/{what}")) for what in ("task", "fd"))

    def log(self) -> str:
        return self.job.paths.agent_log.read_text()


class Agents:
    """Hosts whose agents serve one start after another, as those of real nodes do."""

    def __init__(self, place: Path, count: int) -> None:
        self.root = place / "root"
        self.hosts = [Host(place / f"node-{number}", number) for number in range(count)]
        self.ranks: list[Rank] = []
        self.generation = 0
        self.nodes: list[Nodes] = []

    def begin(self, count: int, floor: float | None = None) -> list[Rank]:
        """Begins a start with a rank on each of ``count`` nodes. Returns the ranks once all agents know of all."""
        self.end()
        self.meet(count)
        hosts = self.hosts[:count]
        self.ranks = [Rank(host.job, host.number, self.generation, floor) for host in hosts]
        wait_for(lambda: all(self._knows_all(host, count) for host in hosts), what="a mesh")
        return self.ranks

    def meet(self, count: int, before: Callable[[], object] = lambda: None) -> None:
        """Has the agents of ``count`` nodes learn of a start, as its ranks do before they train.

        Calls ``before`` once they serve that start, and before they know each other.
        """
        self.generation += 1
        start, hosts = Incarnation.begin(self.generation).id, self.hosts[:count]
        for host in hosts:
            host.job.paths.fault.unlink(missing_ok=True)
            write_start(host.job, StartRecord(start, self.generation, clock_id(), time.monotonic()))
            host.job.write_job(
                JobInfo(str(self.root), [host.number], count, 2, None, 600.0, start=start, host=host.address)
            )
            assert host.trainer.held() or host.trainer.acquire(10.0)
            if host.agent is None or host.agent.poll() is not None:
                host.run_agent()
        nodes = [Node(f"n{host.number}", host.address, host.port(), [host.number]) for host in hosts]
        before()
        secret = os.urandom(32)
        self.nodes = [Nodes(start, self.generation, secret, host.number, nodes) for host in hosts]
        for host, known in zip(hosts, self.nodes, strict=True):
            known.write(host.job)
            wait_for(partial(host.is_in, known), what=f"node {host.number} in the mesh")

    def _knows_all(self, host: Host, count: int) -> bool:
        nodes = host.nodes()
        return len(nodes) == count and all(node["steps"] and node["state"] in ("here", "there") for node in nodes)

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()
        self.ranks = []

    def close(self) -> None:
        self.end()
        for host in self.hosts:
            if host.agent is not None:
                host.agent.kill()
                host.agent.wait()
            end_agent(host.job)
            host.trainer.release()
