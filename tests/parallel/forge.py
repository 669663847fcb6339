"""Ways in which a checkpoint on storage is not what it says: things gone, things from elsewhere, and sealed lies."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle.format.lineage import ShardId
from rekindle.format.names import MANIFEST, receipt_name, shard_name
from rekindle.format.receipt import checksum, encode_document

__all__ = ["FORGERIES", "Place"]

Fields = dict[str, Any]
TENSOR = "model.blocks.0.up.weight"
"""18 rows, of which each of two ranks has 9."""
KEPT = "optimizer.state.blocks.0.up.weight.exp_avg"
"""Of the same shape; nothing in a new job has that yet."""


class Place:
    """A checkpoint of two ranks to be spoilt, one of another run of the same shape, and a file of no business to us."""

    def __init__(self, directory: Path, other: Path, secret: Path) -> None:
        self.directory, self.other, self.secret = directory, other, secret

    def receipt(self, rank: int = 1) -> Path:
        return self.directory / receipt_name(rank, 2)

    def shard(self, rank: int = 1) -> Path:
        return self.directory / shard_name(rank, 2)

    @property
    def manifest(self) -> Path:
        return self.directory / MANIFEST

    def lie(self, change: Callable[[Fields], object], rank: int = 1) -> None:
        """Change a receipt, and seal it and the manifest so that all digests are right."""
        _reseal(self.receipt(rank), change)
        self.admit()

    def lie_of(self, change: Callable[[Fields], object], rank: int = 1, name: str = TENSOR) -> None:
        """Change what a receipt says of one tensor."""
        self.lie(lambda fields: change(next(c for c in fields["tensors"] if c["name"] == name)), rank)

    def admit(self) -> None:
        """Let the manifest say of the receipts what they are."""

        def change(fields: Fields) -> None:
            for entry in fields["shards"]:
                entry["receipt_checksum"] = checksum((self.directory / entry["receipt"]).read_bytes())

        _reseal(self.manifest, change)

    def declare(self, change: Callable[[Fields], object]) -> None:
        """Change the manifest."""
        _reseal(self.manifest, change)


def _reseal(path: Path, change: Callable[[Fields], object]) -> None:
    fields = json.loads(path.read_bytes())
    stamp = ShardId.from_json(fields.pop("stamp"))
    kind = fields.pop("format")
    for key in ("digest", "stamp_digest", "version"):
        del fields[key]
    change(fields)
    path.write_bytes(encode_document(stamp, kind, json.dumps(fields).encode()[1:-1]))


def _from_elsewhere(place: Place) -> None:
    for name in (receipt_name(1, 2), shard_name(1, 2)):
        shutil.copy(place.other / name, place.directory / name)


def _from_elsewhere_admitted(place: Place) -> None:
    _from_elsewhere(place)
    place.admit()


def _name_in_manifest(key: str, value: Callable[[Place], str]) -> Callable[[Place], None]:
    return lambda place: place.declare(lambda fields: fields["shards"][1].update({key: value(place)}))


def _linked(path: Callable[[Place], Path]) -> Callable[[Place], None]:
    """The file itself, moved outside and linked to: its bytes are right, its place is not."""

    def forge(place: Place) -> None:
        outside = place.secret.parent / path(place).name
        shutil.move(path(place), outside)
        path(place).symlink_to(outside)

    return forge


def _without_a_row(chunk: Fields) -> None:
    chunk["offsets"][0] -= 1


def _of_shape(*shape: int) -> Callable[[Fields], None]:
    return lambda chunk: chunk.update(global_shape=list(shape))


def _nested(fields: Fields) -> None:
    node: Any = {"$value": 0}
    for _ in range(900):
        node = [node]
    fields["structure"]["notes"] = {"rank": node, "seen": {"$value": 0}}


def _both(change: Callable[[Fields], None], name: str = TENSOR) -> Callable[[Place], None]:
    def forge(place: Place) -> None:
        for rank in (0, 1):
            place.lie_of(change, rank, name)

    return forge


def _all(change: Callable[[Fields], object]) -> Callable[[Place], None]:
    def forge(place: Place) -> None:
        for rank in (0, 1):
            place.lie(change, rank)

    return forge


def _up(place: Place, path: Path) -> str:
    return os.path.relpath(path, place.directory)


FORGERIES: dict[str, tuple[Callable[[Place], object], str]] = {
    "a shard is gone": (lambda place: place.shard().unlink(), "shard-00001-of-00002.safetensors"),
    "a receipt is gone": (lambda place: place.receipt().unlink(), "shard-00001-of-00002.json"),
    "a shard is cut short": (lambda place: os.truncate(place.shard(), 5000), "shard-00001-of-00002"),
    "a shard is empty": (lambda place: os.truncate(place.shard(), 0), "shard-00001-of-00002"),
    "a shard and its receipt are another run's": (_from_elsewhere, "shard-00001-of-00002"),
    "and the manifest admits them": (_from_elsewhere_admitted, "belongs to another"),
    "a receipt is another rank's": (
        lambda place: (shutil.copy(place.receipt(0), place.receipt(1)), place.admit()),
        "shard-00001-of-00002",
    ),
    "one rank's receipt lies about a shape": (lambda place: place.lie_of(_of_shape(19, 24)), TENSOR),
    "all receipts lie about a shape": (_both(_of_shape(20, 24)), TENSOR),
    "a shape of too few dimensions": (_both(lambda c: c.update(global_shape=[18 * 24])), TENSOR),
    "a shape that no memory holds": (_both(_of_shape(1 << 50, 24)), TENSOR),
    "a shape of numbers that no machine has": (_both(_of_shape(10**30, 24)), TENSOR),
    "an optimizer's shape that no memory holds": (_both(_of_shape(1 << 50, 24), KEPT), KEPT),
    "an optimizer's shape of no machine's numbers": (_both(_of_shape(10**30, 24), KEPT), KEPT),
    "an optimizer's shape that is not its parameter's": (_both(_of_shape(18, 25), KEPT), KEPT),
    "a negative shape": (_both(_of_shape(-18, 24)), TENSOR),
    "a dtype of another width": (lambda place: place.lie_of(lambda c: c.update(dtype="float64")), TENSOR),
    "a dtype of the same width": (_both(lambda c: c.update(dtype="int32")), TENSOR),
    "a dtype that there is not": (lambda place: place.lie_of(lambda c: c.update(dtype="float33")), TENSOR),
    "a box that overlaps another and leaves a gap": (lambda place: place.lie_of(_without_a_row), TENSOR),
    "a box outside of the tensor": (lambda place: place.lie_of(lambda c: c.update(offsets=[10, 0])), TENSOR),
    "a box at a negative place": (lambda place: place.lie_of(lambda c: c.update(offsets=[-9, 0])), TENSOR),
    "a tensor is called otherwise": (lambda place: place.lie_of(lambda c: c.update(name="model.other")), TENSOR),
    "bytes beyond the end of the file": (
        lambda place: place.lie_of(lambda c: c.update(range=[1 << 40, (1 << 40) + 864])),
        "shard-00001-of-00002",
    ),
    "bytes of another tensor": (lambda place: place.lie_of(lambda c: c.update(range=[0, 864])), "shard-00001-of-00002"),
    "a header longer than the file": (
        lambda place: place.lie(lambda f: f["shard"].update(header_bytes=1 << 40)),
        "shard-00001-of-00002",
    ),
    "tensors that are no list": (lambda place: place.lie(lambda f: f.update(tensors=7)), "shard-00001-of-00002"),
    "values that are too few": (_all(lambda f: f.update(values=[])), "shard-0000"),
    "a structure that is none": (_all(lambda f: f.update(structure=[1, 2])), "shard-0000"),
    "a structure nested beyond reason": (_all(_nested), "shard-0000"),
    "the manifest names a receipt outside": (
        _name_in_manifest("receipt", lambda place: _up(place, place.secret)),
        "checkpoint.json",
    ),
    "by an absolute path": (_name_in_manifest("receipt", lambda place: str(place.secret)), "checkpoint.json"),
    "the manifest names a shard outside": (
        _name_in_manifest("file", lambda place: _up(place, place.secret)),
        "checkpoint.json",
    ),
    "the manifest names a receipt of no text": (_name_in_manifest("receipt", lambda place: 7), "checkpoint.json"),  # type: ignore[arg-type, return-value]
    "the manifest names fewer shards": (lambda place: place.declare(lambda f: f["shards"].pop()), "the manifest of"),
    "the manifest names one shard twice": (
        lambda place: place.declare(lambda f: f.update(shards=[f["shards"][0], f["shards"][0]])),
        "checkpoint.json",
    ),
    "the manifest names no shards": (lambda place: place.declare(lambda f: f.pop("shards")), "the manifest of"),
    "a shard is a link to the outside": (_linked(Place.shard), "link"),
    "a receipt is a link to the outside": (_linked(Place.receipt), "link"),
    "a manifest is a link to the outside": (_linked(lambda place: place.manifest), "link"),
}
"""What is done to a checkpoint, and a part of what must be said of it."""
