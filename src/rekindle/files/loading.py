"""Loads an object from memory, or from its path, verified."""

from __future__ import annotations

import logging
import mmap
import os
from typing import Any

from rekindle.common.os_errors import describe_error
from rekindle.errors import CorruptError, FormatError, NotFoundError, RekindleError, UsageError
from rekindle.files.copying import CopiedFile, filled_from_file, filled_from_memory
from rekindle.files.finding import find_in_memory
from rekindle.files.saving import canonical_target_within
from rekindle.files.settings import current_settings
from rekindle.files.verifying import VerifiedFile, verify_blocks
from rekindle.format.file_receipt import BYTES
from rekindle.format.torchzip import MAGIC
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import OpenFile
from rekindle.storage.open import open_place
from rekindle.storage.path_place import PathPlace, is_placeholder
from rekindle.storage.place import Place

__all__ = ["load"]

log = logging.getLogger("rekindle")


def load(
    path: str | os.PathLike[str],
    map_location: Any = None,
    weights_only: bool = True,
    *,
    raw: bool = False,
) -> Any:
    """Loads what was saved at ``path``, from this node's memory if it is there, else from the path.

    Memory is compared with its checksums, a file of ``torch.save`` with the CRC-32 that it holds.

    Args:
        path: a path or URL. A link is followed.
        map_location: as for ``torch.load``.
        weights_only: as for ``torch.load``: True runs no code, and raises for values that need it.
        raw: True returns the bytes of the file, whatever they are.

    Returns:
        The object; bytes if it was saved as bytes and this node's memory knows that.

    Raises:
        NotFoundError: there is no such file, or only a placeholder of one.
        FormatError: it is no file of ``torch.save``.
        CorruptError: it is damaged, or cut off.
        UsageError: ``path`` can't name a file, or names a directory.
        OSError: storage refuses or fails.
    """
    target = canonical_target_within(path, follow=True)
    opened = find_in_memory(FilesDir.below(current_settings().base), target)
    if opened is not None:
        with opened:
            whole = opened.map()
            try:
                verify_blocks(opened, whole)
            except CorruptError as error:
                if not opened.file.is_stored():
                    raise CorruptError(f"{error}. What is at the path, if anything, is older") from error
                log.warning("%s; storage is read instead", error)
            else:
                return _load_kept(opened, whole, map_location, weights_only, raw=raw)
    return _load_stored(open_place(target), map_location, weights_only, raw=raw)


def _load_kept(opened: OpenFile, whole: memoryview, map_location: Any, weights_only: bool, *, raw: bool) -> Any:
    if raw or opened.receipt.kind == BYTES:
        return bytes(whole)
    _check_magic(bytes(whole[: len(MAGIC)]), opened.receipt.target)
    with CopiedFile(whole) as file:
        return _torch_load(file, map_location, weights_only)


def _load_stored(place: Place, map_location: Any, weights_only: bool, *, raw: bool) -> Any:
    try:
        if isinstance(place, PathPlace):
            return _load_path(place, map_location, weights_only, raw=raw)
        return _load_object(place, map_location, weights_only, raw=raw)
    except (FileNotFoundError, NotADirectoryError) as error:
        if isinstance(error, NotFoundError):
            raise
        raise NotFoundError(f"{place.target}: there is no such file, and none in this node's memory") from error
    except OSError as error:
        if isinstance(error, RekindleError) or error.errno is None:
            raise
        raise OSError(error.errno, describe_error(error), place.target) from error


def _load_path(place: PathPlace, map_location: Any, weights_only: bool, *, raw: bool) -> Any:
    if os.path.isdir(place.path):
        raise UsageError(f"{place.target}: is a directory, not a file")
    with open(place.open(), "rb") as file:
        fd, nbytes = file.fileno(), os.fstat(file.fileno()).st_size
        _check_head(os.pread(fd, 64, 0), place.target, raw=raw)
        if raw:
            return file.read()
        with VerifiedFile(nbytes, filled_from_file(fd, place.target), place.target, in_memory=False) as checked:
            return _load_checked(checked, map_location, weights_only)


def _load_object(place: Place, map_location: Any, weights_only: bool, *, raw: bool) -> Any:
    nbytes = place.size()
    whole = mmap.mmap(-1, max(nbytes, 1))
    for piece in place.read(0, nbytes):
        whole.write(piece)
    if whole.tell() != nbytes:
        raise CorruptError(f"{place.target}: is cut off: storage gave {whole.tell():,} of {nbytes:,} bytes")
    data = memoryview(whole)[:nbytes]
    _check_head(bytes(data[:64]), place.target, raw=raw)
    if raw:
        return bytes(data)
    with VerifiedFile(nbytes, filled_from_memory(data), place.target, in_memory=True) as checked:
        return _load_checked(checked, map_location, weights_only)


def _load_checked(file: VerifiedFile, map_location: Any, weights_only: bool) -> Any:
    try:
        found = _torch_load(file, map_location, weights_only)
    except Exception:
        if file.damage is not None:
            raise file.damage from None
        raise
    file.verify_rest()
    return found


def _check_head(head: bytes, target: str, *, raw: bool) -> None:
    """Raises for a placeholder and, unless any bytes will do, for what is no file of ``torch.save``."""
    if is_placeholder(head):
        raise NotFoundError(
            f"{target}: is a placeholder of a file that has not arrived: another node's memory has it, or that node "
            "was lost with it"
        )
    if not raw:
        _check_magic(head[: len(MAGIC)], target)


def _check_magic(head: bytes, target: str) -> None:
    if head != MAGIC:
        raise FormatError(
            f"{target}: is no file of torch.save, as torch 1.6 or newer writes it. If it was saved as bytes, "
            "load(path, raw=True) returns them"
        )


def _torch_load(file: Any, map_location: Any, weights_only: bool) -> Any:
    import torch  # noqa: PLC0415  bytes are loaded without it

    return torch.load(file, map_location=map_location, weights_only=weights_only)
