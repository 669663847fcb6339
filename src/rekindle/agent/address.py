"""Shortens addresses of Unix sockets, which have room for about a hundred bytes only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["socket_address"]

_ROOM = 100
"""Most bytes of a path. Linux has room for 107, other systems for a little less."""


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Gives a socket's path a name that fits, to bind or connect to inside of the context.

    The name of a longer path goes through a descriptor of its directory.
    """
    if len(os.fsencode(path)) <= _ROOM:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
