"""Writes and reads a directory of torch.distributed.checkpoint (DCP), in its own file format and with its own names."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rekindle.errors import CorruptError, UnsupportedValueError, UsageError
from rekindle.format.fields import check_integer, check_integers
from rekindle.format.layout import DTYPES, MAX_DIMENSIONS
from rekindle.state.codec import encode, is_plain
from rekindle.state.tree import assemble
from rekindle.transfer.progress import Progress
from rekindle.transfer.shards import Shards
from rekindle.transfer.sidecar import SIDECAR, Sidecar
from rekindle.transfer.staging import lay_out, map_scratch, os_error, tensor_view

__all__ = ["DcpSource", "is_dcp", "write"]

_METADATA = ".metadata"


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, progress: Callable[[int], object]) -> None:
        super().__init__()
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor):
            self._progress(data.nbytes)
        return data


@contextmanager
def _without_group_warning() -> Iterator[None]:
    """Silences DCP's warning that there is no process group, as none is needed here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _cause(error: CheckpointException) -> BaseException:
    """Returns the error behind DCP's own exception, which is no Exception and has a traceback for a text."""
    return next((cause for cause, _ in error.failures.values()), error)


def write(shards: Shards, directory: Path, only: str | None, progress: Progress) -> None:
    """Fills an empty directory with the state, or with its entry ``only``."""
    Sidecar.check_names(shards)
    progress.begin(shards.reads + shards.nbytes)
    tensors, places = shards.gather(directory.parent, progress.advance)
    values = [value if is_plain(value) else encode(value) for value in shards.values]
    tree = assemble(_tuples_as_lists(shards.structure), values, tensors.__getitem__, allow_pickle=False)
    if only is not None:
        tree = tree[only]
    if not isinstance(tree, dict):
        raise UnsupportedValueError(f"the state's entry {only!r} is no dictionary, so DCP has no names for its values")
    # One thread: with several, DCP loses the errors of all but the first.
    writer = FileSystemWriter(directory, thread_count=1)
    try:
        with _without_group_warning():
            save(tree, storage_writer=writer, planner=_SavePlanner(progress.advance))
    except CheckpointException as error:
        cause = _cause(error)
        if isinstance(cause, ValueError):  # DCP has one name for two places in the state
            raise UnsupportedValueError(f"step {shards.copy.step}: DCP can't name its state: {cause}") from error
        raise os_error(cause) or cause from error
    Sidecar.of(shards, places, directory / SIDECAR).write(shards.copy.stamp)


def _tuples_as_lists(node: Any) -> Any:
    """Returns the structure with lists for the tuples that hold tensors: DCP would pickle such a tuple as one value."""
    if isinstance(node, list):
        return [_tuples_as_lists(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "$tuple" in node and _has_tensor(node):
        return [_tuples_as_lists(item) for item in node["$tuple"]]
    return {key: _tuples_as_lists(child) for key, child in node.items()}


def _has_tensor(node: Any) -> bool:
    children = node if isinstance(node, list) else node.values() if isinstance(node, dict) else ()
    return (isinstance(node, dict) and "$tensor" in node) or any(map(_has_tensor, children))


# -- reading ---------------------------------------------------------------------------------------------------------


def is_dcp(path: Path) -> bool:
    """True if a directory is a checkpoint of DCP."""
    return (path / _METADATA).is_file()


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, progress: Callable[[int], object]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._progress = progress

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._progress(tensor.nbytes)


class DcpSource:
    """A DCP directory to import. Creating one reads the metadata only."""

    def __init__(self, path: Path, *, allow_pickle: bool) -> None:
        if not allow_pickle:
            raise UsageError(
                f"{path}: is a DCP checkpoint, whose metadata and values are pickles: loading it runs code that "
                "whoever wrote it has chosen. Where you trust it, --allow-pickle allows it"
            )
        self._path = path
        self._reader = FileSystemReader(path)
        self.sidecar = Sidecar.read(path / SIDECAR)
        try:
            self._metadata: Metadata = self._reader.read_metadata()
            self._kept = dict(self._metadata.state_dict_metadata)
            self._tensors = {k: kept for k, kept in self._kept.items() if isinstance(kept, TensorStorageMetadata)}
            for kept in self._tensors.values():
                check_integers(list(kept.size), MAX_DIMENSIONS)
                check_integer(math.prod(max(n, 1) for n in kept.size) * kept.properties.dtype.itemsize)
            for place in self._metadata.storage_data.values():
                if os.path.basename(place.relative_path) != place.relative_path:
                    raise ValueError(f"{place.relative_path} is no file beside it")
        except Exception as error:  # a pickle may raise anything
            raise CorruptError(f"{path / _METADATA}: is not readable: {error}") from error
        if self.sidecar is not None:  # DCP has tied tensors under each of their names
            noted = {entry.key for entry in self.sidecar.tensors}
            self._tensors = {key: kept for key, kept in self._tensors.items() if key in noted}
        for key, kept in self._tensors.items():
            if str(kept.properties.dtype).removeprefix("torch.") not in DTYPES:
                raise UnsupportedValueError(f"{path}: {key}: a tensor of dtype {kept.properties.dtype}")
        self._sizes = {k: kept.size.numel() * kept.properties.dtype.itemsize for k, kept in self._tensors.items()}
        self.nbytes = sum(self._sizes.values())

    def load(self, aside: Path, progress: Callable[[int], object]) -> Any:
        """Returns the state. Its tensors lie in an unnamed file in the directory ``aside``.

        DCP reads one stored piece of a tensor at a time, as a whole. Raises CorruptError.
        """
        slices, size = lay_out(self._sizes)
        memory = map_scratch(aside, size)
        tensors = {
            key: tensor_view(memory[slices[key]], kept.properties.dtype, kept.size)
            for key, kept in self._tensors.items()
        }
        state: dict[str, Any] = dict(tensors)
        if self.sidecar is None:
            state |= {key: None for key in self._kept if key not in tensors}
        try:
            with _without_group_warning():
                load(state, storage_reader=self._reader, planner=_LoadPlanner(progress))
        except CheckpointException as error:
            raise CorruptError(f"{self._path}: can't be loaded: {_cause(error)}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CorruptError(f"{self._path}: its metadata is malformed: {error}") from error
        return tensors if self.sidecar is not None else _unflatten(state, self._metadata.planner_data)


def _unflatten(flat: dict[str, Any], paths: Any) -> Any:
    """Returns ``flat`` with the dictionaries and lists that DCP flattened, where its metadata says how."""
    if not isinstance(paths, Mapping) or not paths.keys() >= flat.keys():
        return flat
    root: dict[Any, Any] = {}
    for key, value in flat.items():
        node = root
        *way, last = paths[key]
        for step in way:
            node = node.setdefault(step, {})
        node[last] = value
    return _restore_numbers({key: _numbered_as_lists(child) for key, child in root.items()})


def _numbered_as_lists(node: Any) -> Any:
    """Makes a list of a mapping whose keys are all numbers: DCP keeps those of lists, and makes texts of all others."""
    if type(node) is not dict:
        return node
    children = {key: _numbered_as_lists(child) for key, child in node.items()}
    if children and all(type(key) is int for key in children):
        return [children[number] for number in sorted(children)]
    return children


def _restore_numbers(state: dict[Any, Any]) -> dict[Any, Any]:
    """Turns the texts that DCP made of optimizers' parameter numbers into numbers again."""
    for key, entry in state.items():
        groups = entry.get("param_groups") if isinstance(entry, dict) else None
        if isinstance(groups, list) and isinstance(entry.get("state"), dict):
            named = [p for group in groups if isinstance(group, dict) for p in group.get("params", ())]
            numbers = {str(p): p for p in named if type(p) is int}
            state[key] = entry | {"state": {numbers.get(k, k): kept for k, kept in entry["state"].items()}}
    return state
