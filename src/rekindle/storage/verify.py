"""Verifies that a checkpoint is whole and sound. Reads every byte."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from rekindle.errors import CorruptError, FormatError
from rekindle.format.completeness import find_defect
from rekindle.format.fields import check_texts
from rekindle.format.files import Files
from rekindle.format.lineage import ShardId
from rekindle.format.names import MANIFEST, MANIFEST_KIND, receipt_name, shard_name
from rekindle.format.reader import NullSink, ShardReader, read_blocks
from rekindle.format.receipt import checksum, parse_document
from rekindle.format.shard import OpenShard
from rekindle.storage.catalog import STORAGE, StoredCopy
from rekindle.storage.manifest import read_head

__all__ = ["check_manifest", "read_manifest", "verify", "verify_shard"]


def read_manifest(files: Files) -> dict[str, Any]:
    """Returns the manifest of the checkpoint in ``files``.

    Raises CorruptError when it can't be read, or doesn't name exactly the files that a checkpoint has.
    """
    try:
        manifest = parse_document(files.read(MANIFEST), MANIFEST_KIND, files.named(MANIFEST))
    except OSError as error:
        raise CorruptError(f"{files.named(MANIFEST)}: {error.strerror}") from error
    try:
        world = ShardId.from_json(manifest["stamp"]).world
        named = [(entry["file"], entry["receipt"]) for entry in manifest["shards"]]
        check_texts([entry["receipt_checksum"] for entry in manifest["shards"]])
    except FormatError as error:
        raise CorruptError(f"{files.named(MANIFEST)}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{files.named(MANIFEST)}: field {error} is missing or malformed") from error
    expected = [(shard_name(rank, world), receipt_name(rank, world)) for rank in range(world)]
    if named != expected:
        strange = next((a for a, b in zip(named, expected, strict=False) if a != b), "too few or too many files")
        raise CorruptError(f"{files.named(MANIFEST)}: names {strange}, which are not the shards of {world} rank(s)")
    return manifest


def check_manifest(files: Files) -> list[CorruptError]:
    """Returns an error for each defect of a checkpoint's manifest and of the receipts that it names."""
    try:
        manifest = read_manifest(files)
    except CorruptError as error:
        return [error]
    problems = []
    for entry in manifest["shards"]:
        receipt = files.named(entry["receipt"])
        try:
            if checksum(files.read(entry["receipt"])) != entry["receipt_checksum"]:
                problems.append(CorruptError(f"{receipt}: is not the receipt that the manifest names"))
        except OSError as error:
            problems.append(CorruptError(f"{receipt}: {error.strerror}"))
        except CorruptError as error:
            problems.append(error)
    return problems


def verify(copy: StoredCopy, progress: Callable[[int], object] | None = None) -> list[CorruptError]:
    """Returns an error for each defect of one copy of a checkpoint; an empty list when it is sound.

    ``progress`` is given byte counts. Raises FileNotFoundError when the copy is recycled, removed or replaced
    meanwhile.
    """
    problems = check_manifest(copy.files) if copy.place == STORAGE else []
    receipts = []
    for rank in sorted(copy.ranks):
        try:
            with copy.files.shard(rank, copy.world) as shard:
                if shard.receipt.stamp.checkpoint != copy.checkpoint or shard.receipt.stamp.rank != rank:
                    problems.append(CorruptError(f"{shard.path}: belongs to another checkpoint"))
                problems += verify_shard(shard, progress)
                receipts.append(shard.receipt)
        except FileNotFoundError as error:
            if copy.place != STORAGE:
                raise
            problems.append(CorruptError(f"{error.filename}: is missing"))
        except CorruptError as error:
            problems.append(error)
    missing = find_defect(receipts) if len(receipts) == copy.world else None
    if missing:
        problems.append(CorruptError(f"{copy.files}: {missing}"))
    if problems and copy.place == STORAGE and _gone(copy):
        raise FileNotFoundError(errno.ENOENT, "was removed or replaced meanwhile", str(copy.files))
    return problems


def _gone(copy: StoredCopy) -> bool:
    """True if the manifest is gone, or is that of another start, which has saved the step anew."""
    try:
        return read_head(copy.files.read(MANIFEST), copy.files.named(MANIFEST)).stamp.checkpoint != copy.checkpoint
    except FileNotFoundError:
        return True
    except (OSError, FormatError):  # unknown, or damaged: the problem is reported as it was found
        return False


def verify_shard(shard: OpenShard, progress: Callable[[int], object] | None = None) -> list[CorruptError]:
    """Returns an error for the header and for each tensor that differs from its checksums. Takes some MiB of memory.

    ``progress`` is given byte counts.
    """
    reader = ShardReader(shard)
    try:
        bad = [] if reader.header_is_sound() else [-1]
        if progress is not None:
            progress(shard.receipt.header_bytes)
        bad += read_blocks(reader, NullSink(), range(len(shard.receipt.checksums)), progress, to_the_end=True)
    finally:
        reader.close()
    return list({str(error): error for error in map(shard.corruption, bad)}.values())
