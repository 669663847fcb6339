"""Addresses of sockets, which have room for a short path only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["socket_address"]

_ROOM = 100
"""Bytes of a path. Linux has room for 107, others for a little less."""


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """A name for a socket that fits, to bind or connect to at once: a longer one begins with its directory, open."""
    if len(os.fsencode(path)) <= _ROOM:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
