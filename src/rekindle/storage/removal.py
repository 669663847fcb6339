"""Moves a step's directory aside and removes it, while other processes publish and tidy at the same root."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from rekindle.common.failpoints import reach
from rekindle.errors import FormatError
from rekindle.format.lineage import ShardId
from rekindle.format.names import MANIFEST, PINNED, parse_shard_name, step_dir
from rekindle.format.receipt import read_file
from rekindle.storage import disk
from rekindle.storage.manifest import Head, read_head
from rekindle.storage.pin_file import has_pin

__all__ = ["move_aside", "read_head_in", "read_stamp_in", "remove_step"]

log = logging.getLogger("rekindle")

_HIDDEN = re.compile(rf"\.{re.escape(MANIFEST)}\.[0-9a-f]{{16}}\.tmp\Z")
"""Matches the name of the manifest of a checkpoint that is being removed."""


def read_head_in(path: Path) -> Head | None:
    """Reads the head of a sound manifest; None where there is none.

    A link to a directory elsewhere is no checkpoint of this root. Raises OSError where there may be a manifest and
    it can't be read.
    """
    if path.is_symlink():
        return None
    try:
        return read_head(read_file(path / MANIFEST), path / MANIFEST)
    except (FileNotFoundError, NotADirectoryError, FormatError):
        return None


def read_stamp_in(path: Path) -> ShardId | None:
    """Reads what ``read_head_in`` does, and returns whose checkpoint it is."""
    head = read_head_in(path)
    return None if head is None else head.stamp


def move_aside(root: Path, path: Path, step: int, seen: ShardId | None) -> None:
    """Frees the name of a directory with the manifest ``seen``, or gives it back if it changed since.

    A directory without a manifest is the rest of a removal, and is removed. One whose manifest is damaged is kept
    under another name: a person may still want its shards. So is a file, or what else was put into a directory.
    """
    name = seen.incarnation.id if seen is not None else secrets.token_hex(8)
    aside = root / f"{step_dir(step)}.{name}.retired"
    if aside.exists():  # another publisher was first, so something else may be in its place by now
        aside = root / f"{step_dir(step)}.{secrets.token_hex(8)}.retired"
    try:
        disk.rename(path, aside)
        if read_stamp_in(aside) != seen:
            disk.rename(aside, path)
        elif not (aside / MANIFEST).exists():
            _remove_checkpoint(aside, step)
            if aside.exists():
                log.warning("%s is no checkpoint, and step %d takes its name: it is %s now", path, step, aside)
    except FileNotFoundError:  # another process has freed it
        return
    except OSError as error:  # another process has taken either name
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def remove_step(root: Path, path: Path, step: int, seen: ShardId | None) -> bool:
    """Removes a directory that has the manifest ``seen``, or none. Returns False if it changed, or was pinned.

    It goes under another name, at which no publisher works. Else one that has read the receipts already could
    publish what loses its shards, or put its own checkpoint in the place of the one that goes.
    """
    if not (path.is_symlink() or _holds_ours(path)):
        return False
    aside = root / f"{step_dir(step)}.{secrets.token_hex(8)}.retired"
    goes = False
    try:
        disk.rename(path, aside)
        try:
            changed = has_pin(aside) if seen is not None else (aside / MANIFEST).exists()
            goes = not changed and read_stamp_in(aside) == seen and _remove_checkpoint(aside, step)
        finally:
            if aside.exists():  # it stays, or has files that are not ours
                disk.rename(aside, path)
                disk.sync(root)
    except FileNotFoundError:  # another process was faster
        pass
    except OSError as error:  # another process has taken the name
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    return goes


def _is_ours(name: str) -> bool:
    """True for the name of a file that a step's directory has, other than its manifest, or of one being written."""
    name = name.removeprefix(".")
    return parse_shard_name(name) is not None or name.endswith(".tmp") or name == PINNED


def _holds_ours(path: Path) -> bool:
    """True if ``path`` is a directory that has files of a checkpoint, or none at all."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not names or any(name == MANIFEST or _is_ours(name) for name in names)


def _remove_checkpoint(directory: Path, step: int) -> bool:
    """Removes a checkpoint, manifest first. Foreign files are left alone. Returns False if it stays: see below.

    A file that has a directory's name is such a one.
    """
    if directory.is_symlink():
        disk.unlink(directory)  # its target is not ours to empty
        return True
    if not _remove_manifest(directory):
        return False
    try:
        reach("drain.prune", step)
        for path in directory.iterdir():
            if _is_ours(path.name) and not path.is_dir():
                disk.unlink(path)
        disk.rmdir(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    return True


def _remove_manifest(directory: Path) -> bool:
    """Removes the manifest, so that no moment shows a damaged checkpoint. Returns False if it stays, as there is a pin.

    Also False if another process has the directory now, or it is none. The manifest is hidden before the last look for
    a pin: who pins looks for the manifest afterwards, so one of the two sees the other. One that a killed process has
    hidden is shown again where there is a pin. Of who shows it and who removes it, one finds it.
    """
    try:
        with suppress(FileNotFoundError):
            disk.rename(directory / MANIFEST, directory / f".{MANIFEST}.{secrets.token_hex(8)}.tmp")
        names = os.listdir(directory)
        stays = False
        for name in filter(_HIDDEN.match, names):
            stays = PINNED in names
            disk.rename(directory / name, directory / (MANIFEST if stays else f".{MANIFEST}.tmp"))
        disk.sync(directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not stays
