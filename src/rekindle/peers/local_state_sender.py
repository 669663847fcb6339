"""Sends the local states of a node's ranks to its partner, as they change."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from rekindle.common.priority import lower_priority
from rekindle.errors import FormatError, RekindleError
from rekindle.format.receipt import read_file
from rekindle.memory.job_dir import JobDir
from rekindle.memory.local_state import local_state_paths
from rekindle.memory.nodes import Nodes
from rekindle.peers.local_states import MOST, describe
from rekindle.peers.wire import Credentials, Link, WireError, connect

__all__ = ["LocalStateSender"]

log = logging.getLogger("rekindle.agent")

_LOOK_EVERY = 0.05
"""Seconds between two looks at the files. A step that ends this short before its node is lost may be lost with it."""
_RATE = 64 << 20
"""Bytes per second, at most, of a network that training needs itself."""
_PATIENCE, _RETRY = 5.0, 0.5
"""Seconds in which the partner must answer, and until the next try if it did not. Steps that are made until then are
lost with this node, so tries never become rare."""

_Mark = tuple[int, int, int]
"""Inode, time and size of a file, which is replaced when it changes."""


class LocalStateSender:
    """Sends the local states of this node's ranks to its partner, until it is closed. Has a thread of its own."""

    def __init__(self, job: JobDir, nodes: Nodes) -> None:
        self._job, self._nodes = job, nodes
        self._partner = nodes.nodes[nodes.partner]
        self._link: Link | None = None
        self._failed = 0
        """Number of failures since the partner last took something."""
        self._seen: dict[int, dict[str, _Mark]] = {}
        """By rank: its files at the last look."""
        self._sent: dict[int, dict[str, _Mark]] = {}
        """By rank: the files that the partner has."""
        self._too_large: set[int] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rekindle-local-states", daemon=True)

    def start(self) -> None:
        """Begins to send, if the partner is in the mesh."""
        if self._partner.port and self._nodes.partner != self._nodes.own:
            self._thread.start()

    def close(self) -> None:
        """Has the thread end soon. What changed last may not have been sent."""
        self._closed.set()

    def _run(self) -> None:
        lower_priority()
        pause = _LOOK_EVERY
        while not self._closed.wait(pause):
            try:
                pause = max(_LOOK_EVERY, self._look() / _RATE)
            except (OSError, RekindleError) as error:
                self._fail(error)
                pause = _RETRY
        self._drop_link()

    def _look(self) -> int:
        """Sends what has changed since the last look. Returns its bytes."""
        total = 0
        for rank in self._nodes.here.ranks:
            paths = local_state_paths(self._job.paths, rank)
            marks = {which: mark for which, mark in ((which, _mark(path)) for which, path in paths.items()) if mark}
            if marks == self._seen.get(rank) or "plan" not in marks:
                continue
            sent = self._sent.setdefault(rank, {})
            files = self._read(rank, {which: paths[which] for which, mark in marks.items() if mark != sent.get(which)})
            if files:
                total += self._send(rank, files, marks)
            self._seen[rank] = marks  # not before: after an error all is sent again
        return total

    def _read(self, rank: int, paths: dict[str, Path]) -> dict[str, bytes]:
        """Returns the files' bytes; nothing if one is too large, or is being replaced."""
        try:
            files = {which: read_file(path) for which, path in paths.items()}
        except (OSError, FormatError):
            return {}
        if all(len(raw) <= MOST for raw in files.values()):
            return files
        if rank not in self._too_large:
            self._too_large.add(rank)
            log.warning(
                "rank %d: its local state, of more than %d MiB, is not kept by another node: if this one is lost, the "
                "job goes back to the newest step on storage",
                *(rank, MOST >> 20),
            )
        return {}

    def _send(self, rank: int, files: dict[str, bytes], marks: dict[str, _Mark]) -> int:
        link = self._connected()
        nbytes = sum(map(len, files.values()))
        sizes = {which: len(raw) for which, raw in files.items()}
        link.send({"verb": "keep", "rank": rank, "files": sizes, "bytes": nbytes})
        for raw in files.values():
            link.send_bytes(raw)
        reply = link.receive(_PATIENCE)
        if "error" in reply:
            raise WireError(str(reply["error"]))
        if reply.get("kept") is True:
            self._sent[rank].update({which: marks[which] for which in files})
        else:
            self._sent[rank].clear()  # the partner has something newer, or lacks the plan
        if self._failed > 1:
            log.info("node %s keeps the local states of this node's ranks again", self._partner.name)
        self._failed = 0
        return nbytes

    def _connected(self) -> Link:
        if self._link is None:
            own, partner = Credentials.of(self._nodes), self._partner
            self._link = connect(partner.host, partner.port, own, _PATIENCE, partner.name)
        return self._link

    def _fail(self, error: Exception) -> None:
        """Begins anew later: the partner may have been replaced. A link that was idle for long may have been closed."""
        if self._failed == 1:
            log.warning(
                "node %s can't keep the local states of this node's ranks, which is tried again: %s",
                *(self._partner.name, describe(error)),
            )
        self._drop_link()
        self._seen.clear()
        self._sent.clear()
        self._failed += 1

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def _mark(path: Path) -> _Mark | None:
    try:
        info = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size
