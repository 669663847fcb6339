"""Names a framework's version that its adapter was not tested with."""

from __future__ import annotations

import importlib.metadata
import logging
import re

__all__ = ["warn_if_untested"]

log = logging.getLogger("rekindle")


def warn_if_untested(package: str, first: str, last: str) -> None:
    """Warns unless the installed version is one of ``first`` to ``last``, such as "5.18": patches count as tested."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # imported from a source tree
        version = "of unknown version"
    if not _series(first) <= _series(version) <= _series(last):
        tested = first if first == last else f"{first} to {last}"
        log.warning(
            "%s %s: Rekindle's adapter was tested with %s, and uses what may have changed: compare a run that was "
            "interrupted with one that was not",
            *(package, version, tested),
        )


def _series(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
