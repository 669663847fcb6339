"""Brings files from storage into memory, ahead of a restart that loads them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rekindle.errors import CorruptError, NotFoundError, UsageError
from rekindle.files.client import Client, the_client
from rekindle.files.contents import Contents, Segment
from rekindle.files.copying import filled_from_memory
from rekindle.files.finding import find_in_memory
from rekindle.files.saving import canonical_target_within
from rekindle.files.verifying import VerifiedFile
from rekindle.format.file_receipt import FOUND
from rekindle.format.torchzip import MAGIC
from rekindle.storage.open import open_place
from rekindle.storage.path_place import PathPlace, is_placeholder
from rekindle.storage.place import Place

__all__ = ["preload"]


def preload(*paths: str | os.PathLike[str]) -> None:
    """Brings files into this node's memory, verified, and returns when they are there. One that is there is left alone.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: a file is damaged, or changes while it is read.
        MemoryStoreError: memory is full.
        UsageError: a path can't name a file, or names a directory.
        OSError: storage refuses or fails.
    """
    client = the_client()
    for path in paths:
        target = canonical_target_within(path, follow=True)
        opened = find_in_memory(client.store, target)
        if opened is not None:
            opened.close()
        else:
            _bring(client, open_place(target))


def _bring(client: Client, place: Place) -> None:
    if isinstance(place, PathPlace) and place.path.is_dir():
        raise UsageError(f"{place.target}: is a directory, not a file")
    identity = place.identify()
    if identity is None:
        raise NotFoundError(f"{place.target}: there is no such file")
    nbytes = place.size()

    def put(view: memoryview) -> None:
        _read_into(view, place.read(0, nbytes), place.target)
        if is_placeholder(bytes(view[:64])):
            raise NotFoundError(f"{place.target}: is a placeholder of a file that has not arrived")
        if view[: len(MAGIC)] == MAGIC:
            with VerifiedFile(nbytes, filled_from_memory(view), place.target, in_memory=True) as file:
                file.verify_rest()
        if place.identify() != identity:
            raise CorruptError(f"{place.target}: was replaced while it was read: try again")

    client.keep(place.target, Contents(FOUND, nbytes, [Segment(0, nbytes, 0, place, put)]), None, identity)


def _read_into(view: memoryview, pieces: Iterator[memoryview], target: str) -> None:
    at = 0
    for piece in pieces:
        view[at : at + len(piece)] = piece
        at += len(piece)
    if at != len(view):
        raise CorruptError(f"{target}: is cut off: storage gave {at:,} of {len(view):,} bytes")
