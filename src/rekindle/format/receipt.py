"""JSON files that can tell when they are damaged, and the receipt of a shard.

A document starts with ``{"digest":"<16 hex digits>",``: the xxh3_64 of every byte after that. Its stamp comes next,
with a digest of its own, so that a store can be listed without reading whole documents and without believing damaged
ones. It stays plain JSON for everybody else.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from rekindle.errors import FormatError, VersionError
from rekindle.format.fields import check_integer, check_structure, check_texts, check_values, loads
from rekindle.format.layout import BLOCK, PAGE, Chunk, Layout
from rekindle.format.lineage import ShardId

__all__ = [
    "CHECKSUM",
    "VERSION",
    "Receipt",
    "checksum",
    "open_file",
    "parse_document",
    "read_file",
    "read_stamp",
    "encode_document",
    "write_atomic",
]

VERSION = "1.0"
"""Version of the format, major.minor. A reader refuses another major version by name."""

CHECKSUM = "xxh3_64"

_PREFIX = re.compile(rb'\{"digest":"([0-9a-f]{16})",')
_DIGEST_END = len('{"digest":"0123456789abcdef",')
_LARGEST = 1 << 44
"""Bytes of a shard that are believed: what a process holds in memory is less."""
_STAMP_LIMIT = 1024
"""The stamp comes first and fits in so many bytes, so that listing a store needs no whole receipt."""


def checksum(data: bytes | memoryview) -> str:
    """xxh3_64 in hexadecimal. Outside the interpreter lock for large inputs."""
    return xxhash.xxh3_64_hexdigest(data)


def encode_document(stamp: ShardId, kind: str, body: bytes) -> bytes:
    """The document ``{"digest", "stamp", "stamp_digest", "format", "version", body...}``.

    ``body`` is the inside of a JSON object.
    """
    mark = json.dumps(stamp.to_json(), separators=(",", ":"))
    fields = {"stamp_digest": checksum(mark.encode()), "format": kind, "version": VERSION}
    head = f'{{"stamp":{mark},{json.dumps(fields, separators=(",", ":"))[1:]}'
    rest = head[1:-1].encode() + b"," + body + b"}"
    return b'{"digest":"' + checksum(rest).encode() + b'",' + rest


def parse_document(data: bytes, kind: str, where: str | os.PathLike[str]) -> dict[str, Any]:
    """The document's fields, digest and version checked. Raises FormatError that names ``where``."""
    match = _PREFIX.match(data)
    if not match or checksum(data[_DIGEST_END:]) != match[1].decode():
        raise FormatError(f"{os.fspath(where)}: damaged, its bytes differ from its digest")
    try:
        fields: dict[str, Any] = loads(data)
    except ValueError as error:
        raise FormatError(f"{os.fspath(where)}: is not readable: {error}") from error
    version = str(fields.get("version", ""))
    if version.partition(".")[0] != VERSION.partition(".")[0]:
        raise VersionError(f"{os.fspath(where)}: format version {version!r}; this Rekindle reads {VERSION}: update it")
    if fields.get("format") != kind:
        raise FormatError(f"{os.fspath(where)}: is a {fields.get('format')!r}, not a {kind!r}")
    return fields


def read_file(path: Path) -> bytes:
    """A whole file of a checkpoint. Raises FormatError for a link: nothing is read outside of its directory."""
    with open(open_file(path), "rb") as file:
        return file.read()


def open_file(path: Path) -> int:
    """A descriptor for reading. Raises FormatError for a link, and for all else that is no file."""
    try:
        # Not blocking: a pipe would be waited for until somebody writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FormatError(f"{path}: is a symbolic link, not a file of the checkpoint") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError(f"{path}: is no file")
    return fd


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` as one step, for readers on this machine. Nothing is synced: memory needs none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_stamp(path: Path) -> ShardId:
    """The stamp at the head of a receipt or manifest, verified; nothing is said of the rest.

    Raises FileNotFoundError when the file is gone and FormatError when it doesn't start with a stamp.
    """
    with open(open_file(path), "rb") as file:
        head = file.read(_STAMP_LIMIT)
    text = head[_DIGEST_END:].decode("ascii", "replace")
    if not _PREFIX.match(head) or not text.startswith('"stamp":'):
        raise FormatError(f"{path}: does not start with a stamp")
    try:
        value, end = json.JSONDecoder().raw_decode(text, len('"stamp":'))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: its stamp is not readable") from error
    mark = text[len('"stamp":') : end].encode()
    if not text.startswith(f',"stamp_digest":"{checksum(mark)}"', end):
        raise FormatError(f"{path}: its stamp is damaged")
    return ShardId.from_json(value)


@dataclass(frozen=True)
class Receipt:
    """What a rank says of its shard: where every tensor lies, all checksums, and all values that are not tensors."""

    KIND = "rekindle-receipt"

    stamp: ShardId
    layout: Layout
    header_bytes: int
    header_checksum: str
    checksums: list[str]
    """One for each of ``layout.blocks``."""
    structure: Any
    """The state's nesting, with ``{"$tensor": name}`` and ``{"$value": index}`` for leaves."""
    values: list[Any]
    raw: bytes

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.layout.nbytes

    @staticmethod
    def static_part(layout: Layout, structure: Any) -> bytes:
        """What only changes with the layout, encoded once."""
        fields = {
            "checksum": {"algorithm": CHECKSUM, "block": BLOCK},
            "shard": {
                "header_bytes": len(layout.header),
                "header_checksum": checksum(layout.header),
                "data_bytes": layout.nbytes,
            },
            "structure": structure,
            "tensors": [chunk.to_json() for chunk in layout.chunks],
        }
        return json.dumps(fields, separators=(",", ":")).encode()[1:-1]

    @staticmethod
    def decode_layout(fields: dict[str, Any], where: str | os.PathLike[str]) -> Layout:
        """The layout in a document that has ``static_part``. Raises FormatError for another kind of checksum."""
        if fields["checksum"] != {"algorithm": CHECKSUM, "block": BLOCK}:
            raise FormatError(f"{os.fspath(where)}: unknown kind of checksum")
        layout, at = Layout(tuple(map(Chunk.from_json, fields["tensors"]))), 0
        if layout.nbytes > _LARGEST:
            raise FormatError(f"{os.fspath(where)}: speaks of {layout.nbytes:,} bytes, which no shard has")
        for chunk in layout.chunks:
            if chunk.start != at:
                raise FormatError(
                    f"{os.fspath(where)}: tensor {chunk.name!r} doesn't begin where the one before it ends"
                )
            at = chunk.stop
        return layout

    @staticmethod
    def encode(stamp: ShardId, static: bytes, checksums: list[str], values: bytes) -> bytes:
        """The receipt's bytes. ``values`` is a JSON array, ``static`` what ``static_part`` gave."""
        sums = ('"checksums":["' + '","'.join(checksums) + '"],').encode() if checksums else b'"checksums":[],'
        return encode_document(stamp, Receipt.KIND, sums + b'"values":' + values + b"," + static)

    def with_stamp(self, stamp: ShardId) -> bytes:
        """The bytes of the same receipt with another stamp."""
        return encode_document(stamp, Receipt.KIND, self.raw[self.raw.index(b'"checksums":[') : -1])

    @staticmethod
    def decode(data: bytes, where: str | os.PathLike[str]) -> Receipt:
        """Parse and check. Raises FormatError that names ``where``."""
        fields = parse_document(data, Receipt.KIND, where)
        try:
            layout = Receipt.decode_layout(fields, where)
            receipt = Receipt(
                stamp=ShardId.from_json(fields["stamp"]),
                layout=layout,
                header_checksum=str(fields["shard"]["header_checksum"]),
                # It says in fewer words what the receipt says; a longer one would only be memory to be taken.
                header_bytes=check_integer(fields["shard"]["header_bytes"], 8, 8 * len(data) + PAGE),
                checksums=check_texts(fields["checksums"]),
                structure=fields["structure"],
                values=check_values(fields["values"]),
                raw=data,
            )
            check_structure(receipt.structure, len(receipt.values))
        except (KeyError, TypeError) as error:
            raise FormatError(f"{os.fspath(where)}: field {error} is missing or malformed") from error
        except ValueError as error:
            if isinstance(error, FormatError):
                raise FormatError(f"{os.fspath(where)}: {str(error).removeprefix(f'{os.fspath(where)}: ')}") from error
            raise FormatError(f"{os.fspath(where)}: makes no sense: {error}") from error
        if len(receipt.checksums) != layout.block_count:
            raise FormatError(f"{os.fspath(where)}: {len(receipt.checksums)} checksums for {layout.block_count} blocks")
        return receipt
