"""Imports other programs' formats: makes a checkpoint of them, committed as every other one is."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rekindle.errors import BusyError, NotDurableError, NotFoundError, UsageError
from rekindle.format.layout import block_ranges
from rekindle.format.lineage import Incarnation, ShardId, drop_superseded
from rekindle.format.names import MANIFEST, Root
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir
from rekindle.save.capture import Capture
from rekindle.save.copy import ShardWriter
from rekindle.save.plan import CopyPlan
from rekindle.session.inventory import refuse_unread
from rekindle.state.tree import FlatState, flatten
from rekindle.storage import disk
from rekindle.storage.catalog import copies_from
from rekindle.storage.commit import Committer
from rekindle.storage.open import open_store
from rekindle.storage.store import Store
from rekindle.transfer import dcp, huggingface, torchfile
from rekindle.transfer.progress import Progress
from rekindle.transfer.sidecar import Sidecar
from rekindle.transfer.staging import map_scratch

__all__ = ["Imported", "import_checkpoint"]

_MODEL = "model"
"""Entry of a flat source's tensors."""
_VALUES = "values"
"""Entry of what lies beside a source's dictionaries."""
_BATCHES = 64
"""Batches of a plan, of 4 MiB or a tensor, that are copied between two updates of the progress."""


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    step: int
    root: Root
    format: str
    """Format of the source."""
    entries: list[str]
    tensors: int
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        fields = {**vars(self), "root": str(self.root), "bytes": self.nbytes}
        del fields["nbytes"]
        return fields


@dataclass(frozen=True)
class _Source:
    """State that was read from a source."""

    format: str
    state: dict[Any, Any]
    """By entry."""
    sidecar: Sidecar | None
    loaded: int
    """Bytes that reading it has counted as progress."""


class _Entry:
    """Stands in for a live object: its state dict is what was found."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def state_dict(self) -> Any:
        return self.tree

    def load_state_dict(self, tree: Any) -> None:
        self.tree = tree


def import_checkpoint(
    source: Path, job: JobDir, root: Root, step: int, entry: str | None, progress: Progress, *, allow_pickle: bool
) -> Imported:
    """Makes what ``source`` holds the checkpoint of ``step`` under ``root``, whose memory is ``job``. Durable then.

    ``entry`` makes all of it one entry of the state, by that name. Else a dictionary of dictionaries becomes as many
    entries, and what is flat becomes "model".

    Raises UsageError when the root has that step or a later one, or when reading the source would run code that
    ``allow_pickle`` doesn't allow; BusyError while a job runs there; CorruptError when the source is damaged; OSError
    when storage refuses, or shows nothing of what it had.
    """
    store = open_store(root)
    stamp = _stamp(job, store, step)
    committer = Committer(store, job)
    committer.begin(stamp)  # before the source is read, which may take an hour
    with _directory_for_scratch(root) as directory:
        try:
            found = _read(source, directory, entry, progress, allow_pickle=allow_pickle)
            entries = {name: _Entry(tree) for name, tree in found.state.items()}
            plan, values = Capture(entries, rng=False, allow_pickle=allow_pickle).prepare()
            progress.begin(found.loaded + plan.layout.nbytes + plan.layout.file_bytes)
            receipt, data = _assemble(plan, values, stamp, found.sidecar, directory, progress.advance)
            committer.write(receipt, data, progress.advance)
            if not committer.commit(stamp, [stamp]) or not store.durable(stamp):
                raise NotDurableError(f"{root}: a later start of the job has taken the place of step {step}")
        except BaseException:
            store.discard(stamp)
            raise
    return Imported(step, root, found.format, list(found.state), len(plan.layout.chunks), plan.layout.file_bytes)


@contextmanager
def _directory_for_scratch(root: Root) -> Iterator[Path]:
    """Yields a directory for files without names: the root itself, where it is one. After an error it is as it was."""
    if isinstance(root, str):
        yield Path(tempfile.gettempdir())
        return
    there = root.is_dir()
    disk.make_path(root)
    try:
        yield root
    except BaseException:
        if not there:
            with suppress(OSError):
                disk.rmdir(root)
        raise


def _stamp(job: JobDir, store: Store, step: int) -> ShardId:
    """Returns the shard id for an import: by a new start that continues from the newest checkpoint, so supersedes none.

    Raises UsageError when that is not older than ``step``, NotFoundError when there is one that can't be read.
    """
    job.check()
    root = store.root
    if job.trainers() or job.agent() is not None:
        raise BusyError(f"{root}: a job runs there, or its agent does: wait for its end, or run 'rekindle stop ROOT'")
    contents = store.contents()
    copies = copies_from(job, contents)
    incarnation = Incarnation.begin(1 + max((copy.incarnation.generation for copy in copies), default=0))
    newest = next(iter(drop_superseded(copies)), None)
    refuse_unread(newest.step if newest else 0, contents.unread, "move it elsewhere, or mend it")
    if newest is not None:
        if newest.step >= step:
            raise UsageError(f"{root}: has step {newest.step} already: import as a later step, or into another root")
        incarnation = replace(incarnation, parent=newest.incarnation.id, parent_step=newest.step)
    return ShardId(step, 0, 1, incarnation)


def _read(source: Path, directory: Path, entry: str | None, progress: Progress, *, allow_pickle: bool) -> _Source:
    form = _form(source)
    sidecar: Sidecar | None = None
    tree: Any
    loaded = 0
    if form == "dcp":
        found = dcp.DcpSource(source, allow_pickle=allow_pickle)
        sidecar, loaded = found.sidecar, found.nbytes
        progress.begin(3 * loaded)
        tree = found.load(directory, progress.advance)
    elif form == "safetensors":
        tree, sidecar = huggingface.read(source)
    else:
        tree = torchfile.read(source, allow_pickle=allow_pickle)
    if sidecar is not None:
        tree = sidecar.state(tree, allow_pickle=allow_pickle)
    state = _entries(tree, entry, source, has_entries=sidecar is not None)
    _check_room(state, directory)
    return _Source(form, state, sidecar, loaded)


def _form(source: Path) -> str:
    """Returns the format of a source. Raises NotFoundError, or UsageError where it has none that is known."""
    if not source.exists():
        raise NotFoundError(f"{source}: is not there")
    if source.is_dir():
        if dcp.is_dcp(source):
            return "dcp"
        if (source / MANIFEST).exists():
            raise UsageError(f"{source}: is a checkpoint of Rekindle's already: copy it into the root as it is")
        if any(source.glob("*.safetensors")):
            return "safetensors"
    elif torchfile.is_torch(source):
        return "torch"
    elif huggingface.is_safetensors(source):
        return "safetensors"
    raise UsageError(
        f"{source}: is neither a safetensors file, nor a directory of such, nor a torch.save file (of torch 1.6 or "
        "newer), nor a directory of torch.distributed.checkpoint"
    )


def _entries(tree: Any, entry: str | None, source: Path, *, has_entries: bool) -> dict[Any, Any]:
    """Returns the state by entry. ``has_entries`` is True if the source says itself which entries it has."""
    if not isinstance(tree, Mapping):
        raise UsageError(f"{source}: holds a {type(tree).__name__}, where a dictionary of state should be")
    if has_entries:
        if entry is not None:
            raise UsageError(f"{source}: names its entries itself ({', '.join(tree)}): leave --as out")
        return dict(tree)
    if entry is not None or any(isinstance(value, torch.Tensor) for value in tree.values()):
        return {entry or _MODEL: tree}
    state = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    rest = {key: value for key, value in tree.items() if key not in state}
    if rest and _VALUES in state:
        raise UsageError(f"{source}: has {next(iter(rest))!r} beside an entry {_VALUES!r}: --as takes all as one entry")
    return state | ({_VALUES: rest} if rest else {})


def _check_room(state: Mapping[Any, Any], directory: Path) -> None:
    """Raises OSError when there is no room for the state.

    To be asked before a plan is made: for a size that a damaged source makes up, planning would not end.
    """
    flat = FlatState()
    flatten(dict(state), flat)
    sizes = {
        (leaf.data_ptr(), leaf.shape, leaf.stride()): leaf.numel() * leaf.element_size()
        for leaf in flat.tensors
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu"
    }
    needed = sum(sizes.values())
    if needed > shutil.disk_usage(directory).free:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {needed:,} bytes of tensors", str(directory))


def _assemble(
    plan: CopyPlan,
    values: bytes,
    stamp: ShardId,
    sidecar: Sidecar | None,
    directory: Path,
    progress: Callable[[int], object],
) -> tuple[Receipt, memoryview]:
    """Puts the only shard of the checkpoint together, in a file without a name. Returns its receipt and its bytes.

    Raises CorruptError when tensors differ from the checksums in the sidecar.
    """
    memory = map_scratch(directory, plan.layout.file_bytes)
    sums = _copy(plan, memory, progress)
    if sidecar is not None:
        by_name, at = {}, 0
        for chunk in plan.layout.chunks:
            count = len(block_ranges(chunk))
            by_name[chunk.name] = sums[at : at + count]
            at += count
        sidecar.compare(by_name)
    return Receipt.decode(Receipt.encode(stamp, plan.static, sums, values), f"step {stamp.step}"), memory


def _copy(plan: CopyPlan, memory: memoryview, progress: Callable[[int], object]) -> list[str]:
    """Fills ``memory`` with the shard. Returns the checksums of its blocks."""
    sums = [""] * len(plan.layout.blocks)
    buffer = memory.obj
    assert isinstance(buffer, mmap.mmap)
    writer = ShardWriter()
    try:
        for at in range(0, max(len(plan.early), 1), _BATCHES):  # once for a state without tensors: it has a header
            batches = plan.early[at : at + _BATCHES]
            _, some = writer.write(replace(plan, early=batches), buffer, None, 0)
            sums = [new or old for new, old in zip(some, sums, strict=True)]
            progress(sum(unit.nbytes for batch in batches for unit in batch.units))
    finally:
        writer.close()
    return sums
