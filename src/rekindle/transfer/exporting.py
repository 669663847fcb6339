"""A checkpoint into other people's formats. Nothing half-made is ever left under the name that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rekindle.storage import disk
from rekindle.storage.catalog import StoredCopy
from rekindle.transfer import dcp, huggingface, torchfile
from rekindle.transfer.progress import Progress
from rekindle.transfer.shards import Shards
from rekindle.transfer.staging import publish, staging

__all__ = ["Exported", "Form", "export"]

Form = Literal["safetensors", "torch", "dcp"]


@dataclass(frozen=True)
class Exported:
    """What has been made."""

    step: int
    place: str
    """Where the checkpoint was read from."""
    format: str
    path: Path
    tensors: int
    nbytes: int
    """Of all files."""
    files: list[str]

    def to_json(self) -> dict[str, Any]:
        fields = {**vars(self), "path": str(self.path), "bytes": self.nbytes}
        del fields["nbytes"]
        return fields


def export(copy: StoredCopy, out: Path, form: Form, only: str | None, limit: int, progress: Progress) -> Exported:
    """Write one copy of a checkpoint, of all of its ranks, to ``out`` in the format ``form``, synced.

    ``only`` names the entry of the state that is wanted; its tensors then have their own names. ``limit`` is how many
    bytes of tensors a safetensors file holds.

    Raises UsageError when ``out`` exists, CorruptError when anything read is damaged, NotFoundError when the entry
    isn't there, UnsupportedValueError when the format can't have it, OSError when there is no room.
    """
    with staging(out) as directory, Shards(copy, only) as shards:
        made = directory / "out"
        if form == "torch":
            torchfile.write(shards, made, only, progress)
        else:
            disk.mkdir(made)
            if form == "dcp":
                dcp.write(shards, made, only, progress)
            else:
                huggingface.write(shards, made, limit, progress)
        publish(made, out)
        files = sorted(out.iterdir()) if out.is_dir() else [out]
        sizes = sum(path.stat().st_size for path in files)
        return Exported(copy.step, copy.place, form, out, len(shards.items), sizes, [path.name for path in files])
