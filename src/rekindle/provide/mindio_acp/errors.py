"""Raises the errors of files as RuntimeError, which is what callers of ``mindio_acp`` catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pickle import UnpicklingError

from rekindle.common.os_errors import explain
from rekindle.errors import RekindleError

__all__ = ["as_runtime_error"]


@contextmanager
def as_runtime_error(what: str, path: str) -> Iterator[None]:
    """Turns errors of files into RuntimeError: ``what`` became of ``path``, and why. Others pass as they are."""
    try:
        yield
    except (RekindleError, OSError, UnpicklingError) as error:
        why = explain(error)
        raise RuntimeError(f"{what}: {why}" if path in why else f"{what}: {path}: {why}") from error
