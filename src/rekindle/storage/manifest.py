"""Builds and reads the manifest: the document that makes a checkpoint of shards, the same in every store."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rekindle.errors import CorruptError, FormatError
from rekindle.format.completeness import find_defect
from rekindle.format.fields import check_integer
from rekindle.format.lineage import ShardId
from rekindle.format.metric import Metric
from rekindle.format.names import MANIFEST_KIND, receipt_name, shard_name
from rekindle.format.receipt import Receipt, checksum, encode_document, parse_document

__all__ = ["Head", "read_head", "build_manifest", "with_metric"]


_HEAD = ("digest", "stamp", "stamp_digest", "format", "version")
"""Fields of every document, which come before its own."""
_LAST_SECOND = 1 << 37
"""A second in the year 6325, which every calendar function can still show."""


class Head(NamedTuple):
    """The fields of a manifest that a listing needs."""

    stamp: ShardId
    saved_at: float | None
    """Time of writing, in seconds since 1970 by the writer's clock; None where the manifest doesn't say."""
    nbytes: int | None
    """Bytes of all shards; None where the manifest doesn't say."""


def build_manifest(receipts: Sequence[Receipt], stamp: ShardId) -> bytes:
    """Returns the manifest of the checkpoint whose ranks have these ``receipts``, ordered by rank.

    Raises CorruptError when the shards don't make up a whole state.
    """
    strange = [r.stamp for n, r in enumerate(receipts) if (r.stamp.rank, r.stamp.world) != (n, stamp.world)]
    problem = f"a shard belongs to rank {strange[0].rank} of {strange[0].world}" if strange else find_defect(receipts)
    if problem:
        raise CorruptError(f"step {stamp.step} is no whole checkpoint, so it is not published: {problem}")
    body = {
        "saved_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "shards": list(map(_entry, receipts)),
    }
    text = json.dumps(body, separators=(",", ":")).encode()[1:-1]
    whole = ShardId(stamp.step, 0, stamp.world, stamp.incarnation, metric=receipts[0].stamp.metric)
    return encode_document(whole, MANIFEST_KIND, text)


def with_metric(data: bytes, metric: Metric, where: str | os.PathLike[str]) -> bytes:
    """Returns a manifest that says the same and has ``metric``. Raises FormatError when it is damaged or malformed."""
    stamp = read_head(data, where).stamp
    fields = parse_document(data, MANIFEST_KIND, where)
    body = {name: value for name, value in fields.items() if name not in _HEAD}
    text = json.dumps(body, separators=(",", ":")).encode()[1:-1]
    return encode_document(replace(stamp, metric=metric), MANIFEST_KIND, text)


def read_head(data: bytes, where: str | os.PathLike[str]) -> Head:
    """Reads the head of a manifest. Raises FormatError when it is damaged or malformed."""
    fields = parse_document(data, MANIFEST_KIND, where)
    try:
        stamp = ShardId.from_json(fields["stamp"])
        # A damaged number of ranks must not make a reader loop over billions of them.
        if len(fields["shards"]) == stamp.world:
            return Head(stamp, _seconds(fields.get("saved_at")), _size(fields["shards"]))
    except (KeyError, TypeError):
        pass
    raise FormatError(f"{os.fspath(where)}: is not the manifest of a checkpoint")


def _seconds(text: object) -> float | None:
    """Returns an ISO time as seconds since 1970; None for a malformed one, as no part of a checkpoint depends on it."""
    try:
        seconds = datetime.datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds < _LAST_SECOND else None


def _size(shards: Sequence[Any]) -> int | None:
    """Returns the sum of the shards' sizes; None for a malformed one, as no part of a checkpoint depends on it."""
    try:
        return sum(check_integer(entry["bytes"]) for entry in shards)
    except (KeyError, TypeError, ValueError):
        return None


def _entry(receipt: Receipt) -> dict[str, Any]:
    rank, world = receipt.stamp.rank, receipt.stamp.world
    return {
        "file": shard_name(rank, world),
        "bytes": receipt.file_bytes,
        "receipt": receipt_name(rank, world),
        "receipt_checksum": checksum(receipt.raw),
    }
