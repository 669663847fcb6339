"""``import rekindle``: what it offers, and what it leaves alone."""

from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rekindle
from rekindle import errors

ERRORS = {n: c for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, errors.RekindleError)}


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has imported after running ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint('MODULES', *sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.rpartition("MODULES")[2].split())


def test_all_is_sorted_and_has_no_duplicates():
    assert list(rekindle.__all__) == sorted(set(rekindle.__all__))


@pytest.mark.parametrize("name", rekindle.__all__)
def test_every_public_name_can_be_imported(name):
    namespace: dict[str, object] = {}
    exec(f"from rekindle import {name}", namespace)
    assert namespace[name].__name__ == name
    assert name in dir(rekindle)


def test_all_is_complete():
    public = (
        {n for n in vars(rekindle) if not n.startswith("_")}
        - set(sys.modules)
        - {"TYPE_CHECKING", "Any", "annotations"}
    )
    public -= {n for n in public if inspect.ismodule(getattr(rekindle, n))}
    assert public <= set(rekindle.__all__)
    assert ERRORS.keys() <= set(rekindle.__all__)
    assert {"Checkpoint", "Checkpointer", "Metrics", "Values"} <= set(rekindle.__all__)


def test_type_checkers_are_told_that_there_are_types():
    assert (Path(rekindle.__file__).parent / "py.typed").is_file()  # the wheel takes the whole directory along


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = rekindle.no_such_name


def test_errors_list_themselves():
    assert list(errors.__all__) == sorted(ERRORS)


@pytest.mark.parametrize("cls", ERRORS.values(), ids=ERRORS)
def test_an_error_can_be_caught_as_a_builtin_and_ends_the_command_line(cls):
    assert issubclass(cls, rekindle.RekindleError)
    assert isinstance(cls.exit_code, int) and 0 < cls.exit_code < 126
    assert getattr(rekindle, cls.__name__) is cls
    if cls is not rekindle.RekindleError:
        specific = [
            b for b in cls.__mro__ if b.__module__ == "builtins" and b not in (Exception, BaseException, object)
        ]
        assert specific, "derives from no built-in that a user would catch"
    assert cls.__doc__


def test_exit_codes_tell_families_apart():
    own = {cls: cls.exit_code for cls in ERRORS.values() if "exit_code" in vars(cls)}
    assert len(set(own.values())) == len(own)


def test_the_tree_in_the_documentation_is_the_tree():
    """Names, parents, built-ins and exit codes, read from the drawing."""
    line = re.compile(
        r"^ {4}(?P<branch>[│├└─ ]*)(?P<name>\w+)(?: \((?P<builtin>\w+)\))? +(?:exit code +)?(?P<code>\d+)$"
    )
    drawn, parents = {}, []
    for match in filter(None, map(line.match, errors.__doc__.splitlines())):
        depth = len(match["branch"]) // 4
        parents[depth:] = [match["name"]]
        bases = [ERRORS[parents[depth - 1]]] if depth else [Exception]
        bases += [getattr(builtins, match["builtin"])] if match["builtin"] else []
        drawn[match["name"]] = (tuple(bases), int(match["code"]))
    assert drawn == {name: (cls.__bases__, cls.exit_code) for name, cls in ERRORS.items()}


def test_importing_rekindle_imports_neither_torch_nor_the_agent():
    after = modules_after("import rekindle; rekindle.UsageError; dir(rekindle)")
    assert "rekindle" in after
    assert not after & {"torch", "numpy", "aiohttp", "rekindle.agent", "rekindle.checkpointer"}


def test_the_agent_never_holds_torch_or_numpy():
    after = modules_after("import rekindle.agent.__main__, rekindle.agent.service")
    assert {"rekindle.agent.drain", "rekindle.storage.posix"} <= after and "aiohttp" not in after
    assert not after & {"torch", "numpy"}


def test_a_lazy_name_brings_what_it_needs():
    assert "torch" in modules_after("import rekindle; rekindle.Checkpointer")
