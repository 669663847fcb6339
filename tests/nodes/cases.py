"""Faults of nodes, ranks, agents, links and mounts: how each is brought about, and what may be lost by it."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle.errors import FormatError
from rekindle.memory.incident import SECURED, Incident
from tests.nodes.job import Job
from tests.nodes.lab import Lab
from tests.nodes.launched import LaunchedJob
from tests.nodes.train import KINDS, Task

__all__ = ["CASES", "Case", "Outcome", "Unbroken", "judge", "play"]

_AT = 12
"""The step after which a fault strikes."""
_STEPS = 24
_MEMORY_ONLY = 10**6
"""``persist_every`` of a job whose checkpoints reach storage only when it ends."""
_REPLICATED = ("ddp", "hsdp")
"""Kinds of which each node has all of the state but what only a rank has."""


@dataclass(frozen=True)
class Case:
    """One fault, and what is expected of it."""

    name: str
    strike: Callable[[Job], None]
    culprit: str = ""
    """Words by which each node's record of the fault names it; empty if nothing needs to be noticed."""
    kinds: tuple[str, ...] = KINDS
    world: int = 2
    spare: bool = False
    """A third node is there from the start; else one comes where a node is lost."""
    launched: bool = False
    """Brought about under ``rekindle run``, since its launchers have a part in it."""
    restarts: tuple[int, ...] = (1,)
    """Numbers of restarts that are right."""
    lost: int = 1
    """Completed steps that may be computed again."""
    lost_node: bool = False
    """A node's memory is gone: kinds that have parts of the state on one node only go on from storage."""
    persist_every: int = _MEMORY_ONLY
    keep_alive: float = 5.0
    guard: dict[str, Any] = field(default_factory=dict)
    steps: int = _STEPS

    def persists(self, kind: str) -> int:
        """``persist_every`` for a kind: what is on one node only must get to storage before that node is lost."""
        return 5 if self.lost_node and kind not in _REPLICATED else self.persist_every

    def may_lose(self, kind: str) -> int:
        return self.lost if not self.lost_node or kind in _REPLICATED else _AT


@dataclass
class Outcome:
    """What came of a case. Seconds since the fault."""

    noticed: dict[str, tuple[float, str]] = field(default_factory=dict)
    """By node: when its agent noted the fault, and its words."""
    silent: dict[str, float] = field(default_factory=dict)
    """By node: when its agent told people that another one is silent."""
    secured: float | None = None
    """When the last rank that still could had secured its state."""
    resumed: int = -1
    """Step from which the first restart went on."""
    places: list[str] = field(default_factory=list)
    """Where each rank's state came from then."""
    restarts: int = 0
    lost: int = 0
    """Most steps that all ranks had completed, and of which a restart knew nothing."""
    again: float | None = None
    """When all ranks had completed the first new step."""
    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    """Of each rank's each step: the newest one, if it was computed twice."""
    differing: list[tuple[int, int]] = field(default_factory=list)
    """Ranks and steps that were computed twice, and not alike."""


class Unbroken:
    """The digests of jobs without a fault, each computed once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[tuple[str, int], dict[tuple[int, int], str]] = {}

    def digests(self, kind: str, world: int, steps: int) -> dict[tuple[int, int], str]:
        """By rank and step. The pauses of a job don't matter to its numbers, so this one makes none."""
        if (kind, world) not in self._known or (0, steps) not in self._known[kind, world]:
            directory = self._directory / f"{kind}-{world}-{steps}"
            directory.mkdir(parents=True)
            with Lab(directory) as lab:
                lab.add()
                task = Task(str(lab.mount / "run"), str(directory), kind, world, steps, pause=0.0)
                with Job(lab, task, nodes=1) as job:
                    job.wait_for_end()
                    self._known[kind, world] = {(r["rank"], r["step"]): r["digest"] for r in job.rows("step")}
        return self._known[kind, world]


def play(case: Case, kind: str, directory: Path) -> Outcome:
    """Trains a job of this kind on a lab of its own, with the fault of the case."""
    with Lab(directory) as lab:
        for _ in range(3 if case.spare else 2):
            lab.add()
        options = {"persist_every": case.persists(kind)}
        task = Task(str(lab.mount / "run"), str(directory), kind, case.world, case.steps, 0.2, options, case.guard)
        with (LaunchedJob if case.launched else Job)(lab, task, keep_alive=case.keep_alive) as job:
            job.wait_for_step(_AT)
            struck = time.monotonic()
            case.strike(job)
            job.wait_for_end()
        return observe(job, struck)


def observe(job: Job, struck: float) -> Outcome:
    out = Outcome()
    for name, faults in job.faults.items():
        if late := [fault for fault in faults if fault.noticed >= struck]:
            out.noticed[name] = late[0].noticed - struck, f"{late[-1].cause}: {late[-1].what}"
    out.silent = {name: at - struck for name, log in job.agent_logs.items() for at in _silences(log) if at >= struck}
    starts = sorted({row["start"] for row in job.rows("restored")})
    out.restarts = len(starts) - 1
    steps = job.rows("step")
    for row in steps:
        key = row["rank"], row["step"]
        if out.digests.setdefault(key, row["digest"]) != row["digest"]:
            out.differing.append(key)
    for start, after in itertools.pairwise(starts):
        restored = sorted((row for row in job.rows("restored") if row["start"] == after), key=_by_rank)
        done = [max((r["step"] for r in _of(steps, start, k)), default=0) for k in range(job.task.world)]
        out.lost = max(out.lost, min(done) - restored[0]["step"])
        if start == starts[0]:
            out.resumed, out.places = restored[0]["step"], [row["place"] for row in restored]
    if out.restarts:
        out.again = max(_of(steps, starts[-1], k)[0]["t"] for k in range(job.task.world)) - struck
        out.secured = _secured(job, struck)
    return out


def _of(rows: list[dict[str, Any]], start: int, rank: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["start"] == start and row["rank"] == rank]


def _silences(log: str) -> list[float]:
    """Times by the monotonic clock at which an agent's log first has a node silent, newest first."""
    since = time.time() - time.monotonic()
    lines = re.findall(r"^(\S+ \S+),(\d+) WARNING node \S+ .* is silent", log, re.MULTILINE)
    return [time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S")) + int(ms) / 1e3 - since for at, ms in reversed(lines)]


def _by_rank(row: dict[str, Any]) -> int:
    return int(row["rank"])


def _secured(job: Job, struck: float) -> float | None:
    """As the records on storage have it, of each node that has written one."""
    times = []
    for path in (job.lab.storage / "run" / "incidents").glob("*.jsonl"):
        with suppress(FormatError):
            moments = Incident.decode(path.read_bytes()).moments
            times += [at - struck for name, at in moments.items() if name == SECURED and at > struck]
    return max(times, default=None)


def judge(case: Case, kind: str, out: Outcome, unbroken: dict[tuple[int, int], str]) -> list[str]:
    """Promises that were not kept; none if all is well."""
    wrong = []
    if out.restarts not in case.restarts:
        wrong.append(f"{out.restarts} restarts instead of {' or '.join(map(str, case.restarts))}")
    if out.lost > case.may_lose(kind):
        wrong.append(f"{out.lost} steps lost")
    if out.differing or any(unbroken[key] != digest for key, digest in out.digests.items()):
        wrong.append("differs from the unbroken run")
    if max(step for _, step in out.digests) != case.steps:
        wrong.append("did not come to its end")
    if case.culprit:
        wrong += [f"{n} says: {what}" for n, (_, what) in out.noticed.items() if case.culprit not in what]
        wrong += [] if out.noticed else ["nobody noticed it"]
    return wrong


# -- the faults -------------------------------------------------------------------------------------------------------


def kill_rank(job: Job) -> None:
    job.signal(1)


def stop_rank(job: Job) -> None:
    job.signal(1, signal.SIGSTOP)


def kill_all_ranks(job: Job) -> None:
    for rank in range(job.task.world // 2, job.task.world):
        job.signal(rank)


def kill_agent(job: Job) -> None:
    _signal_agent(job, signal.SIGKILL)


def stop_agent(job: Job) -> None:
    """For three seconds."""
    _signal_agent(job, signal.SIGSTOP)
    time.sleep(3.0)
    _signal_agent(job, signal.SIGCONT)


def _signal_agent(job: Job, number: int) -> None:
    for pid in job.lab.nodes[1].processes("rekindle.agent"):
        os.kill(pid, number)


def power(job: Job) -> None:
    _lose(job, 1, power=True)


def power_of_the_first(job: Job) -> None:
    """The ranks that are left move: a launcher orders nodes by their addresses."""
    _lose(job, 0, power=True)


def fin(job: Job) -> None:
    _lose(job, 1, power=False)


def _lose(job: Job, index: int, *, power: bool) -> None:
    """A node is lost; a fresh one comes unless a spare is there."""
    node = job.lab.nodes[index]
    if power:
        node.lose_power()
    else:
        node.kill()
    if sum(node.alive for node in job.lab.nodes) < job.nodes:
        job.lab.add()


def lose_both_in_turn(job: Job) -> None:
    """The second node is lost when the job has gone on without the first."""
    _lose(job, 1, power=True)
    job.wait_for_step(_AT + 6, start=1)
    _lose(job, 0, power=True)


def lose_with_a_new_agent(job: Job) -> None:
    """The agent of the lost node was killed before, and has been followed by another one."""
    mark = "is node nodeb"
    kill_agent(job)
    job.wait_until(lambda: job.agent_logs["nodeb"].count(mark) == 2, "new agent in the mesh")
    newest = max(row["step"] for row in job.rows("step"))
    job.wait_for_step(newest + 3)
    _lose(job, 1, power=True)


def kill_rank_and_lose_its_node(job: Job) -> None:
    kill_rank(job)
    time.sleep(0.3)
    _lose(job, 1, power=True)


def lose_the_replacement(job: Job) -> None:
    """The node that takes the place of a lost one is lost while the job restarts on it."""
    _lose(job, 1, power=False)
    job.wait_until(lambda: any(row["host"] == "nodec" for row in job.rows("met")), "rank on the new node")
    _lose(job, 2, power=False)


def preempt(job: Job) -> None:
    """A node's ranks are told to go; five seconds later the node is gone."""
    node = job.lab.nodes[1]
    for rank in range(job.task.world // 2, job.task.world):
        job.signal(rank, signal.SIGTERM)
    node.leaving = True
    time.sleep(5.0)
    _lose(job, 1, power=True)


def blip(seconds: float) -> Callable[[Job], None]:
    """The cable of a node is out of the switch for a moment."""

    def strike(job: Job) -> None:
        job.lab.nodes[1].cut()
        time.sleep(seconds)
        job.lab.nodes[1].heal()

    return strike


def mute(job: Job) -> None:
    """What a node sends is lost for two seconds."""
    job.lab.nodes[1].mute()
    time.sleep(2.0)
    job.lab.nodes[1].unmute()


def slow(job: Job) -> None:
    job.lab.nodes[1].slow_down("1mbit")


def lose_mount(job: Job) -> None:
    """The storage is out of a node's sight for three seconds."""
    job.lab.nodes[1].unmount()
    time.sleep(3.0)
    job.lab.nodes[1].remount()


def kill_rank_on_a_slow_link(job: Job) -> None:
    slow(job)
    kill_rank(job)


_FAST = {"watchdog": "fast"}
CASES = {
    case.name: case
    for case in (
        Case("one rank killed", kill_rank, "rank 1 was killed by SIGKILL"),
        Case("one rank killed, slow link", kill_rank_on_a_slow_link, "rank 1 was killed by SIGKILL", ("ddp",)),
        Case("one rank killed, rekindle run", kill_rank, "rank 1 was killed by SIGKILL", ("ddp",), launched=True),
        Case("one rank of four killed", kill_rank, "rank 1 was killed by SIGKILL", ("ddp", "hsdp"), world=4),
        Case("one rank stopped", stop_rank, "rank 1", guard=_FAST),
        Case("all ranks of a node killed", kill_all_ranks, "was killed by SIGKILL"),
        Case("agent killed", kill_agent, restarts=(0,), kinds=("ddp",)),
        Case("agent stopped for 3 s", stop_agent, restarts=(0,), kinds=("ddp",)),
        Case("node lost, power", power, "nodeb", lost_node=True, keep_alive=20.0),
        Case("node lost, sockets closed", fin, "nodeb", lost_node=True, keep_alive=20.0),
        Case("first node lost, power", power_of_the_first, "nodea", ("ddp", "hsdp"), lost_node=True, keep_alive=20.0),
        Case("node lost, two ranks each", power, "nodeb", ("ddp", "hsdp"), 4, lost_node=True, keep_alive=20.0),
        Case(
            "both nodes lost in turn",
            lose_both_in_turn,
            "node",
            _REPLICATED,
            restarts=(2,),
            lost_node=True,
            keep_alive=20.0,
            steps=36,
        ),
        Case(
            "agent killed, then node lost",
            lose_with_a_new_agent,
            "nodeb",
            ("ddp",),
            lost_node=True,
            keep_alive=20.0,
            steps=60,
        ),
        Case("rank killed, then node lost", kill_rank_and_lose_its_node, "rank 1", ("ddp",), lost_node=True),
        Case("replacement lost", lose_the_replacement, "nodeb", ("ddp",), restarts=(1, 2), lost_node=True),
        Case("node lost, spare there", power, kinds=("ddp",), spare=True, lost_node=True, launched=True),
        Case("node preempted", preempt, "rank 1", ("ddp", "fsdp2"), lost_node=True, persist_every=5),
        Case("blip of 0.5 s", blip(0.5), restarts=(0,), kinds=("ddp",)),
        Case("blip of 1.2 s", blip(1.2), restarts=(0,), kinds=("ddp", "fsdp2")),
        Case("blip of 4 s", blip(4.0), restarts=(0,), kinds=("ddp",)),
        Case("partition of 20 s", blip(20.0), "node", ("ddp",)),
        Case("one way for 2 s", mute, restarts=(0,), kinds=("ddp",)),
        Case("link slow", slow, restarts=(0,), kinds=("ddp",)),
        Case("mount lost for 3 s", lose_mount, restarts=(0,), kinds=("ddp",), persist_every=5),
    )
}
