"""Saves an object at a path: into memory, or straight to the path when memory is full."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import with_timeout
from rekindle.errors import MemoryStoreError
from rekindle.files.client import the_client, write_in_turn
from rekindle.files.contents import Contents, of_bytes
from rekindle.files.settings import current_settings
from rekindle.files.telling import tell_of_saved
from rekindle.format.file_receipt import Terms
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import key_of
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
            that it exists. A save counts on the one of a save before in any case.

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


def canonical_target_within(path: str | os.PathLike[str], *, follow: bool = False) -> str:
    """Returns ``canonical_target``; where storage hangs, without following links.

    ``follow``: True follows a link at the path itself, too, as a reader does.
    """

    def look() -> str:
        target = canonical_target(path)
        return os.path.realpath(target) if follow and "://" not in target and os.path.islink(target) else target

    try:
        return with_timeout(_LOOK, str(path), look)
    except TimeoutError:
        return canonical_target(path, resolve=False)


def save_target(
    target: str,
    contents: Contents,
    *,
    placeholder: bool = False,
    mode: int | None = None,
    terms: Terms = Terms(),  # noqa: B008  never changed
) -> Literal["memory", "storage"]:
    """Saves contents at a canonical target: see ``save``. ``mode``: rights of a new file, by default as of any other.

    Raises MemoryStoreError, too, for a file that can't be written straight to storage: it is held, or has to wait for
    others.
    """
    where = _save_first_to_memory(target, contents, placeholder=placeholder, mode=mode, terms=terms)
    tell_of_saved(target)
    return where


def _save_first_to_memory(
    target: str, contents: Contents, *, placeholder: bool, mode: int | None, terms: Terms
) -> Literal["memory", "storage"]:
    try:
        client = the_client()
    except MemoryStoreError as error:
        if terms != Terms():
            raise
        return _write_without_memory(target, contents, error, mode)
    place = client.place(target)
    place.mode = _mode_of_new_files() if mode is None else mode
    trace, made, stands = None, False, None
    try:
        trace, made, stands = with_timeout(_LOOK, target, lambda: _checked(place, placeholder=placeholder))
    except OSError as error:
        log.warning("%s: is saved into memory unchecked: %s", target, describe_error(error))
    try:
        try:
            client.save(target, contents, trace, terms, placeholder=stands, mode=place.mode)
            return "memory"
        except MemoryStoreError as error:
            if client.settings.raises_when_full(target) or terms != Terms():
                raise
            log.warning("%s: is written straight to storage, which takes longer: %s", target, error)
            write_in_turn(client.store, place, contents)
            return "storage"
    except BaseException:
        if (
            made and stands and client.store.kept.find(key_of(target)) is None
        ):  # else another thread's save counts on it
            _take_away(client.store, place, stands)
        raise


def _checked(place: Place, *, placeholder: bool) -> tuple[list[int] | None, bool, str | None]:
    """Checks a place, and lets a placeholder stand there if it is to: before the file is in memory, as an agent that is
    quick keeps its rights.

    Returns (trace, True if one was made, mark of the one that stands now: that of another save, too). Raises UsageError
    where no file can be put, OSError where storage doesn't show what is there. One that refuses a placeholder doesn't
    keep the file from memory.
    """
    place.check()
    trace = place.trace()
    if not isinstance(place, PathPlace):
        return trace, False, None
    text, mark = f"the file is in the memory of node {os.uname().nodename}, on its way here", secrets.token_hex(8)
    try:
        if placeholder and place.put_placeholder(text, mark):
            return trace, True, mark
    except OSError as error:
        log.warning("%s: has no placeholder until the file arrives: %s", place.target, describe_error(error))
    return trace, False, place.standing()


def _take_away(store: FilesDir, place: Place, mark: str) -> None:
    if isinstance(place, PathPlace):
        with suppress(OSError):  # memory may be full
            store.kept.note_placed(key_of(place.target), mark)  # another thread's save may be about to count on it
        with suppress(OSError):
            with_timeout(_LOOK, place.target, lambda: place.remove_placeholder(mark))


def write_straight(target: str, contents: Contents) -> None:
    """Writes contents to a canonical target, past memory, durable on return. A forked child may, too.

    Raises UsageError, OSError where storage refuses, BusyError while another process writes there.
    """
    store = FilesDir.below(current_settings().base)
    place = open_place(target, store.id() or secrets.token_hex(8))
    place.mode = _mode_of_new_files()
    place.check()
    if store.kept_path.is_dir():
        write_in_turn(store, place, contents)
    else:
        place.write_stream(contents.chunks(), contents.nbytes)
    tell_of_saved(target)


def _write_without_memory(
    target: str, contents: Contents, error: MemoryStoreError, mode: int | None
) -> Literal["storage"]:
    """Writes straight to storage where there is no memory store at all."""
    if current_settings().raises_when_full(target):
        raise error
    log.warning("%s: is written straight to storage, which takes longer: %s", target, error)
    place = open_place(target, secrets.token_hex(8))
    place.mode = _mode_of_new_files() if mode is None else mode
    place.check()
    place.write_stream(contents.chunks(), contents.nbytes)
    return "storage"


def _mode_of_new_files() -> int:
    """Returns the rights that this process gives a new file: the agent, which writes it, may have another umask."""
    try:
        status = Path("/proc/self/status").read_bytes()
        mask = int(status.partition(b"\nUmask:")[2].split(maxsplit=1)[0], 8)
    except (OSError, ValueError, IndexError):
        mask = os.umask(0o077)  # of all threads, for a moment
        os.umask(mask)
    return 0o666 & ~mask
