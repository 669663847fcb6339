"""Lays tensors out in a shard: the position of each tensor's bytes, and the safetensors header that gives it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rekindle.errors import FormatError
from rekindle.format.boxes import Box
from rekindle.format.fields import MAX_INTEGER, check_integer, check_integers, check_texts

__all__ = ["BLOCK", "DTYPES", "MAX_DIMENSIONS", "NEGATABLE", "PAGE", "Chunk", "Layout", "block_ranges", "check_order"]

PAGE = 4096
"""Alignment of the data in bytes, so that direct I/O and page-locking need no copy."""

BLOCK = 16 << 20
"""Bytes of a tensor under one checksum: large enough to hash at full speed, small enough to overlap with copying."""

MAX_DIMENSIONS = 64
"""Most dimensions of a tensor, the limit of torch and NumPy."""

DTYPES: Mapping[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    # No safetensors code that every reader knows: stored as bytes with one more dimension; the receipt has the dtype.
    "complex64": ("U8", 8),
    "complex128": ("U8", 16),
    "float8_e4m3fnuz": ("U8", 1),
    "float8_e5m2fnuz": ("U8", 1),
    "float8_e8m0fnu": ("U8", 1),
    "float4_e2m1fn_x2": ("U8", 1),
    "complex32": ("U8", 4),
    "bits8": ("U8", 1),
    "bits16": ("U8", 2),
    "bits1x8": ("U8", 1),
    "bits2x4": ("U8", 1),
    "bits4x2": ("U8", 1),
}
"""Maps torch's name of a dtype to its code in the safetensors header and the bytes of an element."""

_METADATA = "__metadata__"
"""Key that safetensors reserves in a header. No tensor can have it as its name."""

_COMPLEX = ("complex32", "complex64", "complex128")

NEGATABLE = ("float16", "float32", "float64", "complex64", "complex128")
"""Dtypes of which torch makes negating views, such as the imaginary part of a conjugated view."""

_MARKS = ("own", "conj", "neg", "parameter", "requires_grad")


@dataclass(frozen=True)
class Chunk:
    """One box of a named global tensor. Lengths count elements, offsets and sizes for each dimension.

    ``Layout.build`` sets the byte range.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int = 0
    """First byte in the shard's data."""
    own: bool = False
    """True if other ranks may have different bytes by the same name. A restarted rank then takes its own if it can."""
    order: tuple[int, ...] = ()
    """Dimensions as they lay in memory, the outermost first. Empty for row-major, which the stored bytes always are."""
    conj: bool = False
    """True if the tensor was a conjugating view. The stored bytes are the values that it showed."""
    neg: bool = False
    """True if the tensor was a negating view. The stored bytes are the values that it showed."""
    parameter: bool = False
    """True if the tensor was a parameter outside of modules."""
    requires_grad: bool = False
    """True if the tensor, outside of modules, required gradients."""
    nbytes: int = field(init=False, compare=False)
    """Bytes of the box."""

    def __post_init__(self) -> None:
        # Computed once: a plan asks for it eight times. 0 for an unknown dtype, which from_json() refuses afterwards.
        object.__setattr__(self, "nbytes", math.prod(self.sizes) * DTYPES.get(self.dtype, ("", 0))[1])

    def placed(self, start: int) -> Chunk:
        """Returns the chunk with its first byte at ``start``."""
        made = object.__new__(Chunk)  # replace() takes ten times as long, for every tensor of a job's first save
        made.__dict__.update(self.__dict__, start=start)
        return made

    @property
    def stop(self) -> int:
        """First byte after the chunk in the shard's data."""
        return self.start + self.nbytes

    @property
    def block_count(self) -> int:
        """Number of blocks, each with a checksum of its own; 0 for an empty tensor."""
        return -(-self.nbytes // BLOCK)

    @property
    def box(self) -> Box:
        """Box of the global tensor that the chunk holds."""
        return Box(self.offsets, self.sizes)

    def _inside(self) -> bool:
        """True if the box lies inside of the tensor, and the tensor within the format's limits."""
        if not len(self.global_shape) == len(self.offsets) == len(self.sizes) or self.start < 0:
            return False
        spans = zip(self.offsets, self.sizes, self.global_shape, strict=True)
        return math.prod(max(n, 1) for n in self.global_shape) <= MAX_INTEGER and all(
            at >= 0 and size >= 0 and at + size <= whole for at, size, whole in spans
        )

    def to_json(self) -> dict[str, Any]:
        fields = {
            "name": self.name,
            "dtype": self.dtype,
            "global_shape": list(self.global_shape),
            "offsets": list(self.offsets),
            "sizes": list(self.sizes),
            "range": [self.start, self.stop],
        }
        order = {"order": list(self.order)} if self.order else {}
        return fields | {key: True for key in _MARKS if getattr(self, key)} | order

    @staticmethod
    def from_json(value: Any) -> Chunk:
        """Reads an entry of a receipt's tensor table. Raises FormatError that names the tensor."""
        try:
            chunk = Chunk(
                name=check_texts([value["name"]])[0],
                dtype=check_texts([value["dtype"]])[0],
                global_shape=check_integers(value["global_shape"], MAX_DIMENSIONS),
                offsets=check_integers(value["offsets"], MAX_DIMENSIONS),
                sizes=check_integers(value["sizes"], MAX_DIMENSIONS),
                start=check_integer(value["range"][0]),
                own=bool(value.get("own")),
                order=check_order(value),
                conj=bool(value.get("conj")),
                neg=bool(value.get("neg")),
                parameter=bool(value.get("parameter")),
                requires_grad=bool(value.get("requires_grad")),
            )
            if (chunk.conj and chunk.dtype not in _COMPLEX) or (chunk.neg and chunk.dtype not in NEGATABLE):
                raise FormatError(f"tensor {chunk.name!r}: torch makes no such view of dtype {chunk.dtype}")
            if chunk.requires_grad and "float" not in chunk.dtype and chunk.dtype not in _COMPLEX:
                raise FormatError(f"tensor {chunk.name!r}: a tensor of dtype {chunk.dtype} can't require gradients")
            if chunk.order and len(chunk.order) != len(chunk.global_shape):
                dimensions = len(chunk.global_shape)
                raise FormatError(
                    f"tensor {chunk.name!r}: has {dimensions} dimensions, but its order has {len(chunk.order)}"
                )
            if chunk.dtype not in DTYPES or chunk.stop != check_integer(value["range"][1]) or not chunk._inside():
                raise FormatError(f"tensor {chunk.name!r}: dtype, shape, sizes and byte range do not agree")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            name = value.get("name") if isinstance(value, dict) else None
            what = f"tensor {name[:200]!r}" if isinstance(name, str) else "tensor table"
            raise FormatError(f"{what} is not readable: {error!r}") from error
        return chunk


def check_order(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the field ``order`` of a tensor's entry, empty where an older version wrote none.

    Raises ValueError unless it is a permutation of the dimensions.
    """
    order = check_integers(fields.get("order", []), MAX_DIMENSIONS)
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"{list(order)} is not a permutation of dimensions")
    return order


def block_ranges(chunk: Chunk) -> list[tuple[int, int]]:
    """Returns the byte ranges of the chunk's checksums, none for an empty tensor."""
    return [(at, min(at + BLOCK, chunk.stop)) for at in range(chunk.start, chunk.stop, BLOCK)]


@dataclass(frozen=True)
class Layout:
    """Chunks of a shard, in the order of their bytes, without gaps.

    safetensors allows no padding between tensors, so wide elements come first: then each tensor is aligned to its own
    element size and can be viewed in place.
    """

    chunks: tuple[Chunk, ...]
    nbytes: int = field(init=False)
    """Bytes of data, without the header."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", self.chunks[-1].stop if self.chunks else 0)

    @staticmethod
    def build(chunks: Iterable[Chunk]) -> Layout:
        """Places ``chunks``, the widest elements first, then by name and offsets."""
        placed, at = [], 0
        for chunk in sorted(chunks, key=lambda c: (-DTYPES[c.dtype][1], c.name, c.offsets)):
            placed.append(chunk.placed(at))
            at = placed[-1].stop
        return Layout(tuple(placed))

    @cached_property
    def header_keys(self) -> list[str]:
        """Keys of the chunks in the safetensors header, where each key must be unique.

        If the shard has several boxes of a tensor, none of them gets the tensor's name alone: a reader that ignores
        boxes would take the last one for the whole tensor.
        """
        count = Counter(chunk.name for chunk in self.chunks)
        seen: Counter[str] = Counter()
        keys = {_METADATA: None}  # in order, and quick to look up
        for chunk in self.chunks:
            key = chunk.name if count[chunk.name] == 1 else f"{chunk.name}#{seen[chunk.name]}"
            while key in keys:
                key += "~"
            keys[key] = None
            seen[chunk.name] += 1
        return list(keys)[1:]

    @cached_property
    def header(self) -> bytes:
        """The safetensors header with its length prefix, padded so that the data starts on a page."""
        sharding: dict[str, Any] = {}
        table: dict[str, Any] = {}
        for key, chunk in zip(self.header_keys, self.chunks, strict=True):
            code, itemsize = DTYPES[chunk.dtype]
            shape, offsets = list(chunk.sizes), list(chunk.offsets)
            if code == "U8" and chunk.dtype != "uint8":
                shape.append(itemsize)
                offsets.append(0)
            sharding[key] = {"saved_offsets": offsets}
            table[key] = {"dtype": code, "shape": shape, "data_offsets": [chunk.start, chunk.stop]}
        table[_METADATA] = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(sharding)}
        text = json.dumps(table, separators=(",", ":")).encode()
        length = -(-(8 + len(text)) // PAGE) * PAGE
        return (length - 8).to_bytes(8, "little") + text.ljust(length - 8)

    @property
    def file_bytes(self) -> int:
        """Size of the shard's file in bytes."""
        return len(self.header) + self.nbytes

    @property
    def block_count(self) -> int:
        """Number of blocks, each with a checksum of its own."""
        return sum(chunk.block_count for chunk in self.chunks)

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """Byte ranges of all blocks, in the order in which receipts list their checksums."""
        return [block for chunk in self.chunks for block in block_ranges(chunk)]

    def tensor_of(self, block: int) -> str:
        """Returns the name of the tensor that block number ``block`` belongs to. Raises IndexError."""
        for chunk in self.chunks:
            block -= chunk.block_count
            if block < 0:
                return chunk.name
        raise IndexError(block)
