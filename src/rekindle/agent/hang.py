"""Notices that ranks hang, on any node, unless a pause, a debugger or a silent node excuses them; names who is behind.

The agent of one node judges, by the pages of all ranks. Those of the others ask their own ranks for debuggers.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from rekindle.agent.beat import Page
from rekindle.agent.others import Others
from rekindle.agent.rank import WatchedRank
from rekindle.agent.report import report_place
from rekindle.agent.watchdog import SilenceLimit, is_traced, silence_limit
from rekindle.errors import FormatError
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import DONE, PHASE_TEXTS

__all__ = ["HangWatch"]

log = logging.getLogger("rekindle.agent")

_AGAIN = 1.0
"""Seconds between two checks of a job that a pause or a debugger holds up."""
_REPLY = 0.5
"""Seconds that a rank gets to say if a Python debugger holds it. A debugger that lets no thread run can't answer."""
_OTHERS_REPLY = 1.0
"""Seconds that the other nodes get to say if a debugger holds one of their ranks."""
_ALL_REPLY = 4.0
"""The same for those that send no beats, which are asked every other second."""
_DOUBT = 1.0
"""Seconds before a word that a node is not heard which are in doubt, too: it is silent only after so long."""
_MOST = 1024
"""Stretches of excused time that are kept."""
_NAMED = 100
"""Ranks that an account names at most. All nodes are told of it, and the longest message is 1 MiB."""
_PATIENCES = 6
"""Patiences with silent nodes that excuse one silence at most. A node that comes and goes would hide any hang."""

Ranks = Mapping[int, WatchedRank]


@dataclass
class Excuses:
    """Stretches of time that don't count as silence: this agent did not run, or a node was not heard."""

    _stretches: deque[tuple[float, float, bool]] = field(default_factory=lambda: deque(maxlen=_MOST))
    """Beginning and end of each, and if it is a doubt about a node. In order; they don't overlap."""

    def add(self, begin: float, end: float, *, doubt: bool) -> None:
        """Adds what of a stretch is later than those before."""
        last_begin, last_end, last_doubt = self._stretches[-1] if self._stretches else (begin, begin, not doubt)
        if end <= last_end:
            return
        if begin <= last_end and doubt == last_doubt:
            self._stretches[-1] = last_begin, end, doubt
        else:
            self._stretches.append((max(begin, last_end), end, doubt))

    def seconds(self, since: float, most_doubt: float) -> float:
        """Returns the seconds after ``since`` that are excused, of which doubts are ``most_doubt`` at most."""
        both = {True: 0.0, False: 0.0}
        for begin, end, doubt in self._stretches:
            both[doubt] += max(0.0, end - max(begin, since))
        return both[False] + min(both[True], most_doubt)


class HangWatch:
    """Watches the ranks of one job for a hang. Used in the agent's event loop."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self.paused_at: float | None = None
        """Time at which a rank of this node was last seen to pause, or to be held by a debugger; None for never."""
        self.cleared = False
        """True if ranks are late, and none of this node's is held by a debugger."""
        self._excused_at = 0.0
        """Time at which a rank of any node was last known to pause, which excuses the silence of all."""
        self._excuses = Excuses()
        self._told_at = 0.0
        """Time at which the ranks were last told that the step under way is no measure."""
        self._late_since = 0.0
        """Time at which the ranks were first late, of this silence; 0 while they aren't."""
        self._asked_at = 0.0
        """Time at which the ranks were asked for a debugger; 0 when no answer is awaited."""
        self._debugger_seen_at = 0.0
        """Time at which a debugger was last seen to hold a rank; 0 when none does."""

    def slept(self, since: float, now: float) -> None:
        """Takes note that this process did not run for a while: a rank's silence in it proves nothing.

        Answers that have come meanwhile are yet to be read.
        """
        self._excuses.add(since, now, doubt=False)
        self._late_since, self._asked_at = (now if at else 0.0 for at in (self._late_since, self._asked_at))

    def check(self, now: float, ranks: Ranks, others: Others) -> Fault | None:
        """Returns the hang of a rank of the job, if this node's agent is the one to announce it; else None."""
        own = {rank.rank: rank.shown() for rank in ranks.values()}
        pages = {**others.pages(), **own}
        if any(page.status.paused for page in own.values()):
            self._note_pause(now, ranks)
        elsewhere = others.paused_at()
        if elsewhere > self._excused_at:
            self._excuse(elsewhere, now, ranks)
        unsettled = others.unsettled_at()
        self._excuses.add(unsettled - _DOUBT, unsettled, doubt=True)
        if now - unsettled < _DOUBT:
            self._tell_ranks(now, ranks)
        limit = _limit(pages)
        if limit is None:
            self._asked_at = self._debugger_seen_at = 0.0  # of an earlier start
            return None
        if not self._is_late(now, pages, limit, others):
            self._late_since, self.cleared = 0.0, False
            if self._debugger_seen_at:
                self._debugger_holds(now, ranks)
            else:
                self._asked_at = 0.0  # progress before all had answered: ask again at the next silence
            return None
        self._late_since = self._late_since or now
        self.cleared = self.cleared or self._debugger_holds(now, ranks) is False
        waited = now - self._late_since > _OTHERS_REPLY
        if not (self.cleared and others.judges() and (waited or others.cleared())):
            return None
        roll = others.call_roll()
        if roll is None or not (roll.cleared or now - self._late_since > _ALL_REPLY):
            return None
        pages = {**roll.pages, **pages}
        limit = _limit(pages)
        if limit is None or not self._is_late(now, pages, limit, others):
            return None
        return self._describe(pages, limit, several=bool(others.name))

    def _is_late(self, now: float, pages: dict[int, Page], limit: SilenceLimit, others: Others) -> bool:
        progress = [page.status.progress / 1e9 for page in pages.values() if page.status.phase != DONE]
        since = max(min(progress, default=now), self._excused_at)
        if now - since <= limit.seconds:
            return False
        return now - since - self._excuses.seconds(since, _PATIENCES * others.patience) > limit.seconds

    def note_debugger(self, what: str, ranks: Ranks) -> None:
        """Takes note of a debugger that holds a rank of this node."""
        now = time.monotonic()
        if not self._debugger_seen_at:
            log.info("%s: the watchdog waits until it is gone", what)
        self._asked_at, self._debugger_seen_at = 0.0, now
        self._note_pause(now, ranks)

    def _note_pause(self, now: float, ranks: Ranks) -> None:
        self.paused_at = now
        self._excuse(now, now, ranks)

    def _excuse(self, at: float, now: float, ranks: Ranks) -> None:
        """Excuses the silence of all ranks up to ``at``, as they wait for one that pauses.

        Silence then counts from the pause's end only, and the ranks don't take such a step's time as a measure.
        """
        self._excused_at = at
        self._tell_ranks(now, ranks)

    def _tell_ranks(self, now: float, ranks: Ranks) -> None:
        if now - self._told_at > _AGAIN:
            self._told_at = now
            for rank in ranks.values():
                rank.send({"pause": True})

    def _debugger_holds(self, now: float, ranks: Ranks) -> bool | None:
        """Returns True if a debugger holds one of the ranks, which is no hang; None while they are being asked."""
        if self._debugger_seen_at and now - self._debugger_seen_at < _AGAIN:
            self._note_pause(now, ranks)
            return True
        if any(is_traced(rank.process.pid) for rank in ranks.values()):
            self.note_debugger("a debugger is attached to a rank", ranks)
            return True
        if not self._asked_at:
            self._asked_at = now
            for rank in ranks.values():
                rank.debugger_answered = rank.process.look().stopped
                rank.send({"debugger": True})
        if now - self._asked_at < _REPLY and not all(rank.debugger_answered for rank in ranks.values()):
            return None
        ended, self._asked_at, self._debugger_seen_at = self._debugger_seen_at > 0, 0.0, 0.0
        if ended:
            self._note_pause(now, ranks)
        return ended

    def _describe(self, pages: dict[int, Page], limit: SilenceLimit, *, several: bool) -> Fault:
        """Describes the hang. The rank that is stopped or furthest behind is the one that the others wait for.

        Nobody waits for one that has ended its training.
        """
        training = [rank for rank, page in pages.items() if page.status.phase != DONE]
        behind = min(training, key=lambda rank: _how_far(pages[rank]))
        status = pages[behind].status
        lines = [f"rank {behind} made no progress for {limit.seconds:.2f} s, the limit: {limit.why}"]
        lines.append(
            'if this was no hang: run what takes longer inside of `with ckpt.pause_watchdog("evaluation"):`, or allow '
            "more with ckpt.guard(watchdog=SECONDS); watchdog=False switches it off"
        )
        worst = sorted(pages, key=lambda rank: _how_far(pages[rank]))[:_NAMED]
        lines += [_describe_page(rank, pages[rank]) for rank in sorted(worst)]
        lines += _more(len(pages), "that are further on")
        found = sorted(
            rank
            for rank in training
            if (pages[rank].stopped, pages[rank].status.step) == (pages[behind].stopped, status.step)
        )
        where = f"after step {status.step}, {PHASE_TEXTS[status.phase]}"
        what = f"rank {behind} hangs {where}"
        if len(found) > 1:  # only their stacks can tell which one the others wait for
            named = ", ".join(map(str, found[:_NAMED]))
            what = f"ranks {' '.join([named, *_more(len(found))])} hang {where}"
        info = None
        with suppress(FormatError):
            info = self._job.read_job()
        if info is not None:
            place = report_place(status.generation, status.step, several=several)
            lines.append(f"the stacks of all ranks will be in {info.root}/{place}")
        began = status.progress / 1e9
        return Fault("hang", behind, status.generation, status.step, what, "\n".join(lines), began=began)


def _limit(pages: Mapping[int, Page]) -> SilenceLimit | None:
    return silence_limit((page.floor for page in pages.values()), [page.status for page in pages.values()])


def _how_far(page: Page) -> tuple[bool, int, int]:
    """Orders pages: first that of the rank that the others wait for."""
    return not page.stopped, page.status.step, page.status.progress


def _more(count: int, who: str = "") -> list[str]:
    """Returns words on the ranks beyond those that are named, as one item; none if there are no more."""
    return [f"and {count - _NAMED} more {who}".rstrip()] if count > _NAMED else []


def _describe_page(rank: int, page: Page) -> str:
    status = page.status
    more = (f", {status.note}" if status.note else "") + (", stopped by a signal" if page.stopped else "")
    return f"rank {rank}: after step {status.step}, {PHASE_TEXTS[status.phase]}, for {status.age:.2f} s{more}"
