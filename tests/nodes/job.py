"""A job on the nodes of a lab: its starts, what its ranks have written down, and what each node knows of faults."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

from rekindle.memory.fault import Fault
from tests.nodes.lab import Lab, Node
from tests.nodes.ranks import start_rank
from tests.nodes.train import Task

__all__ = ["KEEP_ALIVE", "POLL", "Job"]

POLL = 0.05
"""Seconds between looks at anything."""
_GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL, as torchrun's."""
_OTHERS = 1.0
"""Seconds after which launchers on other nodes hear that one has to start its ranks again: they ask each second."""
KEEP_ALIVE = 20.0
"""Seconds after which launchers end all other ranks when a node is lost: agents have noticed it by then."""
_ENOUGH = 90.0
"""Seconds to wait for a node in place of one that is lost, or out of reach."""
_LIMIT = 150.0
"""Seconds that anything else may take on a machine that has other work."""

Row = dict[str, Any]


class Job:
    """Trains ``task`` on so many ``nodes`` of a lab, and starts all of its ranks again when one has ended by a fault.

    It does what a launcher on each node would: nodes that are up and connected are taken by their addresses, and no
    rank runs on one that is lost. ``starts``: the most that there are. Each of them
    meets on the next ``port``.
    """

    def __init__(self, lab: Lab, task: Task, *, nodes: int = 2, starts: int = 5, port: int = 29500) -> None:
        self.lab, self.task, self.nodes, self.starts, self.port = lab, task, nodes, starts, port
        self.faults: dict[str, list[Fault]] = {}
        """By node: the faults that its agent has noted, in order."""
        self.agent_logs: dict[str, str] = {}
        self.away = 0
        """Steps that were made while an agent was away, and those in which nothing comes to be node-safe after that."""
        self.problem = ""
        """Reason why it was given up, if it was."""
        self._ranks: list[tuple[Node, BaseProcess]] = []
        self._rows: dict[int, list[Row]] = {}
        """By rank: what has been read of its trace so far."""
        self._read: dict[int, int] = {}
        """By rank: bytes of its trace that have been read."""
        self._reading = threading.Lock()
        self.over = threading.Event()
        """Set when the test leaves the job."""
        self._threads = [threading.Thread(target=work) for work in (self._launch_well, self._watch)]

    def __enter__(self) -> Job:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(_LIMIT)
        for _, process in self._ranks:
            process.kill()
            process.join(_LIMIT)

    # -- what a test waits for ----------------------------------------------------------------------------------------

    def rows(self, event: str = "") -> list[Row]:
        """What the ranks have written down, by time."""
        with self._reading:
            for rank in range(self.task.world):
                self._read_on(rank)
            found = [row for rows in self._rows.values() for row in rows if event in ("", row["event"])]
        return sorted(found, key=lambda row: float(row["t"]))

    def _read_on(self, rank: int) -> None:
        """Reads the lines that a rank has written since the last time."""
        with suppress(FileNotFoundError), self.task.trace(rank).open("rb") as file:
            file.seek(self._read.get(rank, 0))
            whole, end, _ = file.read().rpartition(b"\n")
            self._read[rank] = self._read.get(rank, 0) + len(whole) + len(end)
            self._rows.setdefault(rank, []).extend(map(json.loads, whole.splitlines()))

    def safe_steps(self, start: int = 0) -> list[int]:
        """Steps that ranks of this start knew to be safe from the loss of a node."""
        return sorted({row["safe"] for row in self.rows("step") if row["start"] == start and row["safe"] > 0})

    def wait_for_safe(self, beyond: int = 0, start: int = 0) -> None:
        """Waits until ranks of this start know of a second step beyond this one that is safe from such a loss."""
        self.wait_until(lambda: sum(step > beyond for step in self.safe_steps(start)) > 1, "node-safe steps")

    def reached(self, step: int, start: int = 0) -> bool:
        """True once all ranks have completed this step in start ``start`` or a later one."""
        rows = self.rows("step")
        return len({row["rank"] for row in rows if row["step"] >= step and row["start"] >= start}) == self.task.world

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _LIMIT
        while not holds():
            assert not self.problem and time.monotonic() < deadline, f"no {what}: {self.problem}\n{self.log()}"
            time.sleep(0.02)

    def wait_for_step(self, step: int, start: int = 0) -> None:
        self.wait_until(lambda: self.reached(step, start), f"step {step}")

    def wait_for_end(self) -> None:
        """Waits until all ranks have trained to the end, in whatever start."""
        self._threads[0].join(_LIMIT)
        assert not self._threads[0].is_alive() and not self.problem, f"no end: {self.problem}\n{self.log()}"

    def wait_for_failure(self) -> str:
        """Waits until the job has been given up. Returns all that its ranks and agents have said last."""
        self._threads[0].join(_LIMIT)
        assert self.problem, f"the job has not failed\n{self.log()}"
        return self.log()

    def log(self) -> str:
        """The last words of all ranks and agents."""
        parts = []
        for rank in range(self.task.world):
            with suppress(FileNotFoundError):
                parts.append(f"== rank {rank}\n" + self.task.log(rank).read_text()[-3000:])
        return "\n".join(parts + [f"== agent of {name}\n{text[-2000:]}" for name, text in self.agent_logs.items()])

    # -- what a test strikes ------------------------------------------------------------------------------------------

    def process_of(self, rank: int) -> int:
        """The process of a rank's newest start, by its number outside of its node."""
        row = [row for row in self.rows("begun") if row["rank"] == rank][-1]
        (node,) = (node for node in self.lab.nodes if node.name == row["host"])
        pid = node.outside(row["pid"])
        assert pid is not None, f"rank {rank} has ended"
        return pid

    def node_of(self, rank: int) -> Node:
        """The node on which a rank's newest start runs."""
        row = [row for row in self.rows("begun") if row["rank"] == rank][-1]
        return next(node for node in self.lab.nodes if node.name == row["host"])

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.process_of(rank), number)

    # -- the launchers ------------------------------------------------------------------------------------------------

    def _launch_well(self) -> None:
        try:
            self._launch()
        except Exception:
            self.problem = traceback.format_exc()

    def _launch(self) -> None:
        """Starts the ranks, until they have trained to the end or the job is left."""
        for number in range(self.starts):
            self._ranks = self._start(number, self._members())
            self._await_end()
            if self.over.is_set() or not any(process.exitcode for _, process in self._ranks):
                return
        raise AssertionError(f"{self.starts} starts were not enough")

    def _members(self) -> list[Node]:
        deadline = time.monotonic() + _ENOUGH
        while not self.over.is_set():
            there = [node for node in self.lab.nodes if node.usable]
            if len(there) >= self.nodes:
                return there[: self.nodes]
            assert time.monotonic() < deadline, f"only {[node.name for node in there]} came"
            time.sleep(POLL)
        return []

    def _start(self, number: int, members: list[Node]) -> list[tuple[Node, BaseProcess]]:
        each = self.task.world // self.nodes
        always = {
            "MASTER_ADDR": members[0].address if members else "",
            "MASTER_PORT": str(self.port + number),
            "WORLD_SIZE": str(self.task.world),
            "LOCAL_WORLD_SIZE": str(each),
            "TORCHELASTIC_RESTART_COUNT": str(number),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        found = []
        for index, node in enumerate(members):
            for local in range(each):
                rank = index * each + local
                own = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(index)}
                own["REKINDLE_DOMAIN"] = node.domain
                found.append((node, start_rank(node, self.task, rank, always | own)))
        return found

    def _await_end(self) -> None:
        """Waits until all ranks of a start have ended; ends the others of one that has failed."""
        told: dict[Node, float] = {}
        """By node: when its ranks got SIGTERM."""
        failed = lost = 0.0
        while any(process.is_alive() for _, process in self._ranks) and not self.over.is_set():
            now = time.monotonic()
            ended = {node for node, process in self._ranks if process.exitcode not in (None, 0)}
            failed = failed or (now if any(node.alive for node in ended) else 0.0)
            lost = lost or (now if any(not node.alive for node in ended) else 0.0)
            late = (failed and now > failed + _OTHERS) or (lost and now > lost + KEEP_ALIVE)
            for node in {node for node, _ in self._ranks}:
                if node not in told and node.alive and (late or node in ended):
                    told[node] = now
                    self._end(node, signal.SIGTERM)
                elif node in told and now > told[node] + _GRACE:
                    self._end(node, signal.SIGKILL)
            time.sleep(POLL)

    def _end(self, node: Node, number: int) -> None:
        for row in [row for row in self.rows("begun") if row["host"] == node.name]:
            if (pid := node.outside(row["pid"])) is not None:
                os.kill(pid, number)

    # -- what the agents know -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Notes what the agents write down, of which the next start or the end of the job leaves nothing."""
        while not self.over.wait(POLL):
            for node in self.lab.nodes:
                for directory in node.inside(f"/dev/shm/rekindle-{os.getuid()}").glob("*"):
                    with suppress(OSError, ValueError):
                        self.agent_logs[node.name] = (directory / "agent.log").read_text()
                    with suppress(OSError, ValueError):
                        self._note(node, Fault.from_json(json.loads((directory / "fault.json").read_bytes())))

    def _note(self, node: Node, fault: Fault) -> None:
        known = self.faults.setdefault(node.name, [])
        if fault not in known:
            known.append(fault)
