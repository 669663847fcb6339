"""The cases: which fault strikes which kind of job, and what may be lost by it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.nodes import strikes
from tests.nodes.job import KEEP_ALIVE, Job
from tests.nodes.lab import Lab
from tests.nodes.launched import LaunchedJob
from tests.nodes.outcome import Outcome, observe
from tests.nodes.train import KINDS, Task

__all__ = ["CASES", "SLACK", "Case", "Unbroken", "judge", "play"]

SLACK = 30.0
"""Seconds more that each bound of time gets in tests: other work may leave the processes here no processor."""

_AT = 12
"""The step after which a fault strikes."""
_STEPS = 24
_REPLICATED = ("ddp", "hsdp")
"""Kinds of which each node has all of the state but what only a rank has."""
_INTERVAL = 10
"""Steps of 0.2 s between two that are node-safe, at most, where no agent is lost: the states here are tiny."""
_PAUSE = 0.2
"""Seconds of a step, at the least."""
_UNSAFE = 0.8
"""Seconds of steps that the loss of a node costs beside one step and two copies: docs/nodes.md promises that."""
_LATE = 3
"""Steps more that it may cost on a machine that has other work: what names a step safe runs late there."""
_SILENT = 2.0
"""Seconds within which each node that is left tells which other one it does not hear any more."""
_AGAIN = 10.0
"""Seconds that a restart may take once nothing else has to be waited for: launchers that are not warm load torch."""
_GIVEN_UP, _SILENT_LAUNCHER = 10.0, 3.0
"""Seconds until agents give up a node without power, and until launchers do: these end all ranks then if a spare is
there, else when a fresh node is."""
_KILLED, _LOST = "^signal: rank 1 was killed by SIGKILL$", "^lost: node ({lost}) "
_WIDTH = 1706
_BYTES, _BYTES_A_SECOND = 36 * _WIDTH**2, strikes.SLOW_MEGABITS * 1e6 / 8
"""Of a state of about 100 MiB: three layers of float32, each with two moments; and of the link over which it comes."""
_TOLD = "^notice: rank \\d was sent SIGTERM while node ({lost}) .* was silent$|" + _LOST
"""A launcher that gives up a silent node ends all ranks before the agents give it up: they note what these were sent,
and which node was silent."""
_EITHER = dict.fromkeys(("nodea", "nodeb"), "^lost: node node[ab] ")
"""Two nodes that don't hear each other: each says that the other one is lost. When they do again, all take up the
likelier first cause of the two, as everywhere (``agent/first_cause.py``): one of them then names itself."""


@dataclass(frozen=True)
class Case:
    """One fault, and what is expected of it."""

    name: str
    strike: Callable[[Job], None]
    culprit: str | dict[str, str] = ""
    """How each node names the fault that trained and was left, as a regular expression: ``{lost}`` stands for the nodes
    that trained and were lost. Or expressions by the names of those that must have noted one. Empty if none may."""
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
    takes: float = 0.0
    """Seconds after the fault, or the last loss of a node, that pass in any case until ranks are started again, or have
    their state."""
    again: float = _AGAIN
    """Seconds beside these that the first new step may take."""
    stored: bool = False
    """Storage gets the newest step before the node is lost, so that bytes may come from there."""
    persist_every: int | None = None
    guard: dict[str, Any] = field(default_factory=dict)
    steps: int = _STEPS
    waits_at: int = 0
    """Step that is saved with ``wait="node"``."""
    width: int = Task.width
    stands_at: int = 0
    """Step whose update the ranks of the second node don't begin: ZeRO's keeps the other one waiting inside of it."""

    @property
    def all_kinds(self) -> tuple[str, ...]:
        """Those of which torch computes the same bits each time: all with two ranks. Of a large state one is enough,
        and some faults are none to other kinds.
        """
        any_kind = self.world == 2 and self.width == Task.width and not self.stands_at
        return KINDS if any_kind else self.kinds

    def needs_copies(self, kind: str) -> bool:
        return self.lost_node and kind not in _REPLICATED

    def may_lose(self, kind: str) -> int:
        """A copy of a state this small takes no time that counts."""
        return self.lost + (math.ceil(_UNSAFE / _PAUSE) + _LATE if self.needs_copies(kind) else 0)


class Unbroken:
    """The digests of jobs without a fault, each computed once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[tuple[str, int, int], dict[tuple[int, int], str]] = {}

    def digests(self, kind: str, world: int, steps: int, width: int = Task.width) -> dict[tuple[int, int], str]:
        """By rank and step. The pauses of a job don't matter to its numbers, so this one makes none."""
        key = kind, world, width
        if (0, steps) not in self._known.get(key, {}):
            directory = self._directory / f"{kind}-{world}-{width}-{steps}"
            directory.mkdir(parents=True)
            with Lab(directory) as lab:
                lab.add()
                task = Task(str(lab.mount / "run"), str(directory), kind, world, steps, pause=0.0, width=width)
                with Job(lab, task, nodes=1) as job:
                    job.wait_for_end()
                    self._known[key] = {(r["rank"], r["step"]): r["digest"] for r in job.rows("step")}
        return {(rank, step): digest for (rank, step), digest in self._known[key].items() if step <= steps}


def play(case: Case, kind: str, directory: Path) -> Outcome:
    """Trains a job of this kind on a lab of its own, with the fault of the case."""
    with Lab(directory) as lab:
        for number in range(case.hosts + case.spare):
            lab.add(domain=case.domains[number : number + 1])
        options = {} if case.persist_every is None else {"persist_every": case.persist_every}
        place, more = str(lab.mount / "run"), (options, case.guard, case.waits_at, case.width, case.stands_at)
        task = Task(place, str(directory), kind, case.world, case.steps, _PAUSE, *more)
        launch = partial(LaunchedJob, launcher=case.launcher) if case.launcher else Job
        with launch(lab, task, nodes=case.hosts) as job:
            job.wait_for_step(_AT)
            if case.launcher == "rekindle run" and isinstance(job, LaunchedJob):
                job.wait_until_warm(case.steps // 2)
            if case.lost_node:
                job.wait_for_safe()
            if case.stands_at:
                job.wait_until(lambda: bool(job.rows("stands")), "rank that stands")
            struck = time.monotonic()
            case.strike(job)
            job.wait_for_end()
        return observe(job, struck)


def judge(case: Case, kind: str, out: Outcome, unbroken: dict[tuple[int, int], str], slack: float = SLACK) -> list[str]:
    """Promises that were not kept; none if all is well. ``slack``: seconds that are added to each bound of time."""
    wrong = []
    if out.restarts not in case.restarts:
        wrong.append(f"{out.restarts} restarts instead of {' or '.join(map(str, case.restarts))}")
    if out.lost > case.may_lose(kind):
        wrong.append(f"{out.lost} steps lost")
    if out.differing or any(unbroken[key] != digest for key, digest in out.digests.items()):
        wrong.append("differs from the unbroken run")
    if max(step for _, step in out.digests) != case.steps:
        wrong.append("did not come to its end")
    since = (out.again or 0.0) - max(out.gone.values(), default=0.0)
    if since > case.takes + case.again + slack:
        wrong.append(f"the first new step took {since:.1f} s")
    return wrong + _wrong_names(case, out) + _unnamed_silences(out, slack) + _broken_promises_of_copies(case, out)


def _wrong_names(case: Case, out: Outcome) -> list[str]:
    """What each node says must be right: also of those that had to say nothing, as they were lost or came later."""
    if isinstance(case.culprit, dict):
        words, due = case.culprit, set(case.culprit)
    else:
        lost = "|".join(sorted(set(out.trained) & out.gone.keys()))
        words = dict.fromkeys(out.noticed, case.culprit.replace("{lost}", lost)) if case.culprit else {}
        due = set(out.trained) - out.gone.keys() if case.culprit else set()
    wrong = [f"{node} has not noticed it" for node in sorted(due - out.noticed.keys())]
    for node, (_, what) in out.noticed.items():
        if node not in words or not re.search(words[node], what):
            wrong.append(f"{node} says: {what}")
    return wrong


def _unnamed_silences(out: Outcome, slack: float) -> list[str]:
    """Nodes that lost their power without a word of each of the others, unless the job went on at once without them."""
    return [
        f"{node} did not call {lost} silent in time"
        for lost, (at, left) in out.unheard.items()
        for node in left
        if (out.again is None or out.again > at + _SILENT + 1.0)
        and out.silent.get(node, {}).get(lost, math.inf) > at + _SILENT + slack
    ]


def _broken_promises_of_copies(case: Case, out: Outcome) -> list[str]:
    if not case.lost_node:
        return []
    wrong = [f"step {safe} was safe, and the job went on from {step}" for safe, step in out.forgotten]
    if out.interval > _INTERVAL + out.away:
        wrong.append(f"{out.interval} steps between two that were safe")
    if not case.stored and "storage" in out.sources:
        wrong.append("bytes came from storage")
    return wrong


CASES = {
    case.name: case
    for case in (
        Case("one rank killed", strikes.kill_rank, _KILLED),
        Case("one rank killed, slow link", strikes.kill_rank_on_a_slow_link, _KILLED, ("ddp",)),
        Case("one rank killed, rekindle run", strikes.kill_rank, _KILLED, ("ddp",), launcher="rekindle run", steps=60),
        Case("one rank killed, torchrun", strikes.kill_rank, _KILLED, ("ddp",), launcher="torchrun"),
        Case("one rank of four killed", strikes.kill_rank, _KILLED, ("ddp", "hsdp"), world=4),
        Case("one rank stopped", strikes.stop_rank, "^hang: rank 1 hangs ", guard={"watchdog": "fast"}),
        Case(
            "all ranks of a node killed", strikes.kill_all_ranks, "^signal: rank [23] was killed by SIGKILL$", world=4
        ),
        Case("agent killed", strikes.kill_agent, restarts=(0,), kinds=("ddp",), steps=60),
        Case("agent stopped for 3 s", strikes.stop_agent, restarts=(0,), kinds=("ddp",)),
        Case("node lost, power", strikes.power, _LOST, lost_node=True, takes=_GIVEN_UP),
        Case("node lost, sockets closed", strikes.fin, _LOST, lost_node=True),
        Case(
            "node lost at a safe step",
            strikes.power,
            _LOST,
            ("fsdp2",),
            lost_node=True,
            takes=_GIVEN_UP,
            waits_at=_AT,
        ),
        Case("first node lost, power", strikes.power_of_the_first, _LOST, lost_node=True, takes=_GIVEN_UP),
        Case("node lost, two ranks each", strikes.power, _LOST, world=4, lost_node=True, takes=_GIVEN_UP),
        Case("one of three nodes lost", strikes.power, _LOST, ("ddp", "fsdp2"), 3, 3, lost_node=True, takes=_GIVEN_UP),
        Case(
            "first of three nodes lost",
            strikes.power_of_the_first,
            _LOST,
            ("fsdp2",),
            3,
            3,
            lost_node=True,
            takes=_GIVEN_UP,
        ),
        Case(
            "two nodes of a domain lost",
            strikes.lose_second_domain,
            _LOST,
            ("fsdp2",),
            4,
            4,
            "xxyy",
            lost_node=True,
            takes=_GIVEN_UP,
        ),
        Case(
            "two of four nodes lost",
            strikes.lose_two_that_are_no_partners,
            _LOST,
            ("ddp", "fsdp2"),
            4,
            4,
            lost_node=True,
            takes=_GIVEN_UP,
        ),
        Case(
            "both nodes lost in turn",
            strikes.lose_both_in_turn,
            {"nodea": "^lost: node nodeb ", "nodec": "^lost: node nodea "},
            restarts=(2,),
            lost_node=True,
            takes=_GIVEN_UP,
            steps=48,
        ),
        Case(
            "agent killed, then node lost",
            strikes.lose_with_a_new_agent,
            _LOST,
            ("ddp", "fsdp2"),
            lost_node=True,
            takes=_GIVEN_UP,
            steps=60,
        ),
        Case(
            "rank killed, then node lost",
            strikes.kill_rank_and_lose_its_node,
            _KILLED,
            ("ddp", "fsdp2"),
            lost_node=True,
            takes=KEEP_ALIVE,
            stored=True,
        ),
        Case(
            "replacement lost",
            strikes.lose_the_replacement,
            "^lost: node nodeb ",
            ("ddp", "fsdp2"),
            restarts=(1, 2),
            lost_node=True,
        ),
        Case(
            "node lost, spare there",
            strikes.power_beside_a_spare,
            _TOLD,
            ("ddp", "fsdp2"),
            spare=True,
            lost_node=True,
            takes=_SILENT_LAUNCHER,
            launcher="rekindle run",
            steps=60,
        ),
        Case(
            "node lost inside an update, spare there",
            strikes.power_beside_a_spare,
            _TOLD,
            ("zero1",),
            spare=True,
            lost_node=True,
            takes=_SILENT_LAUNCHER,
            again=3.0,  # less than an update that ends gets
            launcher="rekindle run",
            steps=60,
            stands_at=40,
        ),
        Case(
            "node lost, 100 MiB, spare there",
            strikes.power_beside_a_slow_spare,
            _TOLD,
            ("ddp",),
            spare=True,
            lost_node=True,
            takes=_BYTES / _BYTES_A_SECOND,
            launcher="rekindle run",
            steps=40,
            width=_WIDTH,
        ),
        Case(
            "leader lost, spare there",
            strikes.power_of_the_leader,
            _TOLD,
            ("ddp", "fsdp2"),
            spare=True,
            lost_node=True,
            takes=_SILENT_LAUNCHER,
            launcher="rekindle run",
            steps=60,
        ),
        Case(
            "leader lost, rekindle run",
            strikes.power_of_the_first,
            _TOLD,
            ("ddp",),
            lost_node=True,
            takes=_GIVEN_UP,
            launcher="rekindle run",
            steps=60,
        ),
        Case(
            "leader lost, sockets closed",
            strikes.fin_of_the_first,
            _LOST,
            ("ddp",),
            lost_node=True,
            launcher="rekindle run",
            steps=60,
        ),
        Case(
            "leader lost, torchrun",
            strikes.power_of_the_first,
            _TOLD,
            ("ddp",),
            lost_node=True,
            takes=_GIVEN_UP,
            launcher="torchrun",
        ),
        Case(
            "node preempted",
            strikes.preempt,
            "^notice: rank 1 ",
            ("ddp", "fsdp2"),
            lost_node=True,
            stored=True,
        ),
        Case("blip of 0.5 s", strikes.blip(0.5), restarts=(0,), kinds=("ddp",)),
        Case("blip of 1.2 s", strikes.blip(1.2), restarts=(0,), kinds=("ddp", "fsdp2")),
        Case("blip of 4 s", strikes.blip(4.0), restarts=(0,), kinds=("ddp",)),
        Case("partition of 20 s", strikes.blip(20.0), _EITHER, ("ddp",), takes=20.0),
        Case("one way for 0.5 s", strikes.mute(0.5), restarts=(0,), kinds=("ddp",)),
        Case("one way for 1.2 s", strikes.mute(1.2), restarts=(0,), kinds=("fsdp2",)),
        Case("one way for 4 s", strikes.mute(4.0), restarts=(0,), kinds=("ddp",)),
        Case("one way for 20 s", strikes.mute(20.0), _EITHER, ("ddp",), takes=20.0),
        Case("link slow", strikes.slow, restarts=(0,), kinds=("ddp",)),
        Case("mount lost for 3 s", strikes.lose_mount, restarts=(0,), kinds=("ddp",), persist_every=5),
    )
}
