"""Writes and reads ``rekindle.json``: a file beside an export's tensors that lets an import restore the exact state.

Other readers ignore it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rekindle.errors import CorruptError, FormatError, UnsupportedValueError, UsageError
from rekindle.format.completeness import tensor_names
from rekindle.format.fields import check_integers, check_structure, check_texts, check_values
from rekindle.format.layout import BLOCK, DTYPES, MAX_DIMENSIONS, check_order
from rekindle.format.lineage import ShardId
from rekindle.format.receipt import CHECKSUM, checksum, encode_document, parse_document, read_file
from rekindle.state.codec import has_pickle, is_well_formed
from rekindle.state.strides import reorder
from rekindle.state.tree import assemble
from rekindle.transfer.shards import Shards
from rekindle.transfer.staging import write_file

__all__ = ["SIDECAR", "Sidecar", "TensorEntry"]

SIDECAR = "rekindle.json"
_KIND = "rekindle-export"


@dataclass(frozen=True)
class TensorEntry:
    """The sidecar's entry for one tensor."""

    key: str
    """Its name in the export."""
    name: str
    """Its name in the structure."""
    dtype: str
    shape: list[int]
    checksums: list[str]
    """One checksum for each started block, as in a receipt."""
    order: list[int]
    """Order of its dimensions in memory, as in a receipt; empty where the tensor was row-major."""


def _tensor_entry(value: Any) -> TensorEntry:
    key, name, dtype = check_texts([value["key"], value["name"], value["dtype"]])
    if dtype not in DTYPES:
        raise ValueError(f"dtype of {key[:200]!r}")
    shape, order = list(check_integers(value["shape"], MAX_DIMENSIONS)), list(check_order(value))
    if order and len(order) != len(shape):
        raise ValueError(f"order of {key[:200]!r}")
    return TensorEntry(key, name, dtype, shape, check_texts(value["checksums"]), order)


@dataclass(frozen=True)
class Sidecar:
    """Structure and values of an exported state, and entries for all of its tensors."""

    structure: Any
    values: list[Any]
    tensors: list[TensorEntry]
    path: Path

    @staticmethod
    def of(shards: Shards, places: Mapping[str, memoryview], path: Path) -> Sidecar:
        """Returns the sidecar of ``shards``, whose tensors lie in ``places``."""
        tensors = []
        for key, name, whole in shards.items:
            data = places[key]
            sums = [checksum(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
            tensors.append(TensorEntry(key, name, whole.dtype, list(whole.shape), sums, list(whole.order)))
        return Sidecar(shards.structure, shards.values, tensors, path)

    def write(self, stamp: ShardId) -> None:
        """Writes it to its path. Raises OSError."""
        fields = {
            "checksum": {"algorithm": CHECKSUM, "block": BLOCK},
            "structure": self.structure,
            "values": self.values,
            "tensors": list(map(asdict, self.tensors)),
        }
        write_file(self.path, encode_document(stamp, _KIND, json.dumps(fields, separators=(",", ":")).encode()[1:-1]))

    @staticmethod
    def check_names(shards: Shards) -> None:
        """Raises UnsupportedValueError for a name that can't be stored in a sidecar or a safetensors header."""
        for key, _, _ in shards.items:
            if key == "__metadata__" or not is_well_formed(key):
                raise UnsupportedValueError(
                    f"step {shards.copy.step}: {key!r:.200} can't be the name of a tensor in this format: "
                    "--format torch takes it"
                )

    @staticmethod
    def read(path: Path) -> Sidecar | None:
        """The note in a file, if there is one. Raises FormatError."""
        try:
            fields = parse_document(read_file(path), _KIND, path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            if fields["checksum"] != {"algorithm": CHECKSUM, "block": BLOCK}:
                raise FormatError(f"{path}: unknown checksum {fields['checksum']}")
            tensors = list(map(_tensor_entry, fields["tensors"]))
            check_structure(fields["structure"], len(check_values(fields["values"])))
            strange = {*tensor_names(fields["structure"])} - {entry.name for entry in tensors}
            if strange or type(fields["structure"]) is not dict:
                raise ValueError(f"its structure has {min(strange, default='no entries')[:200]!r}")
            return Sidecar(fields["structure"], fields["values"], tensors, path)
        except FormatError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path}: field {error} is missing or malformed") from error

    def state(self, tensors: Mapping[str, torch.Tensor], *, allow_pickle: bool) -> Any:
        """Returns the state with these tensors, given by key. Raises CorruptError when others were exported."""
        entries = {entry.key: entry for entry in self.tensors}
        odd = sorted(entries.keys() ^ tensors.keys())
        if odd:
            raise CorruptError(f"{self.path}: it or the files beside it lack {odd[0]!r}. {self._advice}")
        if not allow_pickle and has_pickle(self.values):
            raise UsageError(f"{self.path}: holds pickled values; loading those runs code: --allow-pickle allows it")
        found = {entry.name: self._typed(entry, tensors[entry.key]) for entry in self.tensors}
        return assemble(self.structure, self.values, found.__getitem__, allow_pickle=allow_pickle)

    def _typed(self, entry: TensorEntry, tensor: torch.Tensor) -> torch.Tensor:
        dtype, (code, size) = getattr(torch, entry.dtype), DTYPES[entry.dtype]
        # Types without a code in safetensors are stored as their bytes, in one more dimension.
        if code == "U8" and tensor.dtype == torch.uint8 and list(tensor.shape) == [*entry.shape, size]:
            tensor = tensor.view(dtype).squeeze(-1) if tensor.numel() else tensor.new_empty(entry.shape, dtype=dtype)
        if tensor.dtype != dtype or list(tensor.shape) != entry.shape:
            raise CorruptError(f"{self.path}: {entry.key!r} has another dtype or shape. {self._advice}")
        return reorder(tensor.clone(), entry.order) if entry.order else tensor

    def compare(self, sums: Mapping[str, list[str]]) -> None:
        """Raises CorruptError unless the tensors of these names have the checksums in the sidecar."""
        for entry in self.tensors:
            if sums.get(entry.name) != entry.checksums:
                raise CorruptError(f"{self.path}: {entry.key!r} differs from its checksum. {self._advice}")

    @property
    def _advice(self) -> str:
        return f"If the tensors were changed on purpose, remove {SIDECAR}: they are then imported as they are"
