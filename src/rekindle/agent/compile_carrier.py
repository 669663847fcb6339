"""Carries new entries of a job's compile caches from this node's memory to storage, behind the drain.

Nothing here is ever waited for: an entry that is not carried is compiled once more on another node.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator

from rekindle.common.os_errors import explain
from rekindle.errors import RekindleError
from rekindle.format.compile_index import digest
from rekindle.memory.compile_dir import CompileDir, FileStamp
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.storage.packs import PACK_BYTES, Packs
from rekindle.storage.throttle import Budget

__all__ = ["CompileCarrier"]

log = logging.getLogger("rekindle.agent")

_LOOK_EVERY = 5.0
"""Seconds between looks for new entries. A file that two looks find unchanged has been written by now."""
_LOOK_SHARE = 50
"""Least ratio of the time between two looks to the time that one takes."""
_SPREAD = 20.0
"""Seconds over which several nodes spread the beginning: most of what they have compiled is the same on all of them."""
_RETRY_AFTER = 60.0
"""Seconds without another try after storage has refused."""
_FINISH_WITHIN, _LEAVE_WITHIN = 10.0, 60.0
"""Seconds that the rest of the entries gets at the end of the job, and then the launcher to let the directory go."""
_POLL = 0.2
_CHANGING = ("cuda/", "mindspore/")
"""Caches whose files are written again under the same names; elsewhere a name tells the content."""


class CompileCarrier:
    """Carries one job's entries. All that it knows is in the files, here and on storage.

    For one thread at a time.
    """

    def __init__(self, job: JobDir, budget: Budget) -> None:
        """``budget`` limits bytes per second, of the drain and of this."""
        self._job, self._directory, self._budget = job, CompileDir.beside(job), budget
        self._packs: dict[str, Packs] = {}
        self._seen: dict[str, dict[str, FileStamp]] = {}
        """Files of each toolchain as of the last look."""
        self._todo: dict[str, dict[str, FileStamp]] = {}
        """Files to be carried that the last look has found."""
        self._stored: dict[tuple[str, str], str] = {}
        """Digests of what storage has, by toolchain and path."""
        self._looked: dict[tuple[str, str], FileStamp] = {}
        """Files that need not be read again, as they were then."""
        self._start = ""
        """Start of the job that the two were found out for."""
        self._look_at = 0.0
        self._spread: float | None = None
        """Seconds by which the beginning was put off."""
        self._said: str | None = None

    def tick(self) -> bool:
        """Carries at most one pack. True if there may be more to carry at once."""
        if time.monotonic() < self._look_at or not self._directory.path.exists():
            return False
        return self._tried(self._carry_settled)

    def finish(self, info: JobInfo) -> bool:
        """Carries the rest, for a bounded time. Always True: the end of the job does not depend on it."""
        until = time.monotonic() + _FINISH_WITHIN
        self._todo = {}
        while time.monotonic() < until and self._tried(lambda: self._carry(info, settled=False)):
            pass
        return True

    def leave(self) -> None:
        """Gives the directory's memory back once the job's own is, and nobody uses it any more."""
        until = time.monotonic() + _LEAVE_WITHIN
        while not self._job.path.exists() and not self._directory.remove_unless_used():
            if time.monotonic() > until:
                return
            time.sleep(_POLL)

    def _tried(self, carry: Callable[[], bool]) -> bool:
        """Returns the result of ``carry``. Reports an error once, and puts the next look off after it."""
        began = time.monotonic()
        try:
            more = carry()
        except (OSError, RekindleError) as error:
            why = f"compile caches are not carried to storage, so other nodes compile anew: {explain(error)}"
            if why != self._said:
                log.warning("%s", why)
            self._said, self._look_at = why, time.monotonic() + _RETRY_AFTER
            return False
        self._said = None
        if not more:
            took = time.monotonic() - began
            self._look_at = time.monotonic() + max(_LOOK_EVERY, _LOOK_SHARE * took, self._spread or 0.0)
        return more

    def _carry_settled(self) -> bool:
        info = self._job.read_job()
        if info is None:
            return False
        if self._spread is None:
            self._spread = random.uniform(0, _SPREAD) if info.world > len(info.ranks) else 0.0
        return self._carry(info, settled=True)

    def _carry(self, info: JobInfo, *, settled: bool) -> bool:
        """Carries one pack. True if it did.

        ``settled``: only of files that were the same at the look before, as compilers are at work.
        """
        if self._job.notes.durable() is None:
            return False  # nothing of the job has reached the root, which may not be mounted
        if info.start != self._start:  # which may have removed what it found damaged
            self._start = info.start
            self._stored.clear()
            self._looked.clear()
        if not self._todo:
            self._todo = self._find_new(settled=settled)
        for toolchain in list(self._todo):
            packs = self._packs.setdefault(toolchain, Packs(info.root, toolchain))
            if self._carry_pack(packs, toolchain, self._todo[toolchain]):
                return True
            del self._todo[toolchain]
        return False

    def _find_new(self, *, settled: bool) -> dict[str, dict[str, FileStamp]]:
        found = {}
        for toolchain in self._directory.toolchains():
            if self._directory.is_compiling(toolchain):
                continue
            files = self._directory.files(toolchain)
            before = self._seen.get(toolchain, {}) if settled else files
            self._seen[toolchain] = files
            found[toolchain] = {
                path: stamp
                for path, stamp in files.items()
                if before.get(path) == stamp and self._is_new(toolchain, path, stamp)
            }
        return {toolchain: files for toolchain, files in found.items() if files}

    def _is_new(self, toolchain: str, path: str, stamp: FileStamp) -> bool:
        if (toolchain, path) in self._stored and not path.startswith(_CHANGING):
            return False
        return self._looked.get((toolchain, path)) != stamp

    def _carry_pack(self, packs: Packs, toolchain: str, new: dict[str, FileStamp]) -> bool:
        """Writes a pack of what storage lacks. False if it lacks nothing."""
        for pack in reversed(packs.list()):  # where several have a path, the newest one counts
            self._stored |= {(toolchain, entry.path): entry.digest for entry in pack.entries}
        files = list(self._pack_of(toolchain, new))
        if not files:
            return False
        nbytes = sum(len(data) for _, data in files)
        self._budget.take(nbytes)
        packs.write(files)
        self._stored |= {(toolchain, path): digest(data) for path, data in files}
        self._looked |= {(toolchain, path): new[path] for path, _ in files}
        packs.make_room()
        log.info("carried %d entries of compile caches to storage, %d bytes", len(files), nbytes)
        return True

    def _pack_of(self, toolchain: str, new: dict[str, FileStamp]) -> Iterator[tuple[str, bytes]]:
        """Yields files, with their bytes, that storage lacks: as many as a pack holds."""
        held = 0
        for path, stamp in new.items():
            if held >= PACK_BYTES:
                return
            if not self._is_new(toolchain, path, stamp):
                continue
            data = self._directory.read(toolchain, path, stamp)
            if data is None or self._stored.get((toolchain, path)) == digest(data):
                self._looked[toolchain, path] = stamp
            else:
                held += len(data)
                yield path, data
