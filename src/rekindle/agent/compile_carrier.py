"""Carries new entries of a job's compile caches from this node's memory to storage, behind the drain.

Nothing here is ever waited for: an entry that is not carried is compiled once more on another node.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from rekindle.common.os_errors import explain
from rekindle.errors import RekindleError
from rekindle.memory.compile_dir import CompileDir, FileStamp
from rekindle.memory.job_dir import JobDir
from rekindle.storage.packs import PACK_BYTES, PACK_ENTRIES, Packs

__all__ = ["CompileCarrier"]

log = logging.getLogger("rekindle.agent")

_LOOK_EVERY = 20.0
"""Seconds between looks for new entries, each of which takes some 6 ms for a thousand files."""
_SETTLES = 5.0
"""Seconds without a change after which a file has been written."""
_RETRY_AFTER = 60.0
"""Seconds without another try after storage has refused."""
_FINISH_WITHIN = 10.0
"""Seconds that the rest of the entries gets at the end of the job."""


class CompileCarrier:
    """Carries one job's entries. All that its successor would need is in files. For one thread at a time."""

    def __init__(self, job: JobDir, answered: Callable[[], object] = lambda: None) -> None:
        """``answered`` is called after each answer of storage: one that is slow is not taken for one that hangs."""
        self._job, self._directory, self._answered = job, CompileDir.beside(job), answered
        self._packs: Packs | None = None
        self._known: dict[str, FileStamp] = {}
        """Files, as they were then, that storage has or that can't be read."""
        self._refused = False
        # Most of what several nodes have compiled is the same on all of them: the first one carries it.
        own = random.Random()  # this may be a trainer, and its generators are training's
        self._look_at = time.monotonic() + own.uniform(0, _LOOK_EVERY)

    def tick(self) -> None:
        """Carries a pack, if it is time to look for one. Never raises."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            self._try_to_carry(_SETTLES)

    def finish(self, deadline: float) -> None:
        """Carries the rest, for a bounded time, and until ``deadline`` at most. Never raises."""
        until = min(time.monotonic() + _FINISH_WITHIN, deadline)
        while time.monotonic() < until and self._try_to_carry(0.0):
            pass

    def _try_to_carry(self, settles: float) -> bool:
        """Carries a pack of files that have not changed for ``settles`` seconds. True if it did. Says once why not."""
        try:
            carried = self._carry(settles)
        except (OSError, RekindleError) as error:
            if not self._refused:
                log.warning("compile caches are not on storage, so other nodes compile anew: %s", explain(error))
            self._refused, self._look_at = True, time.monotonic() + _RETRY_AFTER
            self._packs = None  # and so all is unknown again, as the pack in hand was not written
            return False
        if carried:
            self._refused = False
        return carried

    def _carry(self, settles: float) -> bool:
        toolchain = self._directory.toolchain()
        info = self._job.read_job() if toolchain is not None else None
        if toolchain is None or info is None or self._job.notes.durable() is None:
            return False  # the last: nothing of the job has reached the root, which may not be mounted
        if self._packs is None or self._packs.toolchain != toolchain:
            self._packs, self._known = Packs(info.root, toolchain, self._answered), {}
        files = self._read_new(self._packs, settles)
        if not files:
            return False
        nbytes = sum(map(len, files.values()))
        self._packs.write(files)
        self._packs.make_room()
        log.info("carried %d entries of compile caches to storage, %d bytes", len(files), nbytes)
        # There may be more. A pack is small, so the drain's limit of bytes per second needs to hold between packs only.
        self._look_at = time.monotonic() + (nbytes / info.drain_limit if info.drain_limit else 0.0)
        return True

    def _read_new(self, packs: Packs, settles: float) -> dict[str, bytes]:
        """Returns the bytes of files that storage lacks, by their paths: as many as a pack holds."""
        settled = time.time_ns() - int(settles * 1e9)
        found = self._directory.files(packs.toolchain)
        new = {path: stamp for path, stamp in found.items() if self._known.get(path) != stamp}
        new = {path: stamp for path, stamp in new.items() if stamp.changed <= settled}
        if not new:
            return {}
        stored = {entry.path for pack in packs.list() for entry in pack.entries}
        files: dict[str, bytes] = {}
        nbytes = 0
        for path, stamp in new.items():
            if path not in stored or path in self._known:  # else another node has carried it, or this one's last agent
                data = self._directory.read(packs.toolchain, path, stamp)
                if data is not None:
                    files[path] = data
                    nbytes += len(data)
            self._known[path] = stamp
            if nbytes >= PACK_BYTES or len(files) == PACK_ENTRIES:
                break
        return files
