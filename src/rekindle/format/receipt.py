"""Reads and writes documents, JSON files that show damage by a digest, and the receipts of shards.

A document starts with ``{"digest":"<16 hex digits>",``: the xxh3_64 of every byte after that. Its stamp comes next,
with a digest of its own: a store can be listed without reading whole documents and without trusting damaged ones.
Other programs read a document as plain JSON.
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

from rekindle.errors import CorruptError, FormatError, VersionError
from rekindle.format.fields import check_integer, check_structure, check_texts, check_values, loads
from rekindle.format.layout import BLOCK, PAGE, Chunk, Layout
from rekindle.format.lineage import ShardId

__all__ = [
    "CHECKSUM",
    "STAMP_LIMIT",
    "VERSION",
    "Receipt",
    "checksum",
    "open_file",
    "parse_document",
    "parse_stamp",
    "read_file",
    "read_stamp",
    "encode_document",
    "seal",
    "write_atomic",
]

VERSION = "1.0"
"""Version of the format, major.minor. A reader refuses another major version by name."""

CHECKSUM = "xxh3_64"
"""Algorithm of all checksums and digests."""

_PREFIX = re.compile(rb'\{"digest":"([0-9a-f]{16})",')
_DIGEST_END = len('{"digest":"0123456789abcdef",')
_MAX_SHARD_BYTES = 1 << 44
"""Most bytes of a shard, 16 TiB. A larger size is damage: no process holds as much in memory."""
STAMP_LIMIT = 1024
"""Bytes at the head of a document that hold its stamp, so that listing a store needs no whole receipt."""


def checksum(data: bytes | memoryview) -> str:
    """Returns the xxh3_64 of ``data`` in hexadecimal. Releases the interpreter lock for large inputs."""
    return xxhash.xxh3_64_hexdigest(data)


def encode_document(stamp: ShardId, kind: str, body: bytes) -> bytes:
    """Returns the document ``{"digest", "stamp", "stamp_digest", "format", "version", body...}``.

    ``body`` is the text of a JSON object without its braces, ``kind`` the field ``format``.
    """
    mark = json.dumps(stamp.to_json(), separators=(",", ":"))
    fields = {"stamp_digest": checksum(mark.encode()), "format": kind, "version": VERSION}
    head = f'{{"stamp":{mark},{json.dumps(fields, separators=(",", ":"))[1:]}'
    return seal(head[1:-1].encode() + b"," + body + b"}")


def seal(rest: bytes) -> bytes:
    """Returns a document: its digest, and ``rest``, the text of a JSON object without its first brace."""
    return b'{"digest":"' + checksum(rest).encode() + b'",' + rest


def parse_document(data: bytes, kind: str, where: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns a document's fields after a check of digest, version and ``kind``.

    Raises FormatError, or VersionError for another major version; its message names ``where``.
    """
    match = _PREFIX.match(data)
    if not match or checksum(data[_DIGEST_END:]) != match[1].decode():
        raise FormatError(f"{os.fspath(where)}: is damaged: its bytes differ from its digest")
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
    """Returns the bytes of a file. Raises OSError, or FormatError for a symbolic link.

    Nothing is read outside of the checkpoint's directory.
    """
    with open(open_file(path), "rb") as file:
        return file.read()


def open_file(path: Path) -> int:
    """Opens a file for reading and returns its descriptor.

    Raises OSError, or FormatError for a symbolic link and for anything else that is not a regular file.
    """
    try:
        # O_NONBLOCK, since opening a pipe would wait until somebody writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FormatError(f"{path}: is a symbolic link, not a file of the checkpoint") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError(f"{path}: is not a regular file")
    return fd


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces ``path`` atomically for readers on this machine. Syncs nothing, which a file in memory doesn't need.

    Raises OSError, and then leaves the old file in place.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_stamp(path: Path) -> ShardId:
    """Returns the verified stamp at the head of a receipt or manifest. The rest of the file is not checked.

    Raises FileNotFoundError when the file is gone, FormatError when it doesn't start with a sound stamp.
    """
    with open(open_file(path), "rb") as file:
        return parse_stamp(file.read(STAMP_LIMIT), path)


def parse_stamp(data: bytes, path: Path) -> ShardId:
    """Returns what ``read_stamp`` does, from the bytes of the document at ``path``. Raises FormatError."""
    head = data[:STAMP_LIMIT]
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
    """Describes a rank's shard: the place of each tensor, all checksums, and all values that are not tensors."""

    KIND = "rekindle-receipt"

    stamp: ShardId
    layout: Layout
    header_bytes: int
    """Size of the safetensors header with its length prefix."""
    header_checksum: str
    checksums: list[str]
    """Checksums of ``layout.blocks``."""
    structure: Any
    """The state's nesting, with ``{"$tensor": name}`` and ``{"$value": index}`` as leaves."""
    values: list[Any]
    """Encoded values, to which the structure refers by index."""
    raw: bytes
    """The whole document."""

    @property
    def file_bytes(self) -> int:
        """Size of the shard's file in bytes."""
        return self.header_bytes + self.layout.nbytes

    def check_size(self, nbytes: int, where: object, *, in_memory: bool = False) -> None:
        """Raises CorruptError if the shard's file at ``where``, of ``nbytes``, isn't whole.

        In memory it may be too long: what a state that shrank has left of it is given back beside training, or by a
        later save.
        """
        if nbytes < self.file_bytes or (nbytes > self.file_bytes and not in_memory):
            raise CorruptError(f"{where}: has {nbytes:,} bytes, should have {self.file_bytes:,}")

    @staticmethod
    def static_part(layout: Layout, structure: Any) -> bytes:
        """Encodes the fields that change only with the layout. A writer does it once for many saves."""
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
        """Returns the layout in a document with the fields of ``static_part``.

        Raises FormatError for another kind of checksum, and for tensors that overlap or leave gaps.
        """
        if fields["checksum"] != {"algorithm": CHECKSUM, "block": BLOCK}:
            raise FormatError(f"{os.fspath(where)}: has checksums of an unknown kind")
        layout, at = Layout(tuple(map(Chunk.from_json, fields["tensors"]))), 0
        if layout.nbytes > _MAX_SHARD_BYTES:
            raise FormatError(f"{os.fspath(where)}: claims {layout.nbytes:,} bytes of data, more than a shard can have")
        for chunk in layout.chunks:
            if chunk.start != at:
                raise FormatError(
                    f"{os.fspath(where)}: tensor {chunk.name!r} doesn't begin where the one before it ends"
                )
            at = chunk.stop
        return layout

    @staticmethod
    def encode(stamp: ShardId, static: bytes, checksums: list[str], values: bytes) -> bytes:
        """Returns the receipt's bytes. ``values`` is a JSON array, ``static`` the result of ``static_part``."""
        sums = ('"checksums":["' + '","'.join(checksums) + '"],').encode() if checksums else b'"checksums":[],'
        return encode_document(stamp, Receipt.KIND, sums + b'"values":' + values + b"," + static)

    def with_stamp(self, stamp: ShardId) -> bytes:
        """Returns the bytes of the same receipt with another stamp."""
        return encode_document(stamp, Receipt.KIND, self.raw[self.raw.index(b'"checksums":[') : -1])

    @staticmethod
    def decode(data: bytes, where: str | os.PathLike[str]) -> Receipt:
        """Parses and checks a receipt. Raises FormatError, whose message names ``where``."""
        fields = parse_document(data, Receipt.KIND, where)
        try:
            layout = Receipt.decode_layout(fields, where)
            receipt = Receipt(
                stamp=ShardId.from_json(fields["stamp"]),
                layout=layout,
                header_checksum=str(fields["shard"]["header_checksum"]),
                # The receipt repeats it in more bytes. A larger number would only make readers allocate memory.
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
            raise FormatError(f"{os.fspath(where)}: is not a valid receipt: {error}") from error
        if len(receipt.checksums) != layout.block_count:
            raise FormatError(
                f"{os.fspath(where)}: has {len(receipt.checksums)} checksums for {layout.block_count} blocks"
            )
        return receipt
