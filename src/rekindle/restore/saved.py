"""Reads the receipts of a checkpoint together: each rank's own, and, where that lacks something, another's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rekindle.errors import FormatError
from rekindle.format.layout import Chunk
from rekindle.format.receipt import Receipt
from rekindle.state.codec import decode
from rekindle.state.tree import entries

__all__ = ["Node", "Saved"]


class Node(NamedTuple):
    """A part of the structure, and the receipt that it is in, which holds the values of its leaves."""

    body: Any
    receipt: Receipt


class Saved:
    """Receipts of one checkpoint, this rank's own first. Others may be added."""

    def __init__(self, home: Receipt) -> None:
        self.receipts: list[Receipt] = []
        self._chunks: dict[str, Chunk] = {}
        self._own: set[str] = set()
        self.conflicts: list[str] = []
        """Sentences about tensors that ranks describe differently."""
        self._entries: list[dict[str, dict[Any, Any]]] = []
        self._groups: list[dict[str, dict[Any, Any]]] = []
        self.add(home)

    @property
    def home(self) -> Receipt:
        """This rank's own receipt."""
        return self.receipts[0]

    def add(self, receipt: Receipt) -> None:
        """Adds another rank's receipt. A tensor that it describes otherwise than those before goes to ``conflicts``."""
        self.receipts.append(receipt)
        for chunk in receipt.layout.chunks:
            known = self._chunks.setdefault(chunk.name, chunk)
            if (known.dtype, known.global_shape) != (chunk.dtype, chunk.global_shape) and not chunk.own:
                self.conflicts.append(
                    f"{chunk.name} is {chunk.dtype}{list(chunk.global_shape)} on rank {receipt.stamp.rank} and "
                    f"{known.dtype}{list(known.global_shape)} on another"
                )
            if chunk.own:
                self._own.add(chunk.name)
        top = entries(receipt.structure)
        self._entries.append({name: entries(body) for name, body in top.items()})
        self._groups.append({})

    def kind(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Returns dtype and shape of a tensor; None while no receipt with a part of it has been added."""
        chunk = self._chunks.get(name)
        return (chunk.dtype, chunk.global_shape) if chunk is not None else None

    def chunk(self, name: str) -> Chunk | None:
        """Returns the first part of a tensor that was found, which tells how all of it lay in memory."""
        return self._chunks.get(name)

    def own(self, name: str) -> bool:
        """Returns True if each rank had one of its own."""
        return name in self._own

    def entry(self, name: str) -> Node | None:
        """Returns an entry of the state, from the first receipt that has it."""
        for receipt in self.receipts:
            body = entries(receipt.structure).get(name)
            if body is not None:
                return Node(body, receipt)
        return None

    def children(self, name: str) -> Iterator[Any]:
        """Iterates over the keys of an entry on this rank."""
        return iter(self._entries[0].get(name, {}))

    def child(self, name: str, key: Any) -> Node | None:
        """Returns the child at ``key`` of an entry that is a dictionary, from the first receipt that has it."""
        for receipt, tops in zip(self.receipts, self._entries, strict=True):
            body = tops.get(name, {}).get(key)
            if body is not None:
                return Node(body, receipt)
        return None

    # -- optimizers ---------------------------------------------------------------------------------------------

    def kept(self, name: str, parameter: Any) -> Node | None:
        """Returns the state that an optimizer keeps of a parameter; None if no receipt has any."""
        for receipt, tops in zip(self.receipts, self._entries, strict=True):
            body = entries(tops.get(name, {}).get("state")).get(parameter)
            if body is not None:
                return Node(body, receipt)
        return None

    def group_of(self, name: str, parameter: Any) -> Node | None:
        """Returns the group that a parameter was in."""
        for receipt, tops, known in zip(self.receipts, self._entries, self._groups, strict=True):
            if name not in known:
                groups = tops.get(name, {}).get("param_groups") or []
                known[name] = {key: group for group in groups for key in _params(group, receipt)}
            if parameter in known[name]:
                return Node(known[name][parameter], receipt)
        return None

    def parameters(self, name: str) -> list[Any]:
        """Lists the parameters that an optimizer had on this rank, in its order."""
        groups = self._entries[0].get(name, {}).get("param_groups") or []
        return [key for group in groups for key in _params(group, self.home)]

    def beside(self, name: str) -> Iterator[tuple[Any, Node]]:
        """Iterates over the state that an optimizer kept on this rank and that belongs to no parameter."""
        known = set(self.parameters(name))
        for key, body in entries(self._entries[0].get(name, {}).get("state")).items():
            if key not in known:
                yield key, Node(body, self.home)

    def group(self, name: str, number: int) -> Node | None:
        """Returns a group by its number, for one without parameters."""
        groups = self._entries[0].get(name, {}).get("param_groups") or []
        return Node(groups[number], self.home) if number < len(groups) else None


def _params(group: Any, receipt: Receipt) -> list[Any]:
    """Returns the keys of a group's parameters. Raises FormatError where they are damaged, or can't be keys."""
    try:
        found = [decode(receipt.values[leaf["$value"]]) for leaf in entries(group).get("params") or ()]
        hash(tuple(found))
    except (KeyError, TypeError) as error:
        raise FormatError(f"an optimizer's parameters are not readable: {error!r}") from error
    return found
