"""Writes and reads Hugging Face's layout: safetensors files of a limited size, and an index of tensors to files."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rekindle.errors import CorruptError, FormatError, NotFoundError, UnsupportedValueError, UsageError
from rekindle.format.fields import MAX_INTEGER, check_integers, check_texts, loads
from rekindle.format.layout import DTYPES, MAX_DIMENSIONS, Chunk, Layout
from rekindle.transfer.progress import Progress
from rekindle.transfer.shards import Item, Shards, nbytes
from rekindle.transfer.sidecar import SIDECAR, Sidecar
from rekindle.transfer.staging import map_new_file, tensor_view, write_file

__all__ = ["is_safetensors", "read", "write"]

_INDEX = "model.safetensors.index.json"
_CODES = {code: (name, size) for name, (code, size) in DTYPES.items() if code != "U8" or name == "uint8"}
# Codes that newer writers of safetensors use.
_CODES |= {"C64": ("complex64", 8), "F8_E8M0": ("float8_e8m0fnu", 1)}
_CODES |= {"F8_E4M3FNUZ": ("float8_e4m3fnuz", 1), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1)}
_LONGEST = 100_000_000
"""Most bytes of a header that safetensors' own reader takes."""


def write(shards: Shards, directory: Path, limit: int, progress: Progress, *, sidecar: bool) -> None:
    """Fills an empty directory with files of at most ``limit`` bytes of tensors; a larger tensor gets its own file.

    With ``sidecar`` an import restores the exact state.
    """
    Sidecar.check_names(shards)
    files = list(_files(shards.items, limit))
    places: dict[str, memoryview] = {}
    index: dict[str, str] = {}
    for number, layout in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        data = map_new_file(directory / name, layout.file_bytes)
        base = len(layout.header)
        data[:base] = layout.header
        for chunk in layout.chunks:
            places[chunk.name] = data[base + chunk.start : base + chunk.stop]
            index[chunk.name] = name
    progress.begin(shards.reads)
    shards.read(places, directory, progress.advance)
    if len(files) > 1:
        total = sum(layout.nbytes for layout in files)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        write_file(directory / _INDEX, (text + "\n").encode())
    if sidecar:
        Sidecar.of(shards, places, directory / SIDECAR).write(shards.copy.stamp)


def _files(items: Sequence[Item], limit: int) -> Iterator[Layout]:
    chunks: list[Chunk] = []
    total = 0
    for key, _, whole in items:
        if chunks and total + nbytes(whole) > limit:
            yield Layout.build(chunks)
            chunks, total = [], 0
        chunks.append(Chunk(key, whole.dtype, whole.shape, (0,) * len(whole.shape), whole.shape))
        total += nbytes(whole)
    yield Layout.build(chunks)


# -- reading ---------------------------------------------------------------------------------------------------------


def is_safetensors(path: Path) -> bool:
    """True if a file begins as safetensors files do."""
    with open(path, "rb") as file:
        head = file.read(9)
    return head[8:] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= min(_LONGEST, path.stat().st_size - 8)


def read(path: Path) -> tuple[dict[str, torch.Tensor], Sidecar | None]:
    """Returns all tensors of a file, or of a directory, by name: mapped, so not read yet.

    Raises CorruptError when some are missing, UsageError when it is not clear which files to take.
    """
    if not path.is_dir():
        return _tensors(path), None
    indices = sorted(path.glob("*.safetensors.index.json"))
    files = sorted(path.glob("*.safetensors"))
    sidecar = Sidecar.read(path / SIDECAR)
    if len(indices) > 1 or (not indices and len(files) != 1):
        what = indices if len(indices) > 1 else files
        names = ", ".join(file.name for file in what[:3])
        raise UsageError(f"{path}: holds {len(what)} files ({names}, ...) and no single index: give the one to import")
    return (_indexed(indices[0]) if indices else _tensors(files[0])), sidecar


def _indexed(path: Path) -> dict[str, torch.Tensor]:
    try:
        weights = loads(path.read_bytes())["weight_map"]
        by_file: defaultdict[str, list[str]] = defaultdict(list)
        for key, file in zip(weights, check_texts(list(weights.values())), strict=True):
            if file != os.path.basename(file):
                raise ValueError(f"{file[:200]!r} is no file beside it")
            by_file[file].append(key)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: is not readable as an index: {error!r}") from error
    found: dict[str, torch.Tensor] = {}
    for file, keys in by_file.items():
        tensors = _tensors(path.parent / file)
        missing = [key for key in keys if key not in tensors]
        if missing:
            raise CorruptError(f"{path.parent / file}: lacks {missing[0]!r}, which {path.name} says is there")
        found |= {key: tensors[key] for key in keys}
    return found


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    if path.exists() and not path.is_file():
        raise FormatError(f"{path}: is no file")
    try:
        with open(path, "rb") as file:
            # Read-only: for a private writable mapping the kernel would have to reserve memory for all of it.
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        length = int.from_bytes(data[:8], "little")
        if length > min(_LONGEST, len(data) - 8):
            raise ValueError(f"a header of {length:,} bytes")
        table: dict[str, Any] = loads(bytes(data[8 : 8 + length]))
        table.pop("__metadata__", None)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: is missing") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise FormatError(f"{path}: is not readable as safetensors: {error!r}") from error
    return {key: _tensor(path, key, entry, data[8 + length :]) for key, entry in table.items()}


def _tensor(path: Path, key: str, entry: Any, data: memoryview) -> torch.Tensor:
    try:
        (code,), shape = check_texts([entry["dtype"]]), check_integers(entry["shape"], MAX_DIMENSIONS)
        start, stop = check_integers(entry["data_offsets"], 2)
        if math.prod(max(n, 1) for n in shape) > MAX_INTEGER:
            raise ValueError("its shape is larger than any memory")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: tensor {key!r} is not described: {error!r}") from error
    if code not in _CODES or not hasattr(torch, _CODES[code][0]):
        raise UnsupportedValueError(f"{path}: tensor {key!r} has dtype {code}, which has no type in the format")
    dtype, size = _CODES[code]
    if not start <= stop <= len(data) or math.prod(shape) * size != stop - start:
        raise CorruptError(f"{path}: tensor {key!r} does not lie where the header says: the file is damaged or cut off")
    return tensor_view(data[start:stop], getattr(torch, dtype), shape)
