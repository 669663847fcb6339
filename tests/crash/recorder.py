"""Writes down what is asked of the disk, in the table ``rekindle.storage.disk``. The real calls are made too.

It also lets the process that makes them die at a chosen call, or lets another one run just before it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle.storage import disk as calls
from tests.crash.disk import Data, Disk, Entry, Mark, Node, Op, Sync

__all__ = ["Killed", "Recorder"]


class Killed(BaseException):
    """The process has ended here: none of its further calls happens, not those of its clean-up either."""


class Recorder:
    """A context manager. All that lies under ``world`` when it is entered is on the disk; what lies elsewhere is not
    recorded. ``log`` has what was asked for since."""

    CALLS = tuple(name for name in calls.__all__ if name != "make_path")  # which is made of others

    def __init__(self, world: Path) -> None:
        self.world = world
        self.log: list[Op] = []
        self.calls = 0
        self.die_at: int | None = None
        """Number of the call at which the process dies, instead of making it."""
        self.before: dict[int, Callable[[], object]] = {}
        """What others do just before the call of that number."""
        self._root = _scan(world)
        self.start = Disk.settled(self._root)
        self._files: dict[int, Node] = {}
        self._at: dict[int, int] = {}
        self._lock = threading.RLock()
        self._dead = False
        self._real: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Recorder:
        for name in self.CALLS:
            self._real[name] = getattr(calls, name)
            setattr(calls, name, self._wrapped(name))
        return self

    def __exit__(self, *exc: object) -> None:
        for name, real in self._real.items():
            setattr(calls, name, real)

    def tell(self, what: object, text: str) -> None:
        """Somebody is told something."""
        if not self._dead:
            self.log.append(Mark(what, text))

    def begin(self, die_at: int | None = None, before: dict[int, Callable[[], object]] | None = None) -> None:
        """Another process. Its calls are counted from 0 on."""
        self.calls, self._dead, self.die_at, self.before = 0, False, die_at, before or {}

    def _wrapped(self, name: str) -> Callable[..., Any]:
        note: Callable[..., Any] = getattr(self, f"_{name}")
        real = self._real[name]

        def call(*args: Any) -> Any:
            with self._lock:
                number, self.calls = self.calls, self.calls + 1
                other = self.before.pop(number, None)
            if other is not None:
                other()  # it has threads of its own
                self.calls = number + 1
            with self._lock:
                if number == self.die_at:
                    self._dead = True
                if self._dead:
                    raise Killed(f"at its call {number}: {name}")
                return note(real, *args)

        return call

    # -- one for each function of the table ------------------------------------------------------------------------

    def _create(self, real: Callable[..., int], path: Path, *mode: int) -> int:
        fd = real(path, *mode)
        place = self._find(path.parent)
        if place is not None:
            there = place.names.get(path.name)
            if there is None:
                there = place.names[path.name] = Node(False, os.fstat(fd).st_ino, path.name)
                self.log.append(Entry(((place, path.name, there),), f"create {path.name}"))
            elif there.data:
                there.data.clear()
                self.log.append(Data(there, 0, None, f"empty {path.name}"))
            self._files[fd], self._at[fd] = there, 0
        return fd

    _create_new = _create

    def _open_direct(self, real: Callable[..., int], fd: int) -> int:
        other = real(fd)
        node = self._node(fd)
        if node is not None:
            self._files[other] = node
        return other

    def _write(self, real: Callable[..., int], fd: int, data: Any) -> int:
        done = real(fd, data)
        node = self._node(fd)
        if node is not None:
            self._put(node, self._at[fd], bytes(data[:done]))
            self._at[fd] += done
        return done

    def _pwrite(self, real: Callable[..., int], fd: int, data: Any, offset: int) -> int:
        done = real(fd, data, offset)
        node = self._node(fd)
        if node is not None:
            self._put(node, offset, bytes(data[:done]))
        return done

    def _allocate(self, real: Callable[..., None], fd: int, nbytes: int) -> None:
        real(fd, nbytes)
        node = self._node(fd)
        size = os.fstat(fd).st_size
        if node is not None and size != len(node.data):
            node.data.extend(bytes(size - len(node.data)))
            self.log.append(Data(node, size, None, f"allocate {node.what}"))

    _reserve = _allocate

    def _fsync(self, real: Callable[..., None], fd: int) -> None:
        real(fd)
        node = self._node(fd)
        if node is not None:
            self._catch_up(node, f"/proc/self/fd/{fd}")
            self.log.append(Sync(node, f"fsync {node.what}"))

    def _sync(self, real: Callable[..., None], path: Path) -> None:
        self._catch_up_names(path if path.is_dir() else path.parent)
        real(path)
        node = self._find(path)
        if node is not None:
            if not node.is_dir:
                self._catch_up(node, str(path))
            self.log.append(Sync(node, f"fsync {path.name}"))

    def _rename(self, real: Callable[..., None], path: Path, to: Path) -> None:
        self._catch_up_names(path.parent)
        real(path, to)
        here, there = self._find(path.parent), self._find(to.parent)
        if here is None or there is None:
            assert here is there, "nothing is renamed from or to outside"
            return
        node = here.names.pop(path.name)
        there.names[to.name] = node
        node.what = to.name
        text = f"rename {path.name} to {to.name}"
        gone, come = (here, path.name, None), (there, to.name, node)
        if here is there or node.is_dir:
            self.log.append(Entry((gone, come), text))
        else:
            self.log += [Entry((come,), f"{text} (there)"), Entry((gone,), f"{text} (gone from here)")]

    def _link(self, real: Callable[..., None], path: Path, to: Path) -> None:
        real(path, to)
        here, there = self._find(path.parent), self._find(to.parent)
        if here is not None and there is not None:
            node = there.names[to.name] = here.names[path.name]
            self.log.append(Entry(((there, to.name, node),), f"link {path.name} to {to.name}"))

    def _unlink(self, real: Callable[..., None], path: Path) -> None:
        self._catch_up_names(path.parent)
        real(path)
        self._drop(path, "unlink")

    def _rmdir(self, real: Callable[..., None], path: Path) -> None:
        real(path)
        self._drop(path, "rmdir")

    def _mkdir(self, real: Callable[..., None], path: Path) -> None:
        real(path)
        place = self._find(path.parent)
        if place is not None and path.name not in place.names:
            node = place.names[path.name] = Node(True, what=path.name)
            self.log.append(Entry(((place, path.name, node),), f"mkdir {path.name}"))

    # -- what it takes ---------------------------------------------------------------------------------------------

    def _find(self, path: Path) -> Node | None:
        """What lies there; None if that is outside of the world."""
        try:
            parts = path.relative_to(self.world).parts
        except ValueError:
            return None
        node: Node | None = self._root
        for part in parts:
            node = node.names.get(part) if node is not None else None
        return node

    def _node(self, fd: int) -> Node | None:
        node = self._files.get(fd)  # numbers of closed files are used again
        return node if node is not None and os.fstat(fd).st_ino == node.inode else None

    def _put(self, node: Node, at: int, data: bytes) -> None:
        node.data.extend(bytes(max(0, at + len(data) - len(node.data))))
        node.data[at : at + len(data)] = data
        self.log.append(Data(node, at, data, f"write {len(data)} at {at} of {node.what}"))

    def _drop(self, path: Path, how: str) -> None:
        place = self._find(path.parent)
        if place is not None and place.names.pop(path.name, None) is not None:
            self.log.append(Entry(((place, path.name, None),), f"{how} {path.name}"))

    def _catch_up(self, node: Node, path: str) -> None:
        """What has come into a file by a mapping, or by other hands: it was written at some time before."""
        content = Path(path).read_bytes()
        if content != node.data:
            if len(content) < len(node.data):
                self.log.append(Data(node, len(content), None, f"cut {node.what}"))
            node.data = bytearray(content)
            self.log.append(Data(node, 0, content, f"store into {node.what}"))

    def _catch_up_names(self, directory: Path) -> None:
        """Files that other hands (torch's) have made."""
        place = self._find(directory)
        if place is None:
            return
        there = {entry.name: entry for entry in os.scandir(directory)}
        for name in place.names.keys() - there.keys():
            del place.names[name]
            self.log.append(Entry(((place, name, None),), f"unlink {name}"))
        for name in there.keys() - place.names.keys():
            node = place.names[name] = Node(there[name].is_dir(), there[name].inode(), name)
            self.log.append(Entry(((place, name, node),), f"create {name}"))
            if node.is_dir:
                self._catch_up_names(directory / name)
            else:
                self._catch_up(node, str(directory / name))


def _scan(path: Path) -> Node:
    node = Node(path.is_dir(), path.stat().st_ino, path.name)
    if node.is_dir:
        for entry in sorted(path.iterdir()):
            node.names[entry.name] = _scan(entry)
    else:
        node.data = bytearray(path.read_bytes())
    return node
