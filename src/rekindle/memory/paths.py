"""Names the files of a job's directory in the memory store.

::

    /dev/shm/rekindle-<uid>/             mode 0700, owned by the user
      <job>/                             derived from the root, so a restarted job finds it
        job.json                         what the agent must know of the job
        durable  root.json               the newest step on storage; the identity of the root that showed it
        drained                          when the newest drain began, and its duration
        pause                            the time between drains, where that is chosen
        anew                             the start that began anew because all checkpoints on storage had been deleted
        agent.lock  agent.sock  agent.log  agent.json
        rank-00000.lock                  held by that rank's trainer while it lives
        rank-00000.status .costs         the rank's status page, and the page of what saving has cost it
        rank-00000.plan .small-0 -1 -u   the rank's local state, and the plan that describes its bytes
        rank-00000.spare                 memory for one receipt, which takes the place of another when memory is full
        common  wanted                   the step that all nodes keep together; one that a save waits for
        cramped                          the start in which a save found no room beside the steps that all nodes keep
        third  third-asked               the start whose ranks make third slots; when a drain asked for them
        others/                          local states of ranks of other nodes, and slots/ and step-*/ of their copies
        rank-00000.stacks .flight        at a hang: stacks of its threads, and torch's flight record
        watch.sock  fault.json           where ranks and agent tell each other of faults; the newest fault
        nodes.json  address.json         all nodes of a start and their secret; where this node's agent listens
        start.json  gone.json            the newest start on this host; when its last process had ended after a fault
        prices.json                      what snapshots and drains take from training on this host
        starts.json                      the newest start's claim of the root, and the starts before it
        incidents/                       records of incidents, a line of JSON in a file each, as on storage
        slots/                           free files, which hold no snapshot
        step-0000000012/                 the same files as on storage, without a manifest
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LOCAL_STATE_PLANS", "JobPaths", "matching", "rank_of", "remove_any"]

_RANK = "rank-" + 5 * "[0-9]"

RANK_LOCKS = f"{_RANK}.lock"
"""Matches the names of all ranks' locks."""

STATUS_PAGES = f"{_RANK}.status"
"""Matches the names of all ranks' status pages."""

LOCAL_STATE_PLANS = f"{_RANK}.plan"
"""Matches the names of the plans of all ranks' local states."""

RANK_SLOTS = f"{_RANK}-*.slot"
"""Matches the names of all ranks' free files."""


def matching(directory: Path, pattern: str) -> list[Path]:
    """Returns the files in ``directory`` whose names match ``pattern``.

    The directory may vanish at any moment, and then has no files. ``Path.glob`` would raise an error.
    """
    try:
        return [directory / name for name in os.listdir(directory) if fnmatch.fnmatchcase(name, pattern)]
    except OSError:
        return []


def rank_of(path: Path) -> int:
    """Returns the rank whose file ``path`` is, from a name such as ``rank-00003.lock``."""
    return int(path.name[5:10])


def remove_any(path: Path) -> None:
    """Removes a file if it is there, and a directory in its place: whoever put that there must not end a training.

    Raises OSError.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError:  # which error it is depends on the system
        if path.is_symlink() or not path.is_dir():
            raise
        with suppress(FileNotFoundError):  # another rank removes it too
            shutil.rmtree(path)


@dataclass(frozen=True)
class JobPaths:
    """Names the files of one job's directory. Touches none of them."""

    directory: Path

    @property
    def slots(self) -> Path:
        """Directory of the free files."""
        return self.directory / "slots"

    @property
    def job(self) -> Path:
        """Record of the job for its agent."""
        return self.directory / "job.json"

    @property
    def nodes(self) -> Path:
        """Record of the nodes of the newest start on several nodes."""
        return self.directory / "nodes.json"

    @property
    def address(self) -> Path:
        """Address on which the agent listens to those of other nodes."""
        return self.directory / "address.json"

    @property
    def fault(self) -> Path:
        """Record of the newest fault."""
        return self.directory / "fault.json"

    @property
    def start(self) -> Path:
        """Record of the newest start on this host."""
        return self.directory / "start.json"

    @property
    def starts(self) -> Path:
        """Record of the newest start's claim and of the starts before it."""
        return self.directory / "starts.json"

    @property
    def gone(self) -> Path:
        """Time at which the last process of a start had ended."""
        return self.directory / "gone.json"

    @property
    def incidents(self) -> Path:
        """Directory of the records of incidents."""
        return self.directory / "incidents"

    @property
    def watch_socket(self) -> Path:
        """Socket on which ranks and agent tell each other of faults."""
        return self.directory / "watch.sock"

    @property
    def agent_lock(self) -> Path:
        """Lock that the agent holds while it lives."""
        return self.directory / "agent.lock"

    @property
    def agent_status(self) -> Path:
        """Newest status of the agent, also after its end."""
        return self.directory / "agent.json"

    @property
    def agent_socket(self) -> Path:
        """Socket on which the agent answers questions."""
        return self.directory / "agent.sock"

    @property
    def agent_log(self) -> Path:
        """Log of the agent."""
        return self.directory / "agent.log"

    def rank_lock(self, rank: int) -> Path:
        """Returns the lock that a rank's trainer holds while it lives."""
        return self._of(rank, "lock")

    def status_page(self, rank: int) -> Path:
        """Returns a rank's status page."""
        return self._of(rank, "status")

    def local_state(self, rank: int, which: str) -> Path:
        """Returns the file of a rank's local state: ``which`` is "0", "1", or "u" for before the newest update."""
        return self._of(rank, f"small-{which}")

    def local_state_plan(self, rank: int) -> Path:
        """Returns the plan that describes a rank's local states."""
        return self._of(rank, "plan")

    def stacks(self, rank: int) -> Path:
        """Returns the stacks of a rank's threads, written at a hang."""
        return self._of(rank, "stacks")

    def flight_record(self, rank: int) -> Path:
        """Returns torch's record of a rank's collectives, written at a hang."""
        return self._of(rank, "flight")

    def _of(self, rank: int, kind: str) -> Path:
        return self.directory / f"rank-{rank:05d}.{kind}"
