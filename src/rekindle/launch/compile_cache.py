"""Puts the caches of compilers in the job's memory, and brings there what storage has of them, before ranks compile.

The agent carries what is new to storage (``agent/compile_carrier.py``). Compilers run what they find in a cache, so all
of this is asked for by name. Whatever goes wrong costs compilation and one line, never a start.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rekindle.common.os_errors import describe_error, explain
from rekindle.common.timeouts import check_timeout, with_timeout
from rekindle.errors import RekindleError
from rekindle.format.names import canonical_root
from rekindle.launch.reports import reported_roots
from rekindle.launch.toolchain import toolchain_name
from rekindle.memory.compile_dir import CompileDir
from rekindle.memory.job_dir import memory_base
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
        self._directory = CompileDir.of(self._root, self._base)
        self._toolchain = ""
        self._used: int | None = None
        """Descriptor that keeps the directory from removal, until the process ends."""

    def load(self, timeout: float = _FETCH_WITHIN) -> int:
        """Puts the caches in place and sets the environment variables that lead there.

        To be called by each rank, before the first compilation, and before ``jax`` is imported. Returns the number of
        entries that storage had and this node had not. It waits ``timeout`` seconds for storage. Whatever fails is
        logged in one line, and compiled anew.
        """
        if self._used is None:
            atexit.register(self._release)
        return self._load(check_timeout(timeout), log.info, log.warning)

    def _load(self, timeout: float, tell: Callable[[str], object], warn: Callable[[str], object]) -> int:
        fetched = _Fetched()
        try:
            if self._used is None:
                self._toolchain = toolchain_name()
                self._used = self._directory.use(self._toolchain)
            fetched.troubles += _set_variables(self._directory.path / self._toolchain)
            packs = Packs(self._root, self._toolchain)
            with_timeout(timeout, packs.where, lambda: _fetch(packs, self._directory, fetched))
        except Exception as error:  # a cache is never worth a start
            known = isinstance(error, OSError | RekindleError)
            fetched.troubles.append(explain(error) if known else f"{type(error).__name__}: {describe_error(error)}")
        if line := fetched.describe():
            (warn if fetched.troubles else tell)(f"compile cache of {self._root}: {line}")
        return fetched.entries

    def _release(self) -> None:
        """Lets go of the directory, which is removed unless somebody still needs it."""
        if self._used is not None:
            os.close(self._used)
            self._used = None
            with suppress(OSError):
                CompileDir.remove_abandoned(self._base)

    def _remove_torn(self) -> None:
        if self._used is not None:
            with suppress(OSError):
                self._directory.remove_torn(self._toolchain)


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
            say(f"the compile cache of {cache._root} stays on this node: no rank here has saved to this root")
    finally:
        cache._release()


@dataclass
class _Fetched:
    """Tells what a start has found on storage."""

    entries: int = 0
    nbytes: int = 0
    troubles: list[str] = field(default_factory=list)
    """Reasons why something is compiled anew."""

    def describe(self) -> str:
        """Returns the line that tells of it; an empty one where nothing came and nothing went wrong."""
        came = [f"{self.entries} entries ({self.nbytes / 1e6:.1f} MB) came from storage"] if self.entries else []
        anew = ": kernels without an entry are compiled anew" if self.troubles else ""
        return "; ".join(came + self.troubles) + anew


def _set_variables(directory: Path) -> list[str]:
    """Leads the compilers to ``directory``. Says which variables lead elsewhere already, and stay."""
    wanted = {
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        "CUDA_CACHE_PATH": str(directory / "cuda"),
        "JAX_COMPILATION_CACHE_DIR": str(directory / "jax"),
        "MS_COMPILER_CACHE_ENABLE": "1",
        "MS_COMPILER_CACHE_PATH": str(directory / "mindspore"),
    }
    if _is_torchs_own(os.environ.get("TORCHINDUCTOR_CACHE_DIR")):
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    others = [name for name, value in wanted.items() if os.environ.setdefault(name, value) != value]
    return [f"what is kept elsewhere, by {' and '.join(others)}, is not carried"] if others else []


def _is_torchs_own(directory: str | None) -> bool:
    """True if torch has set its variable itself, as it does in the launcher's process, for ranks to inherit."""
    if directory is None:
        return False
    with suppress(ImportError):
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # noqa: PLC0415

        return directory == os.path.abspath(default_cache_dir())
    return False


def _fetch(packs: Packs, directory: CompileDir, fetched: _Fetched) -> None:
    """Brings the entries that this node lacks. Ranks of one node do so one after the other."""
    lock = Lock(directory.path / ".fetch")
    lock.acquire(_FETCH_WITHIN)
    try:
        found, have = packs.list(), set(directory.files(packs.toolchain))
        if packs.others and not found and not have:
            more = ", ..." if len(packs.others) > _SHOWN else ""
            fetched.troubles.append(f"all there is was compiled by others ({', '.join(packs.others[:_SHOWN])}{more})")
        room, damaged = directory.room(), len(packs.damaged)
        for pack in found:  # the newest first, which counts where several have an entry
            nbytes = {entry.path: entry.size for entry in pack.entries if entry.path not in have}
            room -= sum(nbytes.values())
            if room < 0:
                fetched.troubles.append("memory has no room for more")
                break
            if nbytes:
                damaged += _unpack(packs, pack, directory, have, fetched)
        if damaged:
            fetched.troubles.append(f"{damaged} damaged entries or packs are left out and removed")
        for name in packs.damaged:
            with suppress(OSError):  # it is met again, and left out again
                packs.remove(name)
    finally:
        lock.release()


def _unpack(packs: Packs, pack: Pack, directory: CompileDir, have: set[str], fetched: _Fetched) -> int:
    """Puts those entries of a pack in place that the node doesn't ``have``. Returns the number that is damaged."""
    damaged = 0
    for entry, data in packs.read(pack):
        if data is None:
            damaged += 1
        elif entry.path not in have:
            directory.put(packs.toolchain, entry.path, data)
            have.add(entry.path)
            fetched.entries += 1
            fetched.nbytes += len(data)
    if damaged:
        packs.damaged.append(pack.name)
    return damaged
