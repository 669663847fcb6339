"""What a power cut may leave of a disk, given what was asked of it: the model.

It is the weakest behaviour that programs on Linux can count on and that file systems in use may show, as worked out by
ALICE (Pillai et al., OSDI 2014) and tested for by CrashMonkey and ACE (Mohan et al., OSDI 2018). Where ext4, xfs and
btrfs differ, the one that keeps least is followed: what holds here holds on all three, and on what is built upon them.

- The power may go between any two calls, and within any of them: within is between, with parts of the call kept.
- ``fsync`` of a file keeps its bytes and its size, and nothing else: not its name, not what was written elsewhere.
- Until then each block of 4 KiB that was written is kept or not, whatever became of other blocks, before or after it;
  of a block that is written half is the rest what was there before. The size may have grown without the bytes: blocks
  then read as zeros, as those that were only allocated do, or as somebody's old bytes (ext4's data=writeback). The file
  may also end at any block, or be empty.
- ``fsync`` of a directory keeps the names in it, and nothing else: not what they lead to, not its own name.
- Until then each change of a name (a new file or directory, a rename, an unlink) is kept or not, by itself: a later one
  may be kept where an earlier one is lost, in the same directory too. btrfs does so.
- A rename within one directory is one change: both names, or neither. So is that of a directory into another one, which
  can have but one parent. All file systems with a journal or copy-on-write keep that; ext2 doesn't, so is left out.
  A rename of a file into another directory is two changes, kept by either directory's ``fsync``: the file may be there
  by both names, or by none. btrfs has done that.
- What was kept stays. A disk that lies about ``fsync``, and bits that flip, are not the matter here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

__all__ = ["BLOCK", "Data", "Disk", "Effort", "Entry", "Mark", "Node", "Op", "Sync", "Tree"]

BLOCK = 4096
_GARBAGE = bytes(range(1, 251)) * 17

Tree = dict[str, "bytes | None"]
"""A disk as one sees it: contents by path, None for a directory. A path comes after its directory."""


class Node:
    """A file or a directory, whatever it is called; ``names`` and ``data`` are what a running system sees."""

    def __init__(self, is_dir: bool, inode: int = 0, what: str = "") -> None:
        self.is_dir = is_dir
        self.inode = inode
        self.what = what
        self.names: dict[str, Node] = {}
        self.data = bytearray()


@dataclass(frozen=True)
class Entry:
    """A change of names, kept as a whole or not at all."""

    changes: tuple[tuple[Node, str, Node | None], ...]
    text: str


@dataclass(frozen=True)
class Data:
    """Bytes written, or with None a new size: what is added reads as zeros."""

    node: Node
    at: int
    data: bytes | None
    text: str


@dataclass(frozen=True)
class Sync:
    node: Node
    text: str


@dataclass(frozen=True)
class Mark:
    """Something that was told to somebody at this moment, such as that a checkpoint is durable."""

    what: object
    text: str


Op = Entry | Data | Sync | Mark


@dataclass(frozen=True)
class Effort:
    """How many of the legal states are looked at, where these are too many."""

    subsets: int
    """Up to so many changes of names that may be lost or kept, all subsets of them. Of more: none, all, all but one or
    two, only one or two, and the first so many."""
    every_block: bool
    """Each block kept alone and lost alone, and each size; else the ends of the file only."""


@dataclass
class Disk:
    """The states that a disk may be in, while operations come one by one."""

    root: Node
    names: dict[Node, dict[str, Node]] = field(default_factory=dict)
    data: dict[Node, bytes] = field(default_factory=dict)
    pending: list[Entry] = field(default_factory=list)
    dirty: dict[Node, list[Data]] = field(default_factory=dict)
    bounded: int = 0
    """How many times there were more subsets than are looked at."""
    _variants: dict[tuple[Node, int, bool], list[bytes]] = field(default_factory=dict)

    @staticmethod
    def settled(root: Node) -> Disk:
        """A disk on which all that ``root`` has is kept."""
        disk = Disk(root)
        todo = [root]
        while todo:
            node = todo.pop()
            if node.is_dir:
                disk.names[node] = dict(node.names)
                todo += node.names.values()
            else:
                disk.data[node] = bytes(node.data)
        return disk

    def apply(self, op: Op) -> None:
        if isinstance(op, Entry):
            self.pending.append(op)
        elif isinstance(op, Data):
            self.dirty.setdefault(op.node, []).append(op)
        elif isinstance(op, Sync) and op.node.is_dir:
            for entry in self.pending:
                if any(directory is op.node for directory, _, _ in entry.changes):
                    _enter(self.names, entry)
            self.pending = [e for e in self.pending if all(d is not op.node for d, _, _ in e.changes)]
            self._forget()
        elif isinstance(op, Sync):
            writes = self.dirty.pop(op.node, [])
            self.data[op.node] = _written(self.data.get(op.node, b""), writes)
            for key in [key for key in self._variants if key[0] is op.node]:
                del self._variants[key]

    def _forget(self) -> None:
        """What is in a directory that is gone for good is of no matter any more."""
        names = {node: list(entries.values()) for node, entries in self.names.items()}
        for entry in self.pending:
            for directory, _, node in entry.changes:
                if node is not None:
                    names.setdefault(directory, []).append(node)
        found, todo = {self.root}, [self.root]
        while todo:
            new = set(names.get(todo.pop(), ())) - found
            found |= new
            todo += new
        self.pending = [e for e in self.pending if any(d in found for d, _, _ in e.changes)]
        self.names = {node: entries for node, entries in self.names.items() if node in found}
        self.dirty = {node: writes for node, writes in self.dirty.items() if node in found}

    def states(self, effort: Effort, last: Op | None = None) -> Iterator[tuple[Tree, str]]:
        """Every state, and in words what became of what wasn't synced.

        With ``last``, the operation that came last, only those that may not have been before it.
        """
        if isinstance(last, Sync):
            return  # it only rules out some
        for kept in self._subsets(effort, last):
            names = {node: dict(entries) for node, entries in self.names.items()}
            for entry in kept:
                _enter(names, entry)
            lost = [entry.text for entry in self.pending if entry not in kept]
            only = last.node if isinstance(last, Data) else None
            yield from self._with_data(names, effort, f"lost: {', '.join(lost) or 'no name'}", only)

    def _subsets(self, effort: Effort, last: Op | None) -> Iterator[tuple[Entry, ...]]:
        fixed = self.pending[-1:] if isinstance(last, Entry) else []
        free = self.pending[: len(self.pending) - len(fixed)]
        if len(free) <= effort.subsets:
            sizes: Iterable[int] = range(len(free) + 1)
            chosen = itertools.chain.from_iterable(itertools.combinations(free, size) for size in sizes)
        else:
            self.bounded += 1
            sizes = (0, 1) if isinstance(last, Data) else (0, 1, 2)
            few = [some for size in sizes for some in itertools.combinations(free, size)]
            most = [tuple(e for e in free if e not in some) for some in few]
            chosen = itertools.chain(few, most, (tuple(free[:n]) for n in range(len(free))))
        for some in chosen:
            yield (*some, *fixed)

    def _with_data(
        self, names: dict[Node, dict[str, Node]], effort: Effort, why: str, only: Node | None
    ) -> Iterator[tuple[Tree, str]]:
        tree: Tree = {}
        files: dict[Node, list[str]] = {}
        _walk(self.root, "", names, tree, files)
        if only is not None and only not in files:
            return
        for node, paths in files.items():
            for path in paths:
                tree[path] = self.data.get(node, b"")
        unsure = {node: self._contents(node, effort) for node in files if node in self.dirty}
        count = 1
        for variants in unsure.values():
            count *= len(variants)
        if count <= 32:
            choices: Iterable[tuple[bytes, ...]] = itertools.product(*unsure.values())
        else:
            self.bounded += 1
            choices = _one_by_one(list(unsure.values()))
        for contents in choices:
            state, said = dict(tree), why
            for node, content in zip(unsure, contents, strict=True):
                for path in files[node]:
                    state[path] = content
                    said += f"; {path}: {_described(content, bytes(node.data))}"
            yield state, said

    def _contents(self, node: Node, effort: Effort) -> list[bytes]:
        """All that may be found in a file that was written and not synced. First nothing new, then all of it."""
        writes = self.dirty[node]
        key = node, len(writes), effort.every_block
        if key not in self._variants:
            old = self.data.get(node, b"")
            self._variants[key] = list(dict.fromkeys(_contents(old, writes, effort.every_block)))
        return self._variants[key]


def _enter(names: dict[Node, dict[str, Node]], entry: Entry) -> None:
    for directory, name, node in entry.changes:
        here = names.setdefault(directory, {})
        if node is None:
            here.pop(name, None)
        else:
            here[name] = node


def _walk(node: Node, path: str, names: dict[Node, dict[str, Node]], tree: Tree, files: dict[Node, list[str]]) -> None:
    for name, child in names.get(node, {}).items():
        below = f"{path}/{name}" if path else name
        if child.is_dir:
            tree[below] = None
            _walk(child, below, names, tree, files)
        else:
            files.setdefault(child, []).append(below)


def _written(old: bytes, writes: Iterable[Data]) -> bytes:
    content = bytearray(old)
    for op in writes:
        if op.data is None:
            del content[op.at :]
            content.extend(bytes(op.at - len(content)))
        else:
            content.extend(bytes(max(0, op.at + len(op.data) - len(content))))
            content[op.at : op.at + len(op.data)] = op.data
    return bytes(content)


def _contents(old: bytes, writes: list[Data], every_block: bool) -> Iterator[bytes]:
    new = _written(old, writes)
    yield old
    yield new
    base = _written(old, [op for op in writes if op.data is None])
    base = base + bytes(max(0, len(new) - len(base)))  # the size has come, the bytes have not
    yield base
    yield (_GARBAGE * (len(new) // len(_GARBAGE) + 1))[: len(new)]
    starts = list(range(0, len(new), BLOCK))
    for number, at in enumerate(starts):
        if not every_block and number not in (0, len(starts) - 1):
            continue
        stop = min(at + BLOCK, len(new))
        half = at + (stop - at) // 2
        yield new[:at] + base[at:stop] + new[stop:]  # this block is lost
        yield new[:half] + base[half:]  # torn, and nothing behind it
        if every_block:
            yield base[:at] + new[at:stop] + base[stop:]  # only this block is there
            yield new[:at]  # cut off
            yield new[:half] + base[half:stop] + new[stop:]
    if every_block:
        for count in range(1, len(writes)):
            yield _written(old, writes[:count])


def _one_by_one(variants: list[list[bytes]]) -> Iterator[tuple[bytes, ...]]:
    """All files without what is new, or all with it, but for one that goes through all that it may be."""
    for base in (0, 1):
        plain = [options[min(base, len(options) - 1)] for options in variants]
        for index, options in enumerate(variants):
            for option in options:
                yield tuple(option if i == index else p for i, p in enumerate(plain))


def _described(content: bytes, live: bytes) -> str:
    if content == live:
        return "whole"
    if not content:
        return "empty"
    if not content.strip(b"\0"):
        return f"{len(content)} zeros"
    same = sum(content[at : at + BLOCK] == live[at : at + BLOCK] for at in range(0, len(live), BLOCK))
    return f"{len(content)} of {len(live)} bytes, {same} block(s) as written"
