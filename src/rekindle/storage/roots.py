"""Describes a path that holds no checkpoints, and finds the root that was probably meant."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rekindle.errors import UsageError
from rekindle.format.names import CLAIMS, MANIFEST, STEP_DIR, Root, canonical_root
from rekindle.storage.open import urls_below

__all__ = ["describe_root", "refuse_inside", "root_and_step", "root_to_train"]

_SHOWN = 10
"""Most roots, or names of files, that a message lists."""
_DEPTH = 3
"""Levels below a directory that are searched for roots: runs lie in PROJECT/DATE/RUN at most, as a rule."""
_DIRECTORIES, _ENTRIES = 1000, 10_000
"""Most directories that a search opens, and most entries that it reads of each. On a network file system each costs a
millisecond, and a search of a home directory must end."""
_SECONDS = 3.0
"""Longest time that a search may take."""

_STEP = len("step-0123456789")
_FOREIGN = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Endings of files that 'rekindle import' may know how to read."""


class _EnclosingStep(NamedTuple):
    """A place within a root: the root itself, and the step that the place belongs to."""

    root: str
    step: int


def describe_root(root: Root, known: Iterable[str] = ()) -> str | None:
    """Describes what is at ``root`` instead of checkpoints, and what to do; None when it is a root with a checkpoint.

    ``known`` are the roots of this node's jobs, which may have nothing on storage yet. Changes nothing; a search for
    roots is bounded. Raises OSError when the file system refuses.
    """
    inside = _enclosing_step(root)
    if inside is not None:
        return f"it lies inside the root {inside.root}, and belongs to step {inside.step}: {_instead_of(inside)}"
    below = [name for name in known if name.startswith(f"{root}/")]
    if not isinstance(root, Path):
        return _describe_url(root, below)
    if root.is_file():
        return _describe_file(root)
    cut_short = False
    if root.is_dir():
        names = _names(root)
        if any(STEP_DIR.match(name) for name in names):
            return _describe_unfinished(root, names)
        found, cut_short = _search(root)
        below += map(str, found)
    if below:
        return _list_roots(sorted(set(below)), cut_short=cut_short)
    if cut_short:
        return "it is no root, and the search for one below it took too long: give the root itself"
    return _describe_directory(root, names) if root.is_dir() else _describe_nothing(root)


def refuse_inside(root: Root) -> None:
    """Raises UsageError for a root inside of a step of another root, where nothing may be written."""
    inside = _enclosing_step(root)
    if inside is not None:
        raise UsageError(f"{root}: lies inside the root {inside.root}, in its step {inside.step}: give that root")


def root_to_train(root: str | os.PathLike[str]) -> Root:
    """Returns ``canonical_root(root)``. Raises UsageError inside of another root, where a run would begin at step 0."""
    checked = canonical_root(root)
    refuse_inside(checked)
    return checked


def root_and_step(path: str | os.PathLike[str]) -> tuple[Root, int | None]:
    """Returns the root that ``path`` names, and the step if it names the directory of one, else None.

    Raises UsageError for what can't be a root.
    """
    root = canonical_root(path)
    inside = _enclosing_step(root)
    if inside is None:
        return root, None
    return Path(inside.root) if isinstance(root, Path) else inside.root, inside.step


def _enclosing_step(root: Root) -> _EnclosingStep | None:
    parts = str(root).split("/")
    # A step's directory, or a file in it: no step has directories of its own.
    for at in (len(parts) - 2, len(parts) - 1):
        name = parts[at]
        if at > 0 and STEP_DIR.match(name[:_STEP]) and (len(name) == _STEP or name[_STEP] == "."):
            return _EnclosingStep("/".join(parts[:at]) or "/", int(name[_STEP - 10 : _STEP]))
    return None


def _instead_of(inside: _EnclosingStep) -> str:
    return f"run 'rekindle ls {inside.root}' or 'rekindle inspect {inside.root} {inside.step}'"


def _describe_url(url: str, known: list[str]) -> str:
    if known:
        return _list_roots(sorted(known))
    below = []
    with suppress(OSError, UsageError):  # the command that needs the listing reports the error itself
        below = urls_below(url)
    if not below:
        return "nothing is there: no job has saved there yet"
    more = [f"and {len(below) - _SHOWN} more"] if len(below) > _SHOWN else []
    return "\n  ".join(["no job has saved there; below it are", *below[:_SHOWN], *more])


def _describe_file(path: Path) -> str:
    if path.name.endswith(_FOREIGN):
        return f"it is a file: 'rekindle import {path} ROOT STEP' makes a checkpoint of what other programs wrote"
    return "it is a file: a root is the directory that rekindle.Checkpointer was given"


def _describe_unfinished(root: Path, names: list[str]) -> str | None:
    """Describes a root without a single manifest; None when it has one."""
    if any(STEP_DIR.match(name) and (root / name / MANIFEST).exists() for name in names):
        return None
    step = max(int(match["step"]) for name in names if (match := STEP_DIR.match(name)))
    return (
        f"step {step} is unfinished: not all of its parts are there. A job that is started again, or its agent, "
        "finishes or removes it"
    )


def _describe_directory(root: Path, names: list[str]) -> str:
    if not names:
        return "the directory is empty: no job has saved there yet"
    if names == [CLAIMS]:
        return "a job has begun there, and has saved nothing yet"
    import_it = f"'rekindle import {root} ROOT STEP' makes a checkpoint of it"
    if ".metadata" in names:
        return f"it is a directory of torch.distributed.checkpoint: {import_it} (with --allow-pickle)"
    if any(name.endswith(".safetensors") for name in names):
        return f"it is a directory of safetensors files, such as an export: {import_it}"
    hidden_last = sorted(names, key=lambda name: (name.startswith("."), name))
    shown = ", ".join(hidden_last[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"neither it nor a directory below has a step-N of Rekindle's; it holds {shown}"


def _describe_nothing(root: Path) -> str:
    nearest = next(parent for parent in root.parents if parent.exists())
    return f"there is no such directory; {nearest} is there: see that the path is right, and that it is mounted"


def _list_roots(roots: list[str], *, cut_short: bool = False) -> str:
    shown = roots[:_SHOWN]
    more = ["and perhaps more"] if cut_short else [f"and {len(roots) - _SHOWN} more"] if len(roots) > _SHOWN else []
    return "\n  ".join(["it is no root itself, but these below it are: give one of them", *shown, *more])


def _names(directory: str | Path) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in islice(entries, _ENTRIES)]


def _search(top: Path) -> tuple[list[Path], bool]:
    """Finds the roots below ``top``, nearest first. The flag is True if the search ended before all was seen."""
    deadline = time.monotonic() + _SECONDS
    found: list[Path] = []
    todo = deque([(top, 0)])
    opened = 0
    while todo:
        if opened == _DIRECTORIES or len(found) > _SHOWN or time.monotonic() > deadline:
            return found[:_SHOWN], True
        directory, depth = todo.popleft()
        opened += 1
        below = _directories(directory)
        if any(STEP_DIR.match(path.name) for path in below):
            found.append(directory)
        elif depth < _DEPTH:
            todo.extend((path, depth + 1) for path in below)
    return found, False


def _directories(directory: Path) -> list[Path]:
    """Lists the directories in ``directory``, without links; none where it can't be read, which a search skips."""
    try:
        with os.scandir(directory) as entries:
            inside = [entry.name for entry in islice(entries, _ENTRIES) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [directory / name for name in sorted(inside)]
