"""Keeps connections to other nodes while nobody reads them."""

from __future__ import annotations

import threading

from rekindle.peers.wire import Link

__all__ = ["Links"]


class Links:
    """Holds idle connections, each for an owner: what it was made for. Safe to use from any thread.

    The oldest are closed when there are many: a rank that reads in a hundred shards would else have a hundred of them,
    and each costs the other node a thread.
    """

    def __init__(self, most: int) -> None:
        """``most`` is the number of connections that may lie idle."""
        self._most = most
        self._lock = threading.Lock()
        self._idle: list[tuple[object, Link]] = []

    def put(self, owner: object, link: Link) -> None:
        """Keeps a connection until it is taken."""
        with self._lock:
            self._idle.append((owner, link))
            extra = self._idle[: -self._most]
            del self._idle[: -self._most]
        for _, oldest in extra:
            oldest.close()

    def take(self, owner: object) -> Link | None:
        """Returns one of an owner's connections, which is no longer kept; None if there is none."""
        with self._lock:
            for at, (one, link) in enumerate(self._idle):
                if one == owner:
                    del self._idle[at]
                    return link
        return None

    def close(self) -> None:
        """Closes all connections that lie idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, link in idle:
            link.close()
