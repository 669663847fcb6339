"""Finds the model in a checkpoint by the names of its weights, and shows receipts as if it were all that was saved."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from rekindle.errors import NotFoundError, RekindleError, UsageError
from rekindle.format.files import Files
from rekindle.format.receipt import Receipt
from rekindle.format.shard import OpenShard
from rekindle.state.tree import entries, path_of, paths_in

__all__ = ["MODEL", "ModelEntry", "ModelFiles"]

MODEL = "model"
"""Name by which a narrowed receipt has the model, and by which most states have it."""
_DEEPEST = 2
"""Levels of dictionaries around the model's own: a state of torch.distributed.checkpoint may have one more."""
_SHOWN = 12
"""Most names that a message lists."""


class ModelEntry:
    """The entry of one checkpoint's state that has a model. Chosen at the first receipt, which is this rank's own."""

    def __init__(self, wanted: str | None, live: Collection[str]) -> None:
        """``wanted`` is its path, if the user gave that. ``live`` are the names of the live model's tensors."""
        self._wanted, self._live = wanted, live
        self.path: str | None = None
        """Path of the entry, such as "model"; None while it isn't chosen, and where there is none."""
        self.problem: RekindleError | None = None
        """Reason why none was chosen."""

    def narrow(self, receipt: Receipt) -> Receipt:
        """Returns the receipt with the model as its only entry, without values of others. Its layout stays."""
        found = dict(_dictionaries(receipt.structure))
        if self.path is None and self.problem is None:
            self._choose(found, list(entries(receipt.structure)))
        body = found.get(self.path) if self.path is not None else None
        if body is None:
            return replace(receipt, structure={}, values=[])
        if self.path == "":  # beside other things, none of which is a tensor
            body = {key: child for key, child in entries(body).items() if key in self._live or _is_tensor(child)}
        used = {number for _, number in paths_in(body)}
        values = [value if number in used else None for number, value in enumerate(receipt.values)]
        return replace(receipt, structure={MODEL: body}, values=values)

    def _choose(self, found: dict[str, Any], top: list[Any]) -> None:
        """Chooses the wanted entry, else the one with the most of the live names; of several the one called "model"."""
        names = {
            path: sum(key in self._live for key, child in entries(node).items() if _is_tensor(child))
            for path, node in found.items()
        }
        most = max(names.values(), default=0)
        best = [path for path, count in names.items() if count == most and count]
        if self._wanted is not None:
            self.path = self._wanted if self._wanted in found else None
        elif len(best) == 1:
            self.path = best[0]
        elif MODEL in (best or found):
            self.path = MODEL
        if self.path is not None:
            return
        there = ", ".join(map(repr, top[:_SHOWN])) or "nothing"
        if self._wanted is not None:
            self.problem = NotFoundError(f"the checkpoint has no entry {self._wanted!r} in its state: it has {there}")
        elif best:
            self.problem = UsageError(
                f"several entries of the state have the model's weights, so name one: entry={best[0]!r}, or another of "
                f"{', '.join(map(repr, best[1:]))}"
            )
        else:
            self.problem = NotFoundError(
                f"no entry of the checkpoint's state has a weight of the model: it has {there}"
            )


class ModelFiles(Files):
    """The files of a copy of a checkpoint, whose receipts tell of the model alone."""

    def __init__(self, files: Files, entry: ModelEntry) -> None:
        self._files, self._entry = files, entry

    def __str__(self) -> str:
        return str(self._files)

    def read(self, name: str) -> bytes:
        return self._files.read(name)

    def exists(self, name: str) -> bool:
        return self._files.exists(name)

    def size(self, name: str) -> int:
        return self._files.size(name)

    def named(self, name: str) -> str:
        return self._files.named(name)

    def shard(self, rank: int, world: int) -> OpenShard:
        shard = self._files.shard(rank, world)
        try:
            shard.receipt = self._entry.narrow(shard.receipt)
        except BaseException:
            shard.close()
            raise
        return shard


def _dictionaries(node: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields path and structure of the dictionaries of a state, the outermost one first."""
    children = entries(node)
    if not depth or (children and not _is_tensor(node)):
        yield path, node
    for key, child in children.items() if depth < _DEEPEST else ():
        yield from _dictionaries(child, path_of(path, key), depth + 1)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, dict) and "$tensor" in node
