"""Saves an object at a path: into memory, or straight to the path when memory is full."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from typing import Literal

from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import with_timeout
from rekindle.errors import MemoryStoreError
from rekindle.files.client import the_client, write_in_turn
from rekindle.files.contents import Contents, of_bytes
from rekindle.files.settings import current_settings
from rekindle.format.file_receipt import Terms
from rekindle.memory.files_dir import FilesDir
from rekindle.storage.open import open_place
from rekindle.storage.path_place import PathPlace
from rekindle.storage.place import Place, canonical_target

__all__ = ["canonical_target_within", "save", "save_target", "write_straight"]

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


def save_target(
    target: str,
    contents: Contents,
    *,
    placeholder: bool = False,
    mode: int | None = None,
    terms: Terms = Terms(),  # noqa: B008  never changed
) -> Literal["memory", "storage"]:
    """Saves contents at a canonical target: see ``save``. The file keeps ``mode``, the rights of its placeholder.

    Raises MemoryStoreError, too, for a file that can't be written straight to storage: it is held, or has to wait for
    others.
    """
    try:
        client = the_client()
    except MemoryStoreError as error:
        if terms != Terms():
            raise
        return _write_without_memory(target, contents, error)
    place = client.place(target)
    trace = None
    try:
        trace = with_timeout(_LOOK, target, lambda: _checked(place))
    except TimeoutError as error:
        log.warning("%s: is saved into memory unchecked: %s", target, error)
    stands = placeholder and isinstance(place, PathPlace) and _put_placeholder(place, mode)
    try:
        try:
            client.save(target, contents, trace, terms, placeholder=stands)
            return "memory"
        except MemoryStoreError as error:
            if client.settings.raises_when_full(target) or terms != Terms():
                raise
            log.warning("%s: is written straight to storage, which takes longer: %s", target, error)
            write_in_turn(client.store, place, contents)
            return "storage"
    except BaseException:
        _take_away(place, stands)
        raise


def _put_placeholder(place: PathPlace, mode: int | None) -> bool:
    """Lets a placeholder stand before the file is in memory: the agent, which may be quick, keeps its rights.

    True if it stands. Storage that refuses doesn't keep the file from memory.
    """
    text = f"the file is in the memory of node {os.uname().nodename}, on its way here"
    try:
        return with_timeout(_LOOK, place.target, lambda: place.put_placeholder(text, mode))
    except OSError as error:
        log.warning("%s: has no placeholder until the file arrives: %s", place.target, describe_error(error))
        return False


def _take_away(place: Place, stands: bool) -> None:
    if stands and isinstance(place, PathPlace):
        with suppress(OSError):
            with_timeout(_LOOK, place.target, place.remove_placeholder)


def write_straight(target: str, contents: Contents) -> None:
    """Writes contents to a canonical target, past memory, durable on return. A forked child may, too.

    Raises UsageError, OSError where storage refuses, BusyError while another process writes there.
    """
    store = FilesDir.below(current_settings().base)
    place = open_place(target, store.id() or secrets.token_hex(8))
    place.check()
    if store.kept_path.is_dir():
        write_in_turn(store, place, contents)
    else:
        place.write_stream(contents.chunks(), contents.nbytes)


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
