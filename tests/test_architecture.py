"""The rules of the source tree, held by a test: who may import whom, and how long a module may get."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import rekindle

PACKAGE = Path(rekindle.__file__).parent


class Room(NamedTuple):
    layer: int
    """Imports point to a lower number, or stay within one room. Rooms of equal number never import each other."""
    torch: str = "anywhere"
    """Where torch may be imported: "never", "in functions", or "anywhere"."""


ROOMS = {
    "errors": Room(0, torch="never"),
    "common": Room(1, torch="never"),
    "format": Room(2, torch="never"),
    "memory": Room(3, torch="never"),
    "devices": Room(2),
    "state": Room(3),
    "storage": Room(4, torch="never"),
    "peers": Room(4, torch="never"),
    "agent": Room(5, torch="never"),
    "testing": Room(5),
    "settings": Room(5),
    "session": Room(6),
    "save": Room(7),
    "restore": Room(7),
    "data": Room(8),
    "faults": Room(8),
    "files": Room(8, torch="in functions"),
    "transfer": Room(8),
    "integrations": Room(9),
    "provide": Room(9, torch="in functions"),
    "checkpointer": Room(9),
    "launch": Room(9, torch="in functions"),
    "cli": Room(10),
    "__main__": Room(11),
}
TOP = {"__init__.py", "__main__.py", "checkpointer.py", "errors.py", "py.typed", "settings.py"}
"""All files at the top of the package; everything else is in a room."""
LONGEST = 700
"""Lines of a module."""
HEADLESS = r"(What|Which|Whether|How|Where|Who)\b"
"""Words that no docstring begins with: the sentence would have no subject."""
MOST_METHODS = 20
"""Public methods and properties of a class."""
STORES = {"rekindle.storage.store", "rekindle.storage.posix", "rekindle.storage.objects"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
FACADE = "rekindle"


def part_of(module: str) -> str:
    """``format`` for rekindle.format.layout."""
    return module.split(".")[1]


def torch_of(module: str) -> str:
    """Where a module may import torch; one without a room is told of by a test of its own."""
    room = None if module == FACADE else ROOMS.get(part_of(module))
    return "anywhere" if room is None else room.torch


@cache
def imports(module: str, functions: bool = True) -> tuple[tuple[str, int], ...]:
    """(module, line) of all that a module imports, inside of ``functions`` too; relative imports are resolved."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for node in ast.walk(tree) if functions else tree.body:
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            for alias in node.names:  # "from rekindle.format import layout" imports a module
                inner = f"{base}.{alias.name}"
                found.append((inner if inner in MODULES else base, node.lineno))
    return tuple(found)


def ours(module: str) -> list[tuple[str, int]]:
    return [(name, line) for name, line in imports(module) if name.split(".")[0] == "rekindle"]


def test_every_module_has_its_place_in_the_layers():
    parts = {part_of(m) for m in MODULES if m != FACADE}
    assert not parts - ROOMS.keys(), f"say in ROOMS where {sorted(parts - ROOMS.keys())} belong"
    assert not ROOMS.keys() - parts, f"take {sorted(ROOMS.keys() - parts)} out of ROOMS"


def test_nothing_else_stands_at_the_top():
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} == TOP, "put other modules into a room"


@pytest.mark.parametrize("module", [m for m in MODULES if m != FACADE])
def test_imports_point_down(module):
    wrong = []
    for name, line in ours(module):
        if name == FACADE:
            assert part_of(module) in ("cli", "integrations", "provide"), (
                f"{module}:{line} imports the facade, which lies above it"
            )
            continue
        here, there = part_of(module), part_of(name)
        if here != there and ROOMS[there].layer >= ROOMS[here].layer:
            wrong.append(f"{module}:{line} imports {name}")
    assert not wrong


@pytest.mark.parametrize("module", [m for m in MODULES if torch_of(m) == "never"])
def test_what_outlives_the_trainer_never_imports_torch(module):
    assert not [(name, line) for name, line in imports(module) if name.split(".")[0] == "torch"]


def test_what_a_torchless_module_imports_is_torchless_too():
    """Follows the chain of imports: a helper in between would bring torch in just as well."""
    for start in (m for m in MODULES if torch_of(m) != "anywhere"):
        everywhere = torch_of(start) == "never"
        seen, todo = set(), [start]
        while todo:
            module = todo.pop()
            if module in seen:
                continue
            seen.add(module)
            names = [name for name, _ in imports(module, everywhere)]
            assert "torch" not in {name.split(".")[0] for name in names}, f"{start} gets torch by {module}"
            todo += [name for name in names if name in MODULES and name != FACADE]


def test_there_are_no_import_cycles():
    state: dict[str, int] = {}
    path: list[str] = []

    def visit(module: str) -> None:
        state[module] = 1
        path.append(module)
        for name, _ in ours(module):
            assert state.get(name) != 1, " -> ".join([*path[path.index(name) :], name])
            if name in MODULES and name not in state:
                visit(name)
        path.pop()
        state[module] = 2

    for module in MODULES:
        if module not in state:
            visit(module)


@pytest.mark.parametrize("step", ["write_shard", "publish", "clean_up"])
def test_the_commit_protocol_stands_once(step):
    """All that write checkpoints to storage go through one module. Stores may call each other's methods."""
    called = {
        f"{module}:{node.lineno}": module
        for module, path in MODULES.items()
        if not module.startswith("rekindle.testing") and module not in STORES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == step
    }
    assert list(called.values()) == ["rekindle.storage.commit"], (
        f"go through Committer, or add the module of a new store to STORES: {sorted(called)}"
    )


@pytest.mark.parametrize("module", MODULES)
def test_a_module_can_be_read_in_one_go(module):
    lines = len(MODULES[module].read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST, f"{MODULES[module].name} has {lines} lines: split it"


@pytest.mark.parametrize("module", MODULES)
def test_a_class_can_be_known_by_heart(module):
    """The contracts of a store and of a kind of device excepted, and the tests of a store's."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name not in ("Store", "StoreContract", "Backend"):
            methods = {part.name for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))}
            public = sorted(name for name in methods if not name.startswith("_"))
            assert len(public) <= MOST_METHODS, f"{node.name} has {len(public)} public methods: split it: {public}"


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_begin_with_a_noun_or_a_verb(module):
    """Those of modules, classes and functions, and those below fields."""
    headless = [
        f"{module}:{node.lineno}: {node.value.value.strip().splitlines()[0]}"
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if re.match(HEADLESS, node.value.value.strip())
    ]
    assert not headless, "name the subject first, by a noun or a verb; of a boolean say 'True if ...'"


@pytest.mark.parametrize("module", MODULES)
def test_only_declared_dependencies_are_imported(module):
    allowed = {"aiohttp", "click", "rich", "torch", "xxhash", "rekindle"} | set(sys.stdlib_module_names)
    top_level = {
        alias.name.split(".")[0]
        for node in ast.parse(MODULES[module].read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    if module == "rekindle.storage.bucket":  # an optional dependency, which no other module knows
        allowed.add("obstore")
    if module in ("rekindle.cli.collector", "rekindle.cli.metrics"):  # the agent's few megabytes are without it
        allowed.add("prometheus_client")
    if module == "rekindle.cli.curve":
        allowed.add("matplotlib")
    foreign = {name.split(".")[0] for name, _ in imports(module)} - allowed
    # NumPy is optional: asked for inside a function, where a checkpoint or the state has it already.
    assert foreign <= ({"numpy"} - top_level)
