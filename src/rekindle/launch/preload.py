"""Loads what a script imports, ahead of it and out of its way, and knows when that would not be the same.

A module may be loaded ahead if it is installed (the script's own code never runs early) and if its import leaves behind
nothing but Python objects: it read no variable that differs from start to start and set none, opened no file or device,
started no process, and left no thread, for a thread is not in a forked process.
"""

from __future__ import annotations

import importlib
import os
import signal
import site
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Preload", "UnfitModuleError", "fork", "installed_roots", "is_installed"]

_READ_IN_C = ("GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_")
"""Beginnings of variables that libraries read when they are loaded, which Python can't see."""
_READ_LATER = ("TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that count only once a device or a compiler is used. Torch sets the last one itself, at each use."""

_ENDS_WITHIN = 1.0
"""Seconds that a thread gets to end which was told to. On a busy machine the kernel lists it for a while."""


_SEARCHES = {"networkx": b"NETWORKX_", "tqdm": b"TQDM_"}
"""Packages that search the whole environment for variables of their own, and keep no others. Torch's compiler loads
both."""


class UnfitModuleError(Exception):
    """A part of a package that can't be loaded ahead, ``args[0]``, and the reason."""


class _ReadNames(dict[bytes, bytes]):
    """Environment that remembers which variables were asked for."""

    def __init__(self, environment: dict[bytes, bytes]) -> None:
        super().__init__(environment)
        self.names: set[bytes] = set()
        self.all_read = False

    def __getitem__(self, name: bytes) -> bytes:
        if name.startswith(_SEARCHES.get(_reader(), b"")):
            self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, bytes):
            self.names.add(name)
        return super().__contains__(name)

    def __iter__(self) -> Iterator[bytes]:
        self.all_read |= _reader() not in _SEARCHES
        return super().__iter__()


def _reader() -> str:
    """Returns the package whose code reads the environment now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__")).partition(".")[0]


class Preload:
    """Modules loaded ahead of the script, and what their imports have read."""

    def __init__(self, script_dir: Path, variable: set[str], without: set[str]) -> None:
        """Begin with nothing loaded. ``variable`` names the variables that differ from start to start."""
        self._roots = installed_roots()
        self._script_dir = script_dir
        self._variable = variable
        self._without = without
        self._files: dict[str, tuple[int, int, int]] = {}
        self._tried: set[str] = set()
        self._read: set[str] = set()
        self._began = dict(os.environb)
        self._descriptors = _descriptors()

    def load(self, modules: dict[str, str], between: Callable[[], None]) -> None:
        """Import those of ``modules`` (files by name) that may be, and call ``between`` after each import.

        Raises UnfitModuleError when one can't be loaded ahead: the process then has to begin anew without it.
        """
        for name, file in modules.items():
            if name in self._tried or not self._is_installed(name, file):
                continue
            self._tried.add(name)
            with self._watched(_part(name), modules):
                importlib.import_module(name)
            between()

    def _is_installed(self, name: str, file: str) -> bool:
        if name.partition(".")[0] in self._without or _part(name) in self._without:
            return False
        return is_installed(file, self._script_dir, self._roots)

    @contextmanager
    def _watched(self, package: str, expected: dict[str, str]) -> Iterator[None]:
        """Runs one import, and raises UnfitModuleError if it left more than objects behind."""
        environment: Any = os.environ
        plain = environment._data
        watching = environment._data = _ReadNames(plain)
        loaded = set(sys.modules)
        try:
            with suppress(Exception, SystemExit):  # what fails here fails in the script too, and there it is said
                yield
        finally:
            plain.clear()
            plain.update(dict.items(watching))
            environment._data = plain
        if _end_children():
            raise UnfitModuleError(package, "its import starts a process")
        self._read |= {os.fsdecode(name) for name in watching.names}
        told = sorted(self._variable & self._read)
        if watching.all_read or told:
            reads = "the whole environment" if watching.all_read else told[0]
            raise UnfitModuleError(package, f"its import reads {reads}")
        if _descriptors() - self._descriptors:
            raise UnfitModuleError(package, "its import opens a file or device")
        if _has_threads():
            raise UnfitModuleError(package, "its import starts a thread")
        for name in sys.modules.keys() - loaded:
            self._note_file(package, name, expected.get(name))
        now = dict(os.environb)
        changed = (key for key in self._began.keys() | now.keys() if self._began.get(key) != now.get(key))
        for variable in sorted(map(os.fsdecode, changed)):
            if not variable.startswith(_READ_LATER):
                raise UnfitModuleError(package, f"its import sets {variable}")

    def _note_file(self, package: str, name: str, expected: str | None) -> None:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is None or not spec.has_location or not spec.origin:
            return
        if expected and expected != spec.origin:
            raise UnfitModuleError(package, f"it loads {spec.origin} where the script loads {expected}")
        with suppress(OSError):
            self._files[spec.origin] = _stamp(spec.origin)

    # -- would the script's own imports have done the same? -------------------------------------------------------

    def explain_difference(self, variable: set[str], changed: set[str]) -> str:
        """Returns the reason why an import made now would not be the one that was made; empty if there is none.

        ``changed`` are the variables that the script has set itself in its last start.
        """
        if told := sorted(variable & self._read):
            return f"{told[0]} was read by an import and differs from start to start"
        for name in sorted(changed):
            if name.startswith(_READ_LATER):
                continue
            if name in self._read or name.startswith(_READ_IN_C):
                return f"the script sets {name} itself: set it for 'rekindle run', so that it holds at the imports"
        for file, stamp in self._files.items():
            try:
                if _stamp(file) == stamp:
                    continue
            except OSError:
                pass
            return f"{file} has changed"
        return ""

    @property
    def count(self) -> int:
        return len(self._files)


def is_installed(file: str, script_dir: Path, roots: set[Path]) -> bool:
    """Returns True for a file of an installed package, False for one of the script's own."""
    # The innermost folder decides: a virtual environment may lie in the script's folder, or the script in it.
    for folder in Path(file).parents:
        if folder == script_dir or folder in roots:
            return folder != script_dir
    return False


def _part(name: str) -> str:
    """Returns the part of a package that is left out with a module: torch.utils, say, and not all of torch."""
    return ".".join(name.split(".")[:2])


def installed_roots() -> set[Path]:
    """Returns the folders of installed packages, of the standard library and of Rekindle."""
    paths = sysconfig.get_paths()
    found = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])}
    return {Path(path) for path in found}


def _stamp(file: str) -> tuple[int, int, int]:
    found = os.stat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _descriptors() -> set[tuple[int, str]]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return found


def _end_children() -> bool:
    """Ends the processes that an import has started: they would not be a worker's own. True if there were any."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # a microsecond; to search takes milliseconds
    except ChildProcessError:
        return False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended; this process's own child stays until it is waited for
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)
                os.waitpid(int(path.parent.name), 0)
    return True


def fork() -> int:
    """Forks without Python's warning about threads. It comes from 3.12 on, even while OpenBLAS ends its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _has_threads() -> bool:
    """True if there is a thread that a fork would leave behind.

    OpenBLAS, which NumPy brings, has threads from its import on. It ends them itself before a fork and starts them
    again when they are needed, so they count only if a fork leaves them.
    """
    if threading.active_count() > 1:
        return True
    if len(os.listdir("/proc/self/task")) == 1:
        return False
    child = fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    until = time.monotonic() + _ENDS_WITHIN
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > until:
            return True
        time.sleep(0.01)
    return False
