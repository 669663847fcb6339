"""Writes and reads one file of torch.save, for torch.load(weights_only=True): the state as nested dictionaries."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch

from rekindle.errors import CorruptError, UnsupportedValueError, UsageError
from rekindle.state.codec import decode, encode, has_pickle, is_plain, is_typed
from rekindle.state.strides import reorder
from rekindle.state.tree import assemble
from rekindle.storage import disk
from rekindle.transfer.progress import Progress
from rekindle.transfer.shards import Shards
from rekindle.transfer.staging import os_error

__all__ = ["is_torch", "read", "write"]

_PIECE = 8 << 20
"""Bytes that are written in one go."""
_DEEPEST = 100
"""Most levels of nesting, as in a checkpoint."""


class _File(io.RawIOBase):
    """A file for torch.save, which passes a whole storage at a time: writes it piece by piece."""

    def __init__(self, fd: int, progress: Callable[[int], object]) -> None:
        self._fd, self._progress = fd, progress

    def write(self, data: Any) -> int:
        whole = rest = memoryview(data).cast("B")
        while rest:
            done = disk.write(self._fd, rest[:_PIECE])
            self._progress(done)
            rest = rest[done:]
        return len(whole)


def write(shards: Shards, path: Path, only: str | None, progress: Progress) -> None:
    """Writes the state, or its entry ``only``, to a new file."""
    values = [value if _loads_safely(value) else encode(value) for value in shards.values]
    structure = _escape_marks(shards.structure)
    empty = assemble(structure, values, lambda _: torch.empty(0), allow_pickle=False)
    why = _reason_to_refuse(empty)
    if why is not None:  # such as a dictionary's key of an unusual type
        raise UnsupportedValueError(
            f"step {shards.copy.step}: torch.load(weights_only=True) would refuse its state: {why}"
        )
    progress.begin(shards.reads + shards.nbytes)
    tensors, _ = shards.gather(path.parent, progress.advance)
    for item in shards.items:
        tensors[item.name] = reorder(tensors[item.name], item.whole.order)
    tree = assemble(structure, values, tensors.__getitem__, allow_pickle=False)
    fd = disk.create(path)
    try:
        torch.save(tree if only is None else tree[only], cast("IO[bytes]", _File(fd, progress.advance)))
    except RuntimeError as error:
        full = os_error(error)
        if full is None:
            raise
        raise full from error
    finally:
        os.close(fd)


def _escape_marks(node: Any) -> Any:
    """Adds a $ to the only key of each dictionary in the structure that would pass for a value's typed form."""
    if isinstance(node, list):
        return [_escape_marks(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "$dict" in node and len(node["$dict"]) == 1:
        ((key, child),) = node["$dict"]
        return {"$dict": [[f"${key}" if _is_marked(key) else key, _escape_marks(child)]]}
    return {key: _escape_marks(child) for key, child in node.items()}


def _is_marked(key: Any) -> bool:
    """True for the key of a value's typed form, also with more $ before it."""
    return isinstance(key, str) and key.startswith("$") and is_typed({f"${key.lstrip('$')}": None})


def _loads_safely(value: Any) -> bool:
    """True if a value can be in a file whose loading runs no code. numpy's arrays, for one, can't.

    Other values are written in their typed form: a dictionary of plain values.
    """
    if not isinstance(value, (dict, list)):
        return True
    return is_plain(value) and _reason_to_refuse(decode(value)) is None


def _reason_to_refuse(tree: Any) -> str | None:
    """Returns torch's reason for refusing to load it without running code; None when it would load it."""
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as error:
        return _first_line(error)
    return None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


# -- reading ---------------------------------------------------------------------------------------------------------


def is_torch(path: Path) -> bool:
    """True if a file begins as those of torch.save have since torch 1.6."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def read(path: Path, *, allow_pickle: bool) -> Any:
    """Returns the content of the file. Its tensors are mapped, so not read yet.

    ``allow_pickle`` is for values that were pickled in a checkpoint. Loading the file itself never runs code: raises
    UsageError when it would have to. Raises CorruptError when it isn't readable.
    """
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path}: holds more than tensors and plain values, and loading it would run code, which an import never "
            f"does: {_first_line(error)}. Where you trust it, load it yourself and torch.save() the state it holds"
        ) from error
    except OSError:
        raise
    except Exception as error:  # torch has no type for it
        raise CorruptError(f"{path}: is not readable as a torch.save file: {_first_line(error)}") from error
    _check_size(tree, path)
    return _decode_typed(tree, path, allow_pickle=allow_pickle)


def _check_size(tree: Any, path: Path) -> None:
    """Raises CorruptError for a state larger than its file, as lists that hold themselves or each other are.

    Each object takes a byte of the file or more, unless it is there by reference. Then it counts each time.
    """
    room, level, depth = path.stat().st_size, [tree], 0
    while level:
        children: list[Any] = []
        for node in level:
            if isinstance(node, (list, tuple)):
                children.extend(node)
            elif isinstance(node, Mapping):
                children.extend(node.values())
            if len(children) > room or depth > _DEEPEST:
                raise CorruptError(
                    f"{path}: is not readable: it is nested too deeply, or refers to the same objects too often"
                )
        room, level, depth = room - len(children), children, depth + 1


def _decode_typed(node: Any, path: Path, *, allow_pickle: bool) -> Any:
    """Returns the state with values instead of their typed forms."""
    kind: Any = type(node)
    if kind in (list, tuple):
        return kind(_decode_typed(item, path, allow_pickle=allow_pickle) for item in node)
    if is_typed(node):
        if has_pickle(node) and not allow_pickle:
            raise UsageError(f"{path}: holds pickled values; loading those runs code: --allow-pickle allows it")
        return decode(node, allow_pickle=allow_pickle)
    if kind is dict and len(node) == 1 and _is_marked(next(iter(node))):
        node = {key[1:]: value for key, value in node.items()}
    if kind in (dict, OrderedDict):
        return kind((key, _decode_typed(value, path, allow_pickle=allow_pickle)) for key, value in node.items())
    return node
