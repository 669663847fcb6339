"""Reads what a launcher puts into the environment."""

from __future__ import annotations

import os

from rekindle.errors import UsageError

__all__ = ["LAUNCH", "env_count"]

LAUNCH = "REKINDLE_LAUNCH"
"""Environment variable: the directory in which ``rekindle run`` learns of the job's roots and files."""


def env_count(name: str) -> int:
    """Returns the number in the environment variable ``name``; 1 where it isn't set.

    Raises UsageError for an empty variable, for text, and for a number below 1.
    """
    text = os.environ.get(name)
    if text is None:
        return 1
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(
            f"environment variable {name} is {text!r}: must be a whole number of at least 1, as torchrun sets it; "
            "unset it for a job of one process"
        )
    return number
