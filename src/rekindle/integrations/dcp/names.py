"""Parses DCP's paths and ``checkpoint_id`` as root and step, and names checkpoints for its logs."""

from __future__ import annotations

import os
import re

from rekindle.errors import UsageError
from rekindle.format.names import Root, canonical_root, step_dir

__all__ = ["is_place", "name_of", "place_of", "step_of"]

_STEP_OF_ROOT = re.compile(r"step[-_]?(\d{1,10})")
"""A directory's name that can't be a root's."""
_STEP = re.compile(r"\D*(\d{1,10})")
"""Text that ends in the step and has no other number: ``1200``, ``step-1200``, ``global_step1200``."""


def place_of(path: str | os.PathLike[str]) -> tuple[Root, int | None]:
    """Returns the root, and the step if ``path`` is that of a checkpoint, ``ROOT/step-N``, as DCP's own classes are
    given."""
    full = canonical_root(path)
    parent, _, name = str(full).rpartition("/")
    match = _STEP_OF_ROOT.fullmatch(name)
    return (canonical_root(parent or "/"), int(match[1])) if match else (full, None)


def step_of(checkpoint_id: str | os.PathLike[str] | int, root: Root) -> int | None:
    """Returns the step that ``checkpoint_id`` names; None for the root itself. Raises UsageError when it names none."""
    if isinstance(checkpoint_id, int):
        return checkpoint_id
    text = os.fspath(checkpoint_id)
    if canonical_root(text) == root:
        return None
    parent, _, name = text.rstrip("/").rpartition("/")
    match = _STEP.fullmatch(name)
    if not match:
        raise UsageError(f"checkpoint_id {text!r} names no step: let it end in the step's number, as in 'step-1200'")
    if parent and canonical_root(parent) != root:
        raise UsageError(f"checkpoint_id {text!r} lies outside of {root}, the root of this writer or reader")
    return int(match[1])


def is_place(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Returns True if it can be the path of a root, or of a checkpoint in one."""
    try:
        place_of(checkpoint_id)
    except (UsageError, TypeError):
        return False
    return True


def name_of(checkpoint_id: str | os.PathLike[str] | int | None, root: Root) -> str:
    """Returns the path of a checkpoint for DCP's logs and ``StorageMeta``; that of the root where no step is named."""
    try:
        step = None if checkpoint_id is None else step_of(checkpoint_id, root)
    except UsageError:
        return str(checkpoint_id)
    return str(root) if step is None else f"{root}/{step_dir(step)}"
