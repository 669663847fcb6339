"""Exports a checkpoint into another program's format. The name that was asked for never has a half-made export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rekindle.storage import disk
from rekindle.storage.catalog import StoredCopy
from rekindle.transfer import dcp, huggingface, torchfile
from rekindle.transfer.model import check_config, copy_config, model_of
from rekindle.transfer.progress import Progress
from rekindle.transfer.shards import Shards
from rekindle.transfer.staging import publish, staging

__all__ = ["Exported", "Form", "export"]

Form = Literal["safetensors", "torch", "dcp"]


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    step: int
    place: str
    """Place that the checkpoint was read from: ``memory`` or ``storage``."""
    format: str
    path: Path
    tensors: int
    nbytes: int
    """Bytes of all files."""
    files: list[str]

    def to_json(self) -> dict[str, Any]:
        fields = {**vars(self), "path": str(self.path), "bytes": self.nbytes}
        del fields["nbytes"]
        return fields


def export(
    copy: StoredCopy,
    out: Path,
    form: Form,
    only: str | None,
    limit: int,
    progress: Progress,
    *,
    weights_only: bool = False,
    config: Path | None = None,
) -> Exported:
    """Writes one copy of a checkpoint, of all of its ranks, to ``out`` in the format ``form``, synced.

    ``only`` names the entry of the state that is wanted; its tensors then have their own names. ``limit`` is the most
    bytes of tensors that a safetensors file holds. With ``weights_only`` the model is wanted, without what an import
    would need; the folder ``config``, if given, has what describes the model beside its weights.

    Raises UsageError when ``out`` exists, CorruptError when anything read is damaged, NotFoundError when the entry
    isn't there, UnsupportedValueError when the format can't hold the state, OSError when there is no room.
    """
    if config is not None:
        check_config(config)
    if weights_only and only is None:
        only = model_of(copy)
    with staging(out) as directory, Shards(copy, only) as shards:
        made = directory / "out"
        if form == "torch":
            torchfile.write(shards, made, only, progress)
        else:
            disk.mkdir(made)
            if form == "dcp":
                dcp.write(shards, made, only, progress)
            else:
                huggingface.write(shards, made, limit, progress, sidecar=not weights_only)
            if config is not None:
                copy_config(config, made)
        publish(made, out)
        files = sorted(out.iterdir()) if out.is_dir() else [out]
        sizes = sum(path.stat().st_size for path in files)
        return Exported(copy.step, copy.place, form, out, len(shards.items), sizes, [path.name for path in files])
