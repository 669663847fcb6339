"""Lets the programs of one run import stand-ins for modules of other products.

Each name has a folder of its own with a module that leads to the stand-in. The folder goes into PYTHONPATH: that comes
before installed packages, reaches every child process, and is the same in a cold start and a warm one.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from rekindle.errors import UsageError

__all__ = ["PROVIDE", "folder_of", "provide", "seconds_to_end", "stand_ins"]

PROVIDE = "REKINDLE_PROVIDE"
"""Environment variable: names of stand-ins, where ``--provide`` is not given."""
_LIMIT = "TTP_NORMAL_ACTION_TIME_LIMIT"
"""Environment variable of programs for mindio_ttp: seconds that a dump may take, which ranks need to end."""
_TORCHRUN, _MORE = 30, 5
"""Seconds that torchrun gives ranks to end, and seconds for what comes after a dump."""
_FOLDERS = Path(__file__).parents[1] / "provide" / "path"


def stand_ins() -> list[str]:
    """Lists the names for which there is a stand-in."""
    return sorted(path.name for path in _FOLDERS.iterdir() if folder_of(path.name).joinpath(f"{path.name}.py").exists())


def folder_of(name: str) -> Path:
    """Returns the folder that makes a stand-in importable when it is on the path."""
    return _FOLDERS / name


def provide(names: str, first: str | None) -> None:
    """Puts stand-ins on the path of the programs that this process starts. ``names`` are separated by commas.

    ``first`` is the folder in which those programs look before PYTHONPATH; None if there is none.

    Raises UsageError for a name that has no stand-in, or that an installed module has: nothing is hidden.
    """
    wanted = list(dict.fromkeys(filter(None, map(str.strip, names.split(",")))))
    known = stand_ins()
    for name in wanted:
        if name not in known:
            raise UsageError(f"--provide {name}: there is no stand-in of that name. There is {', '.join(known)}")
        if (real := _find(name, first)) is not None:
            raise UsageError(
                f"--provide {name}: {real} has that name, and is never hidden: leave {name} out of --provide and "
                f"{PROVIDE} to use it, or take it away to use Rekindle's"
            )
    before = _python_path()
    folders = [folder for name in wanted if (folder := str(folder_of(name))) not in before]
    if folders:
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *before])
        sys.path[1:1] = folders  # processes that Python's multiprocessing starts get this path, and not PYTHONPATH


def seconds_to_end() -> int:
    """Returns the seconds that ranks get to end, before they are killed."""
    given = os.environ.get(_LIMIT, "")
    return max(_TORCHRUN, int(given) + _MORE) if given.isdigit() else _TORCHRUN


def _python_path() -> list[str]:
    """Lists the folders of PYTHONPATH. An empty one among them is the current folder."""
    value = os.environ.get("PYTHONPATH")
    return value.split(os.pathsep) if value else []


def _find(name: str, first: str | None) -> str | None:
    """Returns the file of a module of that name that is no stand-in; None if a program would find none."""
    own = 0 if getattr(sys.flags, "safe_path", False) else 1  # this program's own folder comes first, unless barred
    # Programs look in PYTHONPATH, though this one may have been started by python -I, which doesn't.
    folders = [*filter(None, [first]), *_python_path(), *sys.path[own:]]
    path = [folder for folder in folders if os.path.realpath(folder) != os.path.realpath(folder_of(name))]
    for finder in sys.meta_path:  # a package that is installed for editing has a finder of its own, behind the others
        spec = finder.find_spec(name, path if finder is PathFinder else None)
        if spec is not None and spec.origin is not None:  # a mere folder is not a module that counts
            return spec.origin
    return None
