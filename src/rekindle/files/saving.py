"""Saves an object at a path: into memory, or straight to the path when memory is full."""

from __future__ import annotations

import logging
import os
import secrets
from typing import Literal

from rekindle.common.timeouts import with_timeout
from rekindle.errors import MemoryStoreError
from rekindle.files.client import the_client
from rekindle.files.contents import Contents, of_bytes
from rekindle.files.settings import current_settings
from rekindle.storage.open import open_place
from rekindle.storage.path_place import PathPlace
from rekindle.storage.place import Place, canonical_target

__all__ = ["canonical_target_within", "save", "save_target"]

log = logging.getLogger("rekindle")

_LOOK = 3.0
"""Seconds that storage gets to show what is at a path. A save doesn't need to know."""


def save(obj: object, path: str | os.PathLike[str], *, placeholder: bool = False) -> Literal["memory", "storage"]:
    """Saves ``obj`` as ``torch.save`` does, memory first. Bytes are saved as they are.

    Returns when the bytes are in this node's shared memory, with checksums: the process may be killed from then on.
    The node's agent carries them to ``path``; until then a reader there sees the old file. Of several saves to one path
    the newest wins.

    Args:
        obj: anything that ``torch.save`` takes; ``bytes``, ``bytearray`` or ``memoryview``.
        path: a path, or a file://, s3://, gs:// or az:// URL. Directories that are missing are made.
        placeholder: True lets a small file stand at a new path until the real one arrives, for programs that check
            that it exists.

    Returns:
        "memory", or "storage" when memory was full and the file has been written to its path.

    Raises:
        UsageError: nothing can be saved at ``path``: it is a directory or a link, or this user can't write there; or
            this process is a forked child of one that saves files.
        UnsupportedValueError: tensors share memory under different types.
        MemoryStoreError: memory is full, and ``when_full`` is "error".
        OSError: memory is full, and storage refuses the file.
    """
    target = canonical_target_within(path)
    contents = of_bytes(obj) if isinstance(obj, (bytes, bytearray, memoryview)) else _of_object(obj)
    return save_target(target, contents, placeholder=placeholder)


def _of_object(obj: object) -> Contents:
    from rekindle.files.pickled import of_object  # noqa: PLC0415  brings torch, which bytes don't need

    return of_object(obj)


def canonical_target_within(path: str | os.PathLike[str]) -> str:
    """Returns ``canonical_target``; where storage hangs, without following links."""
    try:
        return with_timeout(_LOOK, str(path), lambda: canonical_target(path))
    except TimeoutError:
        return os.path.abspath(os.path.expanduser(os.fsdecode(path)))


def save_target(target: str, contents: Contents, *, placeholder: bool = False) -> Literal["memory", "storage"]:
    """Saves contents at a canonical target: see ``save``."""
    try:
        client = the_client()
    except MemoryStoreError as error:
        return _write_without_memory(target, contents, error)
    place = client.place(target)
    trace = None
    try:
        trace = with_timeout(_LOOK, target, lambda: _checked(place))
    except TimeoutError as error:
        log.warning("%s: is saved into memory unchecked: %s", target, error)
    try:
        client.save(target, contents, trace)
    except MemoryStoreError as error:
        if client.settings.raises_when_full(target):
            raise
        log.warning("%s: is written straight to storage, which takes longer: %s", target, error)
        client.write(place, contents)
        return "storage"
    if placeholder and isinstance(place, PathPlace):
        place.put_placeholder(f"the file is in the memory of node {os.uname().nodename}, on its way here")
    return "memory"


def _write_without_memory(target: str, contents: Contents, error: MemoryStoreError) -> Literal["storage"]:
    """Writes straight to storage where there is no memory store at all."""
    if current_settings().raises_when_full(target):
        raise error
    log.warning("%s: is written straight to storage, which takes longer: %s", target, error)
    place = open_place(target, secrets.token_hex(8))
    place.check()
    place.write_stream(contents.chunks(), contents.nbytes)
    return "storage"


def _checked(place: Place) -> list[int] | None:
    place.check()
    return place.trace()
