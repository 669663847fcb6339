"""The cases: which fault strikes which kind of job, and what may be lost by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.nodes import strikes
from tests.nodes.job import Job
from tests.nodes.lab import Lab
from tests.nodes.launched import LaunchedJob
from tests.nodes.outcome import Outcome, observe
from tests.nodes.train import KINDS, Task

__all__ = ["CASES", "Case", "Unbroken", "judge", "play"]

_AT = 12
"""The step after which a fault strikes."""
_STEPS = 24
_REPLICATED = ("ddp", "hsdp")
"""Kinds of which each node has all of the state but what only a rank has."""
_INTERVAL = 10
"""Steps of 0.2 s between two that are node-safe, at most, where no agent is lost: the states here are tiny."""


@dataclass(frozen=True)
class Case:
    """One fault, and what is expected of it."""

    name: str
    strike: Callable[[Job], None]
    culprit: str = ""
    """Words by which each node's record of the fault names it; empty if nothing needs to be noticed."""
    kinds: tuple[str, ...] = KINDS
    """Kinds for which it makes a difference."""
    world: int = 2
    hosts: int = 2
    domains: str = ""
    """A letter for each of the first nodes: those that have the same fail together."""
    spare: bool = False
    """One node more is there from the start; else one comes where a node is lost."""
    launcher: str = ""
    """The real launcher that has a part in it: its name; empty for the small one that forks ranks."""
    restarts: tuple[int, ...] = (1,)
    """Numbers of restarts that are right."""
    lost: int = 1
    """Completed steps that may be computed again."""
    lost_node: bool = False
    """A node's memory is gone: kinds that have parts of the state on one node only go on from copies."""
    interval: int = _INTERVAL
    """Steps that may be made between two that are safe from the loss of a node."""
    stored: bool = False
    """Storage gets the newest step before the node is lost, so that bytes may come from there."""
    persist_every: int | None = None
    guard: dict[str, Any] = field(default_factory=dict)
    steps: int = _STEPS
    waits_at: int = 0
    """Step that is saved with ``wait="node"``."""

    @property
    def all_kinds(self) -> tuple[str, ...]:
        """Those of which torch computes the same bits each time: all with two ranks."""
        return KINDS if self.world == 2 else self.kinds

    def needs_copies(self, kind: str) -> bool:
        return self.lost_node and kind not in _REPLICATED

    def may_lose(self, kind: str, interval: int) -> int:
        """``interval`` is that of the copies, in steps."""
        return self.lost + interval if self.needs_copies(kind) else self.lost


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
        return {(rank, step): digest for (rank, step), digest in self._known[kind, world].items() if step <= steps}


def play(case: Case, kind: str, directory: Path) -> Outcome:
    """Trains a job of this kind on a lab of its own, with the fault of the case."""
    with Lab(directory) as lab:
        for number in range(case.hosts + case.spare):
            lab.add(domain=case.domains[number : number + 1])
        options = {} if case.persist_every is None else {"persist_every": case.persist_every}
        place, more = str(lab.mount / "run"), (options, case.guard, case.waits_at)
        task = Task(place, str(directory), kind, case.world, case.steps, 0.2, *more)
        launch = partial(LaunchedJob, launcher=case.launcher) if case.launcher else Job
        with launch(lab, task, nodes=case.hosts) as job:
            job.wait_for_step(_AT)
            if case.spare and isinstance(job, LaunchedJob):
                job.wait_until_warm(case.steps // 2)
            if case.lost_node:
                job.wait_for_safe()
            struck = time.monotonic()
            case.strike(job)
            job.wait_for_end()
        return observe(job, struck)


def judge(case: Case, kind: str, out: Outcome, unbroken: dict[tuple[int, int], str]) -> list[str]:
    """Promises that were not kept; none if all is well."""
    wrong = []
    if out.restarts not in case.restarts:
        wrong.append(f"{out.restarts} restarts instead of {' or '.join(map(str, case.restarts))}")
    if out.lost > case.may_lose(kind, out.interval):
        wrong.append(f"{out.lost} steps lost")
    if out.differing or any(unbroken[key] != digest for key, digest in out.digests.items()):
        wrong.append("differs from the unbroken run")
    if max(step for _, step in out.digests) != case.steps:
        wrong.append("did not come to its end")
    if case.culprit:
        wrong += [f"{n} says: {what}" for n, (_, what) in out.noticed.items() if case.culprit not in what]
        wrong += [] if out.noticed else ["nobody noticed it"]
    return wrong + _broken_promises_of_copies(case, out)


def _broken_promises_of_copies(case: Case, out: Outcome) -> list[str]:
    if not case.lost_node:
        return []
    wrong = [f"step {safe} was safe, and the job went on from {step}" for safe, step in out.forgotten]
    if out.interval > case.interval:
        wrong.append(f"{out.interval} steps between two that were safe")
    if not case.stored and "storage" in out.sources:
        wrong.append("bytes came from storage")
    return wrong


CASES = {
    case.name: case
    for case in (
        Case("one rank killed", strikes.kill_rank, "rank 1 was killed by SIGKILL"),
        Case("one rank killed, slow link", strikes.kill_rank_on_a_slow_link, "rank 1 was killed by SIGKILL", ("ddp",)),
        Case(
            "one rank killed, rekindle run",
            strikes.kill_rank,
            "rank 1 was killed by SIGKILL",
            ("ddp",),
            launcher="rekindle run",
        ),
        Case(
            "one rank killed, torchrun",
            strikes.kill_rank,
            "rank 1 was killed by SIGKILL",
            ("ddp",),
            launcher="torchrun",
        ),
        Case("one rank of four killed", strikes.kill_rank, "rank 1 was killed by SIGKILL", ("ddp", "hsdp"), world=4),
        Case("one rank stopped", strikes.stop_rank, "rank 1", guard={"watchdog": "fast"}),
        Case("all ranks of a node killed", strikes.kill_all_ranks, "was killed by SIGKILL"),
        Case("agent killed", strikes.kill_agent, restarts=(0,), kinds=("ddp",)),
        Case("agent stopped for 3 s", strikes.stop_agent, restarts=(0,), kinds=("ddp",)),
        Case("node lost, power", strikes.power, "nodeb", lost_node=True),
        Case("node lost, sockets closed", strikes.fin, "nodeb", lost_node=True),
        Case("node lost at a safe step", strikes.power, "nodeb", ("fsdp2",), lost_node=True, waits_at=_AT),
        Case("first node lost, power", strikes.power_of_the_first, "nodea", lost_node=True),
        Case("node lost, two ranks each", strikes.power, "nodeb", world=4, lost_node=True),
        Case("one of three nodes lost", strikes.power, "nodeb", ("ddp", "fsdp2"), 3, 3, lost_node=True),
        Case("first of three nodes lost", strikes.power_of_the_first, "nodea", ("fsdp2",), 3, 3, lost_node=True),
        Case(
            "two nodes of a domain lost", strikes.lose_second_domain, "node", ("fsdp2",), 4, 4, "xxyy", lost_node=True
        ),
        Case("both nodes lost in turn", strikes.lose_both_in_turn, "node", restarts=(2,), lost_node=True, steps=48),
        Case(
            "agent killed, then node lost",
            strikes.lose_with_a_new_agent,
            "nodeb",
            ("ddp", "fsdp2"),
            lost_node=True,
            interval=60,
            steps=60,
        ),
        Case(
            "rank killed, then node lost",
            strikes.kill_rank_and_lose_its_node,
            "rank 1",
            ("ddp", "fsdp2"),
            lost_node=True,
            stored=True,
        ),
        Case(
            "replacement lost",
            strikes.lose_the_replacement,
            "nodeb",
            ("ddp", "fsdp2"),
            restarts=(1, 2),
            lost_node=True,
        ),
        Case(
            "node lost, spare there",
            strikes.power_beside_a_spare,
            kinds=("ddp", "fsdp2"),
            spare=True,
            lost_node=True,
            launcher="rekindle run",
            steps=60,
        ),
        Case(
            "leader lost, spare there",
            strikes.power_of_the_leader,
            kinds=("ddp", "fsdp2"),
            spare=True,
            lost_node=True,
            launcher="rekindle run",
            steps=60,
        ),
        Case(
            "leader lost, rekindle run",
            strikes.power_of_the_first,
            kinds=("ddp",),
            lost_node=True,
            launcher="rekindle run",
        ),
        Case("leader lost, torchrun", strikes.power_of_the_first, kinds=("ddp",), lost_node=True, launcher="torchrun"),
        Case("node preempted", strikes.preempt, "rank 1", ("ddp", "fsdp2"), lost_node=True, stored=True),
        Case("blip of 0.5 s", strikes.blip(0.5), restarts=(0,), kinds=("ddp",)),
        Case("blip of 1.2 s", strikes.blip(1.2), restarts=(0,), kinds=("ddp", "fsdp2")),
        Case("blip of 4 s", strikes.blip(4.0), restarts=(0,), kinds=("ddp",)),
        Case("partition of 20 s", strikes.blip(20.0), "node", ("ddp",)),
        Case("one way for 0.5 s", strikes.mute(0.5), restarts=(0,), kinds=("ddp",)),
        Case("one way for 1.2 s", strikes.mute(1.2), restarts=(0,), kinds=("fsdp2",)),
        Case("one way for 4 s", strikes.mute(4.0), restarts=(0,), kinds=("ddp",)),
        Case("one way for 20 s", strikes.mute(20.0), "node", ("ddp",)),
        Case("link slow", strikes.slow, restarts=(0,), kinds=("ddp",)),
        Case("mount lost for 3 s", strikes.lose_mount, restarts=(0,), kinds=("ddp",), persist_every=5),
    )
}
