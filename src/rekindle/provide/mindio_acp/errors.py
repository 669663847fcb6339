"""Raises the errors of files as RuntimeError, which is what callers of ``mindio_acp`` catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pickle import UnpicklingError

from rekindle.common.os_errors import explain
from rekindle.errors import RekindleError

__all__ = ["as_runtime_error"]


@contextmanager
def as_runtime_error(what: str) -> Iterator[None]:
    """Turns errors of files into RuntimeError: ``what`` was not done, and why. Others pass as they are."""
    try:
        yield
    except (RekindleError, OSError, UnpicklingError) as error:
        raise RuntimeError(f"{what}: {explain(error)}") from error
