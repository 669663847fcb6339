"""Foresees from a script's source what it will import, for a node on which it has not run yet.

The source is only read: nothing of the script runs, and nothing is imported.
"""

from __future__ import annotations

import ast
import importlib.machinery
import itertools
import json
import re
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from rekindle.format.receipt import write_atomic
from rekindle.launch.preload import installed_roots, is_installed

__all__ = ["foresee", "write_foreseen"]

_IN_ANY_CASE = ("torch", "torch._dynamo", "rekindle.checkpointer")
"""Modules that a training script imports, also where its own source does it late. Torch's optimizers import
torch._dynamo, and ``rekindle`` the last one, when they are first used."""
_MOST_FILES = 500
_MOST_BYTES = 1 << 20
_ABOVE = 3
"""Folders above that of a script which changes sys.path, in which its own modules are looked for as well."""
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]+")
_READ_BY = {"get", "copy", "items", "keys", "values"}
"""Methods of os.environ that set nothing."""


def write_foreseen(script: Path, search: list[str], record: Path) -> bool:
    """Writes what a start would record of its imports (``faults/imports.py``). Returns False if it can't be foreseen.

    ``search`` are the folders in which Python looks for the script's modules.
    """
    try:
        modules, changed = foresee(script, search)
        told = {"modules": modules, "changed": changed, "foreseen": True}
        write_atomic(record, json.dumps(told).encode())
    except Exception:  # of any kind, by a source that nobody here has seen: the start is cold then
        return False
    return True


def foresee(script: Path, search: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the modules with their files, and the environment variables that the script's own code may set.

    Raises ValueError for a script that is not started warm later either, or if there may be modules of its own that
    are not found.
    """
    reading = _Reading(script.parent, search)
    reading.read(script, "")
    reading.read_late()
    if not reading.uses_rekindle:
        raise ValueError("it does not tell of its steps")
    for name in _IN_ANY_CASE:
        if (spec := _find(name, search)) is not None and spec.origin:
            reading.modules.setdefault(name, spec.origin)
    return reading.modules, sorted(reading.changed)


class _Reading:
    """A script and its own modules, read in the order in which they would run.

    Modules are to be loaded in that order too: the keys of compiled code depend on it (``become.py``).
    """

    def __init__(self, script_dir: Path, search: list[str]) -> None:
        self.modules: dict[str, str] = {}
        """Installed modules that are imported in any case, with their files."""
        self.changed: set[str] = set()
        """Environment variables that may be set."""
        self.uses_rekindle = False
        self._script_dir, self._search, self._roots = script_dir, search, installed_roots()
        self._read: set[Path] = set()
        self._late: deque[tuple[Path, str]] = deque()
        """Own modules that only a function imports, and the packages that they are in."""

    def read(self, path: Path, package: str) -> None:
        """Reads a module of the script's own, and those that it imports where the import is."""
        if path in self._read:
            return
        self._read.add(path)
        source = path.read_bytes()
        if len(source) > _MOST_BYTES or len(self._read) > _MOST_FILES:
            raise ValueError("the script is too long to be read ahead")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in its texts, say: Python tells of them when it runs
            tree = ast.parse(source)
        self.changed |= _variables(tree)
        if moves := b"sys.path" in source:  # most often to a folder that this one is in
            self._search = list(dict.fromkeys([*self._search, *map(str, self._script_dir.parents[:_ABOVE])]))
        for name, late in _imports(tree, package, late=False):
            self._follow(name, late=late, may_be_elsewhere=moves)

    def read_late(self) -> None:
        """Reads the modules that are imported by functions, which run after all others."""
        while self._late:
            self.read(*self._late.popleft())

    def _follow(self, name: str, *, late: bool, may_be_elsewhere: bool) -> None:
        self.uses_rekindle |= name == "rekindle"
        spec = _find(name, self._search)
        if spec is None and may_be_elsewhere and "." not in name and name not in sys.builtin_module_names:
            raise ValueError(f"{name} may be where the script itself leads Python")
        if spec is None or not spec.has_location or not spec.origin:
            return
        if is_installed(spec.origin, self._script_dir, self._roots):
            if not late:
                self.modules.setdefault(name, spec.origin)
        elif spec.origin.endswith(".py"):
            package = name if spec.submodule_search_locations else name.rpartition(".")[0]
            if late:
                self._late.append((Path(spec.origin), package))
            else:
                self.read(Path(spec.origin), package)


def _imports(node: ast.AST, package: str, *, late: bool) -> Iterator[tuple[str, bool]]:
    """Gives each name that may be a module's after its packages, and True for those that are perhaps not imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - child.level] if child.level else []
            base = ".".join(filter(None, [*parts, child.module]))
            names = [f"{base}.{alias.name}" if base else alias.name for alias in child.names]
        else:
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.If)
            yield from _imports(child, package, late=late or inner)
            continue
        for name in names:
            yield from ((outer, late) for outer in itertools.accumulate(name.split("."), "{}.{}".format))


def _find(name: str, search: list[str]) -> ModuleSpec | None:
    """Returns where a module is, without an import of its package."""
    places, found = [*search], None
    for part in name.split("."):  # by its last name: by all, a folder would be looked for in a loaded package
        found = importlib.machinery.PathFinder.find_spec(part, places) if places else None
        places = [*(found.submodule_search_locations or ())] if found is not None else []
    return found


def _variables(tree: ast.AST) -> set[str]:
    """Returns the names of all variables that a module may set: all that it names, where it sets any."""
    if not any(map(_sets, ast.walk(tree))):
        return set()
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    texts |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
    return set(filter(_VARIABLE.fullmatch, texts))


def _sets(node: ast.AST) -> bool:
    """Returns True for what may set an environment variable."""
    if isinstance(node, ast.Subscript):
        return _is_environment(node.value) and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.AugAssign):
        return _is_environment(node.target)
    if isinstance(node, ast.Attribute):
        return (_is_environment(node.value) and node.attr not in _READ_BY) or node.attr in ("putenv", "unsetenv")
    return False


def _is_environment(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("environ", "environb")
