"""Keeps local states of other nodes' ranks, gives them back, and finds the newest ones when ranks begin.

A rank's local state is what no other rank has, so it must outlive the rank's node: the agent there sends it to the
partner's (``rekindle.peers.local_state_sender``), which keeps it in ``others/`` under the names that it had. At the
next start all nodes tell what they have, and a rank whose own node has less than another one fetches that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rekindle.errors import FormatError, RekindleError
from rekindle.format.fields import check_integer
from rekindle.format.names import MAX_RANKS
from rekindle.memory.job_dir import JobDir
from rekindle.memory.local_state import (
    LocalFiles,
    decode_local_state,
    decode_local_state_plan,
    local_state_paths,
    read_local_bytes,
    read_local_files,
    replace_file,
)
from rekindle.memory.nodes import Node, Nodes
from rekindle.memory.paths import LOCAL_STATE_PLANS, JobPaths, matching, rank_of
from rekindle.peers.server import Handler
from rekindle.peers.wire import Credentials, Link, WireError, call, connect

__all__ = ["MOST", "Kept", "ask_for_files", "bring_local_state", "describe", "kept_local_states"]
__all__ += ["local_state_handlers", "take_kept_local_state"]

log = logging.getLogger("rekindle")

MOST = 8 << 20
"""Bytes of a file, at most. Larger local states stay on their node: to send them at each step would slow training."""
_PATIENCE = 5.0
"""Seconds in which another node must answer."""

Kept = tuple[int, int, bool]
"""Generation and step of the newest local state that a node has of a rank, and True if it lies where ranks look."""


# -- on the node that keeps them ---------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """The kept files of a rank, in short: a plan may describe thousands of tensors."""

    plan: str
    """Digest of the plan."""
    nbytes: int
    """Bytes of the tensors in a local state."""
    newest: tuple[int, int]
    """Generation and step of the newest local state."""


class _Keeper:
    """Keeps the local states that other nodes send. Safe to use from any thread."""

    def __init__(self, job: JobDir, nodes: Callable[[], Nodes | None]) -> None:
        self._job, self._nodes = job, nodes
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}
        self._tidy_start = ""
        """Start in which the files of ranks that are sent elsewhere now were removed."""

    def keep(self, link: Link, message: dict[str, Any]) -> dict[str, Any]:
        """Keeps files of a rank that have changed. Answers False if they say nothing new."""
        rank = check_integer(message.get("rank"), 0, MAX_RANKS - 1)
        files = _receive(link, message)
        nodes = self._nodes()
        if nodes is None or not any(node.name == link.peer and rank in node.ranks for node in nodes.nodes):
            raise WireError(f"rank {rank} is not on node {link.peer}")
        with self._lock:
            kept = self._keep(rank, files, nodes.start)
            if kept and "plan" not in files and self._tidy_start != nodes.start:  # the start has made two steps
                self._tidy_start = nodes.start
                self._tidy(nodes)
        return {"kept": kept}

    def _keep(self, rank: int, files: dict[str, bytes], start: str) -> bool:
        """Replaces what is kept, unless ``files`` are of an older start, or fit no plan, or training has made none."""
        known = self._known.get(rank) or self._read(rank)
        digest, nbytes = (known.plan, known.nbytes) if known is not None else ("", 0)
        if "plan" in files:
            plan = decode_local_state_plan(files["plan"], f"plan of rank {rank}")
            digest, nbytes = plan.digest, plan.nbytes
        states = {which: decode_local_state(files[which], rank, f"rank {rank}") for which in files if which != "plan"}
        unfit = {which for which, state in states.items() if (state.plan, len(state.tensors)) != (digest, nbytes)}
        if not unfit <= {"u"}:
            return False
        made = [state.stamp for which, state in states.items() if which != "u" and state.made]
        ages = [(stamp.incarnation.generation, stamp.step) for stamp in made]
        newest = max(ages, default=known.newest if known is not None and known.plan == digest else None)
        present = any(stamp.incarnation.id == start for stamp in made)
        if newest is None or (known is not None and newest[0] < known.newest[0] and not present):
            return False
        self._job.others.directory.mkdir(mode=0o700, exist_ok=True)
        self._known.pop(rank, None)  # until all is written
        _put(self._job.others, rank, {which: raw for which, raw in files.items() if which not in unfit})
        self._known[rank] = _Known(digest, nbytes, newest)
        return True

    def _read(self, rank: int) -> _Known | None:
        """Returns what an earlier agent of this node has kept."""
        with suppress(FormatError):
            files = read_local_files(self._job.others, rank)
            if files is not None and files.newest is not None:
                return _Known(files.plan.digest, files.plan.nbytes, files.newest)
        return None

    def _tidy(self, nodes: Nodes) -> None:
        """Removes the files of ranks whose node sends them elsewhere now."""
        sender = nodes.nodes[(nodes.own - len(nodes.nodes) // 2) % len(nodes.nodes)]
        for path in matching(self._job.others.directory, LOCAL_STATE_PLANS):
            rank = rank_of(path)
            if rank not in sender.ranks:
                self._known.pop(rank, None)
                for file in local_state_paths(self._job.others, rank).values():
                    file.unlink(missing_ok=True)

    def give(self, link: Link, message: dict[str, Any]) -> None:
        """Sends the newest files that this node has of a rank; none if it has none."""
        rank = check_integer(message.get("rank"), 0, MAX_RANKS - 1)
        found = max(_places(self._job), key=lambda paths: _newest(paths, rank) or (-1, -1))
        files = {which: raw for which, raw in read_local_bytes(found, rank).items() if len(raw) <= MOST}
        link.send({"files": {which: len(raw) for which, raw in files.items()}, "bytes": sum(map(len, files.values()))})
        for raw in files.values():
            link.send_bytes(raw)


def local_state_handlers(job: JobDir, nodes: Callable[[], Nodes | None]) -> dict[str, Handler]:
    """Returns the handlers of the verbs "keep" and "kept". ``nodes`` returns those of the present start."""
    keeper = _Keeper(job, nodes)
    return {"keep": keeper.keep, "kept": keeper.give}


def _places(job: JobDir) -> list[JobPaths]:
    """Returns the names of the node's own ranks' files, and of those that it keeps."""
    return [job.paths, job.others]


def _newest(paths: JobPaths, rank: int) -> tuple[int, int] | None:
    try:
        files = read_local_files(paths, rank)
    except FormatError:
        return None
    return files.newest if files is not None else None


def _put(paths: JobPaths, rank: int, files: Mapping[str, bytes]) -> None:
    """Replaces files of a rank. The plan comes last, and takes those along that are not of it."""
    places = local_state_paths(paths, rank)
    for which in sorted(files, key=lambda which: which == "plan"):
        replace_file(places[which], [files[which]])
    if "plan" in files:
        for which in places.keys() - files.keys():
            places[which].unlink(missing_ok=True)


def _receive(link: Link, message: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the files that a message announces. Raises WireError for nonsense."""
    try:
        sizes = {which: check_integer(size, 0, MOST) for which, size in message["files"].items()}
    except (AttributeError, KeyError, ValueError) as error:
        raise WireError(f"the files of a local state make no sense: {error}") from error
    if not sizes.keys() <= {"plan", "0", "1", "u"} or message.get("bytes", 0) != sum(sizes.values()):
        raise WireError("the files of a local state make no sense")
    files = {}
    for which, size in sizes.items():
        raw = bytearray(size)
        link.receive_into(memoryview(raw))
        files[which] = bytes(raw)
    return files


# -- on the node where a rank begins -----------------------------------------------------------------------------------


def kept_local_states(job: JobDir) -> dict[int, Kept]:
    """Returns, by rank, the newest local state that this node has of it, also for a rank of another node."""
    found: dict[int, Kept] = {}
    for paths in _places(job):
        for rank in map(rank_of, matching(paths.directory, LOCAL_STATE_PLANS)):
            newest = _newest(paths, rank)
            if newest is not None:
                found[rank] = max(found.get(rank, (-1, -1, False)), (*newest, paths == job.paths))
    return found


def bring_local_state(job: JobDir, rank: int, nodes: Nodes, kept: Sequence[Mapping[int, Kept]]) -> None:
    """Puts the newest local state of ``rank`` where it looks for its own, if another node has a newer one.

    ``kept`` has the ``kept_local_states`` of each node, in the order of ``nodes``. The caller holds the rank's lock.
    A failure is logged.
    """
    holder = _find_holder(rank, nodes, kept)
    if holder is None:
        return
    node = nodes.nodes[holder]
    try:
        files = read_local_bytes(job.others, rank) if holder == nodes.own else ask_for_files(nodes, node, rank)
        if LocalFiles.decode(files, rank, node.name) is None:
            raise WireError("it has none any more")
        _put(job.paths, rank, files)
    except (OSError, RekindleError) as error:
        log.warning(
            "the newest local state of rank %d can't be had from node %s, so the job may go on from an older step: %s",
            *(rank, node.name, describe(error)),
        )


def take_kept_local_state(job: JobDir, rank: int) -> None:
    """Puts the newest local state of ``rank`` where it looks for its own, if this node has kept it for another one.

    For a start on one node, whose ranks may have been on several. The caller holds the rank's lock. A failure is
    logged.
    """
    kept = _newest(job.others, rank)
    if kept is None or kept <= (_newest(job.paths, rank) or (-1, -1)):
        return
    try:
        _put(job.paths, rank, read_local_bytes(job.others, rank))
    except (OSError, FormatError) as error:
        log.warning(
            "the newest local state of rank %d, which this node has kept, can't be had: %s", rank, describe(error)
        )


def _find_holder(rank: int, nodes: Nodes, kept: Sequence[Mapping[int, Kept]]) -> int | None:
    """Returns the number of the node that has the newest; None if there is none, or it lies where it should."""
    found = {n: has[rank] for n, has in enumerate(kept) if rank in has and (nodes.nodes[n].port or n == nodes.own)}
    best = max(found, key=lambda n: (found[n][:2], n == nodes.own), default=nodes.own)
    return None if best not in found or (best == nodes.own and found[best][2]) else best


def ask_for_files(nodes: Nodes, node: Node, rank: int, patience: float = _PATIENCE) -> dict[str, bytes]:
    """Returns the newest files that another node has of a rank. Raises OSError or WireError.

    The connection, and then the answer, get ``patience`` seconds each.
    """
    link = connect(node.host, node.port, Credentials.of(nodes), patience, node.name)
    try:
        return _receive(link, call(link, {"verb": "kept", "rank": rank}, patience))
    finally:
        link.close()


def describe(error: Exception) -> str:
    """Returns why another node could not be asked, in the system's words, which are advice enough."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
