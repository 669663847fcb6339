"""Decides after each failure whether the ranks are started again, when, and what to say of it.

A pure decision: ``reports`` finds out what it is made from, ``torchrun`` carries it out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rekindle.errors import BusyError, RekindleError

__all__ = ["MAX_RESTARTS", "Decision", "Failure", "Limits", "Restarts"]

MAX_RESTARTS = 20
"""Default number of restarts without progress. An error that comes again should not be repeated for an hour."""

_UNSEEN = 60.0
"""Seconds after which a start without a known step may have made progress of which nothing is known here, because its
script saves by other means. A start that fails in its first lines takes a few, on a slow file system perhaps 30."""
_VARIES = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)
"""Matches what differs between two occurrences of one error: addresses, ports, process ids, numbers of ranks."""


@dataclass(frozen=True)
class Limits:
    """Bounds on restarts, as the command line gives them."""

    restarts: int = MAX_RESTARTS
    """Restarts without progress, or in the life of the job."""
    since_progress: bool = True
    """True if progress gives all restarts back."""
    same: int = 3
    """Starts in a row that may end with the same error at the same step; 0 for any number."""
    pause: float = 60.0
    """Longest pause before a restart, in seconds."""
    retry_refused: bool = False
    """True if errors that each start would meet again don't end the job at once."""


@dataclass(frozen=True)
class Failure:
    """Describes the end of one start."""

    error: str | None
    """Text of the exception that the script has ended with, or its exit code. None if something else ended it, such as
    a signal, a hang or a notice: that can't be told from an accident."""
    raised: bool = False
    """True if the text is that of an exception."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Newest step of each root that the job has reported; -1 without any."""
    reached: int | None = None
    """Steps that were completed when it failed; None if that isn't known."""
    seconds: float = 0.0
    """Duration of the start."""
    files: Mapping[str, float] = field(default_factory=dict)
    """Files that this start has saved by their paths, oldest save first, each with the seconds that had passed."""
    refused: RekindleError | None = None
    """The error that ended it, if each further start would meet it again."""
    restarted: bool = False
    """False for the job's first start."""


@dataclass(frozen=True)
class Decision:
    """Tells what follows a failure."""

    restart: bool
    words: str
    """For people: which restart of how many it is, or why there is none."""
    pause: float = 0.0
    """Seconds until the restart."""
    repeated: bool = False
    """True if the same error ended the job."""
    error: RekindleError | None = None
    """The error that the launcher ends with, in place of a rank's failure."""


class Restarts:
    """Follows the failures of one job."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.failures = 0
        self._spent = 0
        """Restarts since the last progress that counts."""
        self._idle = 0
        """Starts in a row without progress."""
        self._best: dict[str, int] = {}
        """Newest step of each root so far."""
        self._files: set[str] = set()
        """Files that the job has saved so far."""
        self._newest_file: str | None = None
        """The file that was the last progress; None while a step is known, or without one."""
        self._since: int | str | None = None
        """Step up to which the last progress went, or its file, if restarts are counted from there."""
        self._last: tuple[str, dict[str, int], str | None] | None = None
        self._same = 0
        """Starts in a row that ended like the last one."""

    def decide(self, failure: Failure) -> Decision:
        """Counts one failure. Returns what follows from it."""
        self.failures += 1
        self._count_progress(failure)
        self._count_same(failure)
        refused = failure.refused
        if refused is not None and not self._limits.retry_refused and _stays(failure):
            return Decision(False, "", error=type(refused)(f"{refused}: the job is not started again"))
        if 0 < self._limits.same <= self._same:
            return Decision(False, self._same_again(failure), repeated=True)
        if self._spent >= self._limits.restarts:
            return Decision(False, self._none_left())
        self._spent += 1
        pause = min(self._limits.pause, 2.0 ** min(self._idle - 2, 16)) if self._idle > 1 else 0.0
        later = f" in {pause:.3g} s" if pause else ""
        since = "" if self._since is None else f" since {_name(self._since)}"
        return Decision(True, f"started again{later}, restart {self._spent} of {self._limits.restarts}{since}", pause)

    def _count_progress(self, failure: Failure) -> None:
        steps, file = failure.steps, self._find_new_file(failure)
        new = [step for root, step in steps.items() if step > self._best.get(root, -1)]
        self._best |= {root: max(step, self._best.get(root, -1)) for root, step in steps.items()}
        self._idle = 0 if new or file else self._idle + 1
        if (new or file) and self._limits.since_progress:
            self._spent, self._since = 0, file or max(new)

    def _find_new_file(self, failure: Failure) -> str | None:
        """Returns the newest file that shows progress; None where steps do, or where there is none.

        One at a path that the job had not saved does. A path that is saved again may be a script's own beginning: it
        counts after a minute.
        """
        new = [path for path, after in failure.files.items() if path not in self._files or after > _UNSEEN]
        self._files.update(failure.files)
        if _step_is_known(failure):
            self._newest_file = None
        elif new:
            self._newest_file = new[-1]
            return new[-1]
        return None

    def _count_same(self, failure: Failure) -> None:
        unseen = not _step_is_known(failure) and failure.seconds > _UNSEEN
        key = None
        if failure.error is not None and not unseen:
            key = (_VARIES.sub("#", failure.error), dict(failure.steps), self._newest_file)
        self._same = 0 if key is None else self._same + 1 if key == self._last else 1
        self._last = key

    def _same_again(self, failure: Failure) -> str:
        newest = max(failure.steps.values(), default=-1)
        if failure.reached is not None:
            place = f"at step {failure.reached + 1}"
        elif newest >= 0:
            place = f"after step {newest}, the newest saved"
        elif self._newest_file is not None:
            place = f"after {self._newest_file}, the newest file saved"
        else:
            place = "without progress"
        times = "once" if self._same == 1 else f"{self._same} times"
        return f"the same {'error' if failure.raised else 'exit code'} {times} {place}: the job is not started again"

    def _none_left(self) -> str:
        most = self._limits.restarts
        if most == 0:
            return "the job is not started again: --max-restarts is 0"
        if self._since is not None and self.failures > most + 1:
            when = "at or before" if isinstance(self._since, int) else "since"
            return f"the job failed {most + 1} times {when} {_name(self._since)}: --max-restarts {most} allows no more"
        return f"the job was started {self.failures} times and failed each time: --max-restarts {most} allows no more"


def _stays(failure: Failure) -> bool:
    """Returns True if the next start would meet the error that was refused as well.

    A root that is busy at a later start may be held by a dying rank of this job.
    """
    return not (failure.restarted and isinstance(failure.refused, BusyError))


def _step_is_known(failure: Failure) -> bool:
    return max(failure.steps.values(), default=-1) >= 0


def _name(progress: int | str) -> str:
    return f"step {progress}" if isinstance(progress, int) else f"{progress} was saved"
