"""One soak: start the job, let it train, let a fault befall it, start it again, and see that nothing is lost."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.soak.job import Start
from tests.soak.model import Model
from tests.soak.nemesis import AGENT_POINTS, FAULTS, RANK_POINTS, Places, flip

__all__ = ["Soak"]

_UP = 60.0
"""Seconds that a start may take until it has restored."""
_END = 90.0
"""Seconds within which a job must make a step, or have ended after a fault that ends it."""
_SHAKY = 6.0
"""Seconds after memory was in trouble for which nothing is asked of it."""


@dataclass
class Soak:
    """``say`` is given a line for people now and then."""

    places: Places
    seed: int
    kinds: list[str]
    say: Callable[[str], object]
    injected: Counter[str] = field(default_factory=Counter)
    starts: int = 0

    def __post_init__(self) -> None:
        self.model = Model(self.places.spec)
        self._dice = random.Random(self.seed)
        self._ranks = range(self.places.spec.world)
        self._heard: list[int] = []
        self._promise = 0
        """The step that the next start must go on from."""
        self._why = "the beginning"
        self._costs = 0
        """Completed steps that the fault in hand may cost."""
        self._shaky = 0.0
        """Until when memory is not to be relied on."""
        self._struck = 0.0
        """When the last fault began: how long its end takes is not the point."""

    def run(self, seconds: float) -> None:
        """Until the time is over, or something is lost; then the job ends by itself."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.model.losses:
            start, dying = self._start(self._point()), False
            while not dying and self._train(start, self._dice.uniform(0.3, 3.0)) and time.monotonic() < until:
                dying = self._strike(start)
            if not dying and start.over() is None and time.monotonic() >= until:
                self._end(start)
                return
            self._bury(start)
        if not self.model.losses:
            start = self._start({})
            if self._train(start, 1.0):
                self._end(start)

    # -- one start ------------------------------------------------------------------------------------------------

    def _point(self) -> dict[int, str]:
        """A failpoint for some starts: of a rank by its number, of the agent by -1."""
        who = self._dice.choice([None, None, None, -1, *self._ranks])
        return {} if who is None else {who: self._dice.choice(AGENT_POINTS if who < 0 else RANK_POINTS)}

    def _start(self, points: dict[int, str]) -> Start:
        ranks = {rank: point for rank, point in points.items() if rank >= 0}
        start = Start(self.places.spec, self.starts, ranks, points.get(-1, ""))
        self.starts += 1
        self._heard = [0 for _ in self._ranks]
        start.begin()
        if not self._until(start, lambda: all(start.lines(rank) for rank in self._ranks), _UP):
            if start.over() is None or not points:  # else it has died as it was to: a restore saves, too
                self._fail(start, f"start {start.number} after {self._why} did not restore")
            return start
        self.model.resumed([start.lines(rank)[0].step for rank in self._ranks], self._promise, self._why)
        for who, point in points.items():
            self.injected[f"{'agent' if who < 0 else 'rank'} killed at {point}"] += 1
        self._why, self._costs = next(iter(points.values()), "nothing that we did"), 0
        return start

    def _fail(self, start: Start, what: str) -> None:
        self.model.lost(f"{what}; exit codes {start.over()}")
        start.kill()

    def _until(self, start: Start, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and start.over() is None:
            self._listen(start)
            if condition():
                return True
            time.sleep(0.02)
        return False

    def _listen(self, start: Start) -> None:
        for rank in self._ranks:
            lines = start.lines(rank)
            self.model.hear(rank, lines[self._heard[rank] :])
            self._heard[rank] = len(lines)

    def _completed(self, start: Start) -> int:
        """Newest step that all ranks have completed, or went on from."""
        return min(max((line.step for line in start.lines(rank)), default=0) for rank in self._ranks)

    def _train(self, start: Start, seconds: float) -> bool:
        """Let it train, and see it make a step after that, its third at least: before its second one the watchdog
        can't know what a hang is. False when it has ended."""
        self._until(start, lambda: False, seconds)
        before = self._completed(start)

        def goes_on() -> bool:
            made = min(sum(line.what == "step" for line in start.lines(rank)) for rank in self._ranks)
            return made > 2 and self._completed(start) > before

        if self._until(start, goes_on, _END):
            return True
        if start.over() is None:
            self._fail(start, f"after {self._why}: no step within {_END:.0f} s")
        return False

    # -- faults ---------------------------------------------------------------------------------------------------

    def _strike(self, start: Start) -> bool:
        """Let a fault befall the job. True when the job ends by it."""
        name = self._dice.choice(self.kinds)
        fault = FAULTS[name]
        if fault.damages and not self.model.can_spare_one():
            return False
        if fault.watched and not self._watched(start):
            return False
        dice = random.Random(self._dice.random())  # what a fault draws for itself depends on what it finds
        self.model.look()
        self.say(f"step {self._completed(start)}: {name}")
        self.injected[name] += 1
        self._why, self._costs, self._struck = name, fault.steps, time.monotonic()
        if not fault.memory:
            self._shaky = float("inf")
        striking = threading.Thread(target=fault.strike, args=(self.places, start, dice))
        striking.start()
        while striking.is_alive():
            self._listen(start)
            striking.join(0.05)
        if not fault.memory:
            self._shaky = time.monotonic() + _SHAKY
        if fault.damages:
            flip(sorted(self.model.give_up_newest().glob("*.safetensors")), dice)
        return fault.ends

    def _watched(self, start: Start) -> bool:
        """Whether an agent is there, to stay, and has seen some steps."""
        agent, before = self.places.spec.job.agent(), self._completed(start)
        if agent is None or agent in start.pids or start.agent_point:
            return False
        return self._until(start, lambda: self._completed(start) > before + 3, _END) and (
            self.places.spec.job.agent() == agent
        )

    def _bury(self, start: Start) -> None:
        """See a start to its end, and work out what the next one must go on from."""
        if not self._until_over(start):
            self._fail(start, f"after {self._why}: the job has not ended within {_END:.0f} s")
            self._until_over(start)
        self.model.look()
        if all(start.lines(rank) for rank in self._ranks):  # else it is the next one that must do as promised
            relied = self._completed(start) - self._costs if self._struck > self._shaky else 0
            self._promise = max(self.model.durable, relied)
        self.model.verify()

    def _until_over(self, start: Start) -> bool:
        self._until(start, lambda: False, _END)
        self._listen(start)
        return start.over() is not None

    def _end(self, start: Start) -> None:
        """The job ends of its own accord, and its last step is on storage."""
        self.places.spec.stop.touch()
        if not self._until_over(start):
            self._fail(start, f"after {self._why}: the job did not end by itself")
        elif start.over() != [0 for _ in self._ranks]:
            self._fail(start, "the job failed at its end")
        self.model.look()
        self.model.verify()
