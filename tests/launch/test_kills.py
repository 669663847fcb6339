"""Restarts under random kills of ranks, spares, agents and the launcher itself: nothing is left behind."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rekindle.faults.torchelastic import SURVIVOR_EXIT
from rekindle.launch.spare import ORDERS
from tests.launch.launcher import WARM, Launcher, children, descriptors

SCRIPT = Path(__file__).with_name("endless.py")
RANKS = 2
KINDS = {"rank": 8, "all ranks": 3, "spare and rank": 2, "spare": 1, "agent and rank": 2, "launcher": 1}
"""Victims, and how often each kind is drawn."""
ENDS = {True: "was killed by SIGKILL", False: f"ended with exit code {SURVIVOR_EXIT}"}
"""Ends of a victim and of a survivor. A launcher without a processor for seconds may take the latter for the first."""
GROWTH = 6 << 10
"""KiB by which the launcher's memory may grow over all of its restarts."""
RESTARTS = 20
"""Restarts of each part: about as many as a launcher lives to see, before it is killed itself."""


class Struck(Launcher):
    """One launcher of a job that is killed time and again."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        (directory / "stepped").write_text("")
        options = ("--nproc-per-node", RANKS, "--restart-pause", "0", "--same-error-limit", "0")
        super().__init__(directory, *options, SCRIPT, "root")
        self.directory, self._chance = directory, chance
        self.start = 0
        """Number of the newest start."""
        self._may_be_cold = 0
        """Restarts before which the spare was killed, or a start that had made no step."""
        self._held: list[tuple[int, int]] = []
        """Descriptors and KiB of the launcher, at each restart that has trained."""

    # -- looking --------------------------------------------------------------------------------------------------

    def ranks(self) -> dict[int, int]:
        """Process ids of the newest start, by rank. A process that has yet to become a worker is none."""
        found = {}
        for pid in children(self.process.pid):
            with suppress(OSError):
                told = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
                if f"TORCHELASTIC_RESTART_COUNT={self.start}".encode() in told:
                    found[int(next(one for one in told if one.startswith(b"LOCAL_RANK=")).partition(b"=")[2])] = pid
        return found

    def others(self) -> set[int]:
        """All processes of this test but the launcher, the ranks of any start, the agent and a sleeping spare."""
        found = set()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                told = (path / "environ").read_bytes()
                worker = b"TORCHELASTIC_RESTART_COUNT=" in told and ORDERS.encode() not in told
                agent = b"rekindle.agent" in (path / "cmdline").read_bytes()
                if f"REKINDLE_MEMORY={self.directory}/".encode() in told and not worker and not agent:
                    found.add(int(path.name))
        return found - {self.process.pid, *self.spares()}

    def has_trained(self) -> bool:
        return (self.directory / "stepped").read_text().split().count(str(self.start)) == RANKS

    # -- killing --------------------------------------------------------------------------------------------------

    def strike(self) -> bool:
        """Kill somebody, and wait for the restart. Returns False if the launcher was killed: there is none then."""
        ripe = self._chance.random() < 0.7
        self.wait_until(self.has_trained if ripe else lambda: bool(self.ranks()))
        if ripe:
            self.measure()
        time.sleep(self._chance.uniform(0, 0.1 if ripe else 0.4))
        (kind,) = self._chance.choices(list(KINDS), list(KINDS.values()))
        if kind == "launcher":
            self._kill_launcher()
            return False
        if kind.startswith("spare") or not ripe:
            self._may_be_cold += 1
        if kind.startswith("spare"):
            self._kill_spare(wait=kind == "spare")
        if kind.startswith("agent") and (agent := self.job.agent()):
            kill(agent)
        ranks = self.ranks()
        victims = sorted(ranks) if kind == "all ranks" else self._chance.sample(sorted(ranks), min(1, len(ranks)))
        for rank in victims:
            kill(ranks[rank])
        self.wait_until(lambda: len(self.restarts) > self.start or self.process.poll() is not None)
        assert self.process.poll() is None, f"{kind}:\n{self.output}"
        line = self.restarts[self.start]
        if ripe and not kind.startswith("agent"):  # else a rank may fail of itself before
            named = re.fullmatch(r"rekindle: rank (\d) (.*): all ranks are started again, .*", line)
            assert named and named[2] == ENDS[int(named[1]) in victims], f"{kind} {victims}: {line}\n{self.output}"
        self.start += 1
        return True

    def _kill_spare(self, *, wait: bool) -> None:
        ready = sum(WARM in line for line in self.lines)
        for spare in self.spares():
            kill(spare)
            if wait:
                self.wait_until(lambda: sum(WARM in line for line in self.lines) > ready)

    def _kill_launcher(self) -> None:
        """Its ranks train on, as any do; all else ends. Then they are killed too, as a scheduler would."""
        self.process.kill()
        assert self.process.wait(60) == -signal.SIGKILL
        self.wait_until(lambda: not self.others() and not self.spares())
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                told = (path / "environ").read_bytes()
                if f"REKINDLE_MEMORY={self.directory}/".encode() in told and b"LOCAL_RANK=" in told:
                    kill(int(path.name))

    # -- judging --------------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Note what the launcher holds, and see that nobody is there who should not be."""
        self.wait_until(lambda: not self.others())
        launcher = self.process.pid
        self.wait_until(lambda: set(children(launcher)) == {*self.ranks().values(), *self.spares()})
        status = Path(f"/proc/{launcher}/status").read_text()
        memory = int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0])
        if self.start and self.spares():
            self._held.append((descriptors(launcher), memory))

    def judge(self) -> None:
        cold = [line for line in self.lines if "started cold" in line]
        assert len(cold) <= self._may_be_cold, "\n".join(cold)
        if not self._held:
            return
        held = [count for count, _ in self._held]
        assert max(held) <= held[0], f"descriptors of the launcher: {held}"
        settled = self._held[len(self._held) // 10][1]
        assert self._held[-1][1] - settled < GROWTH, f"KiB of the launcher: {[kib for _, kib in self._held]}"


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(1500)
@pytest.mark.campaign(seconds=55)
@pytest.mark.parametrize("part", range(10))
def test_restarts_under_random_kills_leave_nothing_behind(part: int, tmp_path: Path) -> None:
    """``REKINDLE_TEST_SEED`` for the same kills as before. Each share of the campaigns can have a part of them."""
    seed = int(os.environ.get("REKINDLE_TEST_SEED", time.time_ns() % 1_000_000))
    chance = random.Random(f"{seed} {part}")
    print(f"REKINDLE_TEST_SEED={seed}")
    made = 0
    while made < RESTARTS:
        with Struck(tmp_path, chance) as run:
            run.wait_for(WARM)
            while made < RESTARTS and run.strike():
                made += 1
            if run.process.poll() is None:
                run.wait_until(run.has_trained)
                run.measure()
                (tmp_path / "end").touch()
                assert run.process.wait(100) == 0, run.output
                run.wait_until(lambda run=run: not run.others() and not run.spares() and not run.job.path.exists())
            run.judge()
