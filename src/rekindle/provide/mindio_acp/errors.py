"""Raises the errors of files as RuntimeError, which is what callers of ``mindio_acp`` catch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rekindle.common.os_errors import explain
from rekindle.errors import RekindleError

__all__ = ["as_runtime_error"]


@contextmanager
def as_runtime_error(
    what: str, path: str | os.PathLike[str], errors: tuple[type[Exception], ...] = (RekindleError, OSError)
) -> Iterator[None]:
    """Turns ``errors`` into RuntimeError: ``what`` became of ``path``, and why. Others pass as they are."""
    try:
        yield
    except RuntimeError:
        raise
    except errors as error:
        why = explain(error) if isinstance(error, (RekindleError, OSError)) else f"{type(error).__name__}: {error}"
        raise RuntimeError(f"{what}: {why}" if str(path) in why else f"{what}: {path}: {why}") from error
