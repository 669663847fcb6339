"""Puts the caches of compilers in the job's memory, and brings there what storage has of them, before ranks compile.

The agent carries what is new to storage (``agent/compile_carrier.py``). Compilers run what they find in a cache, so all
of this is asked for by name. Whatever goes wrong costs compilation and one line, never a start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rekindle.common.os_errors import describe_error, explain
from rekindle.common.timeouts import check_timeout, with_timeout
from rekindle.errors import RekindleError
from rekindle.format.names import Root, canonical_root
from rekindle.launch.reports import reported_roots
from rekindle.launch.toolchain import toolchain_name
from rekindle.memory.compile_dir import CompileDir
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.lock import Lock
from rekindle.storage.packs import Pack, Packs

__all__ = ["CompileCache", "keep_compile_cache"]

log = logging.getLogger("rekindle")

_FETCH_WITHIN = 60.0
"""Seconds that a start waits for storage. What comes later is there for the next compilation."""
_SHOWN = 3


class CompileCache:
    """The compile caches of a job, for launchers other than ``rekindle run``, which has ``--compile-cache``.

    ::

        rekindle.CompileCache(root).load()      # before anything is compiled
        ckpt = rekindle.Checkpointer(root, state)

    The caches of Inductor, Triton, CUDA, JAX and MindSpore are kept in the job's memory, so a restart on this node
    finds them. The agent of the ``Checkpointer`` on the same root carries them to ``ROOT/compile``, where a start on
    another node finds them. They hold code that will be run: use it only with a root that nobody else can write to.
    """

    def __init__(self, root: str | os.PathLike[str], *, memory: str | os.PathLike[str] | None = None) -> None:
        """``root`` and ``memory`` are those of the job's ``Checkpointer``. Raises UsageError for what is no root."""
        self._root, self._base = canonical_root(root), memory_base(memory)
        self._used: int | None = None
        """Descriptor that keeps the directory from removal, until the process ends."""

    def load(self, timeout: float = _FETCH_WITHIN) -> int:
        """Puts the caches in place and sets the environment variables that lead there.

        To be called by each rank, before the first compilation, and before ``jax`` is imported. Returns the number of
        entries that storage had and this node had not. It waits ``timeout`` seconds for storage. Whatever fails is
        logged in one line, and compiled anew.
        """
        return self._load(check_timeout(timeout), log.info, log.warning)

    def _load(self, timeout: float, tell: Callable[[str], object], warn: Callable[[str], object]) -> int:
        fetched = _Fetched()
        try:
            toolchain, directory = toolchain_name(), CompileDir.of(self._root, self._base)
            if self._used is None:
                self._used = directory.use(toolchain)
            fetched.elsewhere = _set_variables(directory.path / toolchain)
            packs = Packs(self._root, toolchain)
            with_timeout(timeout, packs.where, lambda: _fetch(packs, directory, toolchain, fetched))
        except (OSError, RekindleError) as error:
            fetched.problem = explain(error) if isinstance(error, OSError) else str(error)
        except Exception as error:  # a cache is never worth a start
            fetched.problem = f"{type(error).__name__}: {describe_error(error)}"
        trouble, line = fetched.describe(self._root)
        if line:
            (warn if trouble else tell)(line)
        return fetched.entries

    def _release(self) -> None:
        """Lets go of the directory, and removes it if nobody is left who would."""
        if self._used is not None:
            os.close(self._used)
            self._used = None
            if not JobDir.of(self._root, self._base).path.exists():
                CompileDir.of(self._root, self._base).remove_unless_used()

    def _remove_torn(self) -> None:
        with suppress(OSError):
            CompileDir.of(self._root, self._base).remove_torn()


@contextmanager
def keep_compile_cache(root: str | None, place: Path, say: Callable[[str], object]) -> Iterator[Callable[[], object]]:
    """Keeps the compile cache of ``root`` for a launcher's ranks; without a root does nothing.

    Gives a function to be called whenever all ranks have ended: it removes what killed compilers left in pieces.
    """
    if root is None:
        yield lambda: None
        return
    cache = CompileCache(root)
    cache._load(_FETCH_WITHIN, say, say)
    try:
        yield cache._remove_torn
        if cache._used is not None and (cache._root, cache._base) not in reported_roots(place):
            say(
                f"the compile cache of {cache._root} was not carried there: no rank of this node has saved to this root"
            )
    finally:
        cache._release()


@dataclass
class _Fetched:
    """Tells what a start has found on storage."""

    entries: int = 0
    nbytes: int = 0
    damaged: int = 0
    too_large: int = 0
    """Bytes for which memory has no room."""
    others: list[str] = field(default_factory=list)
    """Toolchains that have entries, where this one has none."""
    elsewhere: list[str] = field(default_factory=list)
    """Variables that lead to other places already."""
    problem: str = ""

    def describe(self, root: Root) -> tuple[bool, str]:
        """Returns True if something is wrong, and the line that tells of it; an empty one where nothing came."""
        parts = []
        if self.elsewhere:
            parts.append(f"{', '.join(self.elsewhere)} is set already, so what is kept there is not carried")
        if self.damaged:
            parts.append(f"{self.damaged} damaged entries or packs are left out and removed")
        if self.too_large:
            parts.append(f"{self.too_large / 1e6:.1f} MB have no room in memory")
        if self.others:
            more = ", ..." if len(self.others) > _SHOWN else ""
            parts.append(f"all there is was compiled by others ({', '.join(self.others[:_SHOWN])}{more})")
        if self.problem:
            parts.append(self.problem)
        trouble = bool(parts)
        if self.entries:
            parts.insert(0, f"{self.entries} entries ({self.nbytes / 1e6:.1f} MB) came from storage")
        words = "; ".join(parts) + (": kernels without an entry are compiled anew" if trouble else "")
        return trouble, f"compile cache of {root}: {words}" if parts else ""


def _set_variables(directory: Path) -> list[str]:
    """Leads the compilers to ``directory``. Returns the variables that lead elsewhere already, which stay."""
    wanted = {
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        "CUDA_CACHE_PATH": str(directory / "cuda"),
        "JAX_COMPILATION_CACHE_DIR": str(directory / "jax"),
        "MS_COMPILER_CACHE_ENABLE": "1",
        "MS_COMPILER_CACHE_PATH": str(directory / "mindspore"),
    }
    return [name for name, value in wanted.items() if os.environ.setdefault(name, value) != value]


def _fetch(packs: Packs, directory: CompileDir, toolchain: str, fetched: _Fetched) -> None:
    """Brings the entries that this node lacks. Ranks of one node do so one after the other."""
    lock = Lock(directory.path / ".fetch")
    lock.acquire(_FETCH_WITHIN)
    try:
        found, have = packs.list(), set(directory.files(toolchain))
        fetched.damaged = len(packs.damaged)
        if not found and not have:
            fetched.others = packs.others
        for pack in found:
            wanted = {entry.path for entry in pack.entries} - have
            nbytes = sum(entry.size for entry in pack.entries if entry.path in wanted)
            if nbytes > directory.room():
                fetched.too_large += nbytes
            elif wanted:
                have |= set(_unpack(packs, pack, wanted, partial(directory.put, toolchain), fetched))
        for name in packs.damaged:
            with suppress(OSError):  # it is met again, and left out again
                packs.remove(name)
    finally:
        lock.release()


def _unpack(
    packs: Packs, pack: Pack, wanted: set[str], put: Callable[[str, bytes], object], fetched: _Fetched
) -> Iterator[str]:
    """Puts the wanted entries of a pack in place, and yields their paths. Notes a pack that is damaged."""
    damaged = 0
    for entry, data in packs.read(pack):
        if data is None:
            damaged += 1
        elif entry.path in wanted:
            put(entry.path, data)
            fetched.entries += 1
            fetched.nbytes += len(data)
            yield entry.path
    if damaged:
        packs.damaged.append(pack.name)
        fetched.damaged += damaged
