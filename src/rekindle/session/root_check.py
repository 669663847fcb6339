"""Checks at a start that the root can be written to, and that all nodes see one and the same."""

from __future__ import annotations

import errno
import logging
import secrets
import time
from collections.abc import Sequence

from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import with_timeout
from rekindle.errors import UsageError
from rekindle.session.group import ProcessGroup, SingleProcess
from rekindle.session.inventory import Inventory
from rekindle.storage.claims import describe_obstacle
from rekindle.storage.store import Store

__all__ = ["RootProbe", "find_refusal", "refuse_root", "warn_of_capability"]

log = logging.getLogger("rekindle")

_VISIBLE_WITHIN = 20.0
"""Seconds in which a node must see what another one has written: a network file system may look it up again."""
_LOOK_EVERY = 0.2
_ANSWER = 10.0
"""Seconds in which storage must take, or refuse, a small file."""
_PERMANENT = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
"""Refusals that don't pass by themselves, as a server's or a disk's failure may."""


def find_refusal(store: Store, inventory: Inventory) -> str | None:
    """Returns why nothing will ever be written to the root, and what to do; None where it can be, or nobody knows."""
    if inventory.storage_error is not None and inventory.errno not in _PERMANENT:
        return None  # it doesn't answer, and has been waited for
    try:
        with_timeout(_ANSWER, store.root, store.check_writable)
        return with_timeout(_ANSWER, store.root, lambda: describe_obstacle(store))
    except OSError as error:
        if error.errno in _PERMANENT:
            return f"{error.filename or store.root}: {describe_error(error)}"
    return None


def refuse_root(problems: Sequence[str | None], *, restart: bool, rank: int) -> None:
    """Raises UsageError for the first problem that a rank has with its root.

    In a ``restart``, which has something to go on from in memory, it is a warning: storage may be back soon.
    """
    for problem in dict.fromkeys(filter(None, problems)):
        if not restart:
            raise UsageError(problem)
        if rank == 0:
            log.warning("saves stay in memory until storage takes them: %s", problem)


def warn_of_capability(store: Store) -> None:
    """Logs a promise that the storage turns out not to keep."""
    try:
        warning = store.capability_warning()
    except OSError as error:
        warning = f"{store.root}: nothing can be written there: {error.strerror or error}"
    if warning:
        log.warning("%s", warning)


class RootProbe:
    """A small file that rank 0 puts into the root, for every other node to see. Use as a context."""

    def __init__(self, group: SingleProcess | ProcessGroup, store: Store, nodes: Sequence[str]) -> None:
        """``nodes`` has the node of each rank. A collective where there are several."""
        self._group, self._store, self._nodes = group, store, nodes
        self.name: str | None = None
        """None where there is one node, or storage didn't take the file."""
        if len(set(nodes)) > 1:
            self.name = group.gather(self._write() if group.rank == 0 else None)[0]

    def _write(self) -> str | None:
        name = f".rekindle-{secrets.token_hex(8)}"
        try:
            with_timeout(_ANSWER, self._store.root, lambda: self._store.write_extra(name, b""))
        except OSError as error:
            log.warning(
                "not checked that all nodes have one root, for no file can be written to it: %s: %s",
                *(self._store.root, describe_error(error)),
            )
            return None
        return name

    def problem(self) -> str | None:
        """Returns why this rank's node doesn't see the file; None when it does, and on all but one rank of each
        node."""
        node, name = self._nodes[self._group.rank], self.name
        if name is None or self._nodes.index(node) != self._group.rank:
            return None
        why, deadline = "", time.monotonic() + _VISIBLE_WITHIN
        while True:
            try:
                if with_timeout(_ANSWER, self._store.root, lambda: self._store.has(name)):
                    return None
            except OSError as error:
                why = f" ({describe_error(error)})"
            if time.monotonic() > deadline:
                host = [self._nodes[rank].split()[0] for rank in (self._group.rank, 0)]
                return (
                    f"{self._store.root}: node {host[0]} (rank {self._group.rank}) does not see what node {host[1]} "
                    f"(rank 0) has written there{why}: mount the same file system there on all nodes"
                )
            time.sleep(_LOOK_EVERY)

    def __enter__(self) -> RootProbe:
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the file: all nodes have looked."""
        if self.name is not None and self._group.rank == 0:
            name, self.name = self.name, None
            try:
                with_timeout(_ANSWER, self._store.root, lambda: self._store.take_away(name))
            except OSError as error:
                log.warning("%s stays at %s and can be removed: %s", name, self._store.root, describe_error(error))
