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
from rekindle.storage.store import Store

__all__ = ["Probe", "judge", "refusal", "warn_of_weakness"]

log = logging.getLogger("rekindle")

_SEE = 20.0
"""Seconds in which a node must see what another one has written: a network file system may look it up again."""
_AGAIN = 0.2
_ANSWER = 10.0
"""Seconds in which storage must take, or refuse, a small file."""
_FOR_GOOD = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
"""Refusals that don't pass by themselves, as a server's or a disk's failure may."""


def refusal(store: Store, sight: Inventory) -> str | None:
    """Why nothing will ever be written to the root, and what to do about it; None where it can be, or nobody knows."""
    if sight.storage_error is not None and sight.errno not in _FOR_GOOD:
        return None  # it doesn't answer, and has been waited for
    try:
        with_timeout(_ANSWER, store.root, store.check_writable)
    except OSError as error:
        if error.errno in _FOR_GOOD:
            return f"{error.filename or store.root}: {describe_error(error)}"
    return None


def warn_of_weakness(store: Store) -> None:
    """Log a promise that the storage turns out not to keep."""
    try:
        weakness = store.capability_warning()
    except OSError as error:
        weakness = f"{store.root}: nothing can be written there: {error.strerror or error}"
    if weakness:
        log.warning("%s", weakness)


class Probe:
    """A small file that rank 0 leaves in the root, for every other node to see."""

    def __init__(self, group: SingleProcess | ProcessGroup, store: Store, places: Sequence[str]) -> None:
        """``places`` has the node of each rank. A collective where there are several."""
        self._group, self._store, self._places = group, store, places
        self.name: str | None = None
        """None where there is one node, or storage didn't take it."""
        if len(set(places)) > 1:
            self.name = group.gather(self._write() if group.rank == 0 else None)[0]

    def _write(self) -> str | None:
        name = f".rekindle-{secrets.token_hex(8)}"
        try:
            with_timeout(_ANSWER, self._store.root, lambda: self._store.write_extra(name, b""))
        except OSError as error:
            log.warning(
                "it can't be seen whether all nodes have one root: %s: %s", self._store.root, describe_error(error)
            )
            return None
        return name

    def problem(self) -> str | None:
        """Why this rank's node doesn't see it; None when it does, and on all but the first rank of each node."""
        place, name = self._places[self._group.rank], self.name
        if name is None or self._places.index(place) != self._group.rank:
            return None
        why, deadline = "", time.monotonic() + _SEE
        while True:
            try:
                if with_timeout(_ANSWER, self._store.root, lambda: self._store.has(name)):
                    return None
            except OSError as error:
                why = f" ({describe_error(error)})"
            if time.monotonic() > deadline:
                host = [self._places[rank].split()[0] for rank in (self._group.rank, 0)]
                return (
                    f"{self._store.root}: node {host[0]} (rank {self._group.rank}) does not see what node {host[1]} "
                    f"(rank 0) has written there{why}: mount the same file system there on all nodes"
                )
            time.sleep(_AGAIN)

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        """All have looked."""
        if self.name is not None and self._group.rank == 0:
            name, self.name = self.name, None
            try:
                with_timeout(_ANSWER, self._store.root, lambda: self._store.take_away(name))
            except OSError as error:
                log.warning("%s is left at %s: %s", name, self._store.root, describe_error(error))


def judge(problems: Sequence[str | None], *, restart: bool, rank: int) -> None:
    """Raise UsageError for the first problem that a rank has with its root.

    In a ``restart``, which has something to go on from in memory, it is a warning: storage may be back soon.
    """
    for problem in dict.fromkeys(filter(None, problems)):
        if not restart:
            raise UsageError(problem)
        if rank == 0:
            log.warning("what is saved stays in memory: %s", problem)
