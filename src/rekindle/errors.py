"""Defines every error that Rekindle raises.

::

    RekindleError                                          exit code 1
    ├── UsageError (ValueError)                                      2
    │   └── UnsupportedValueError (TypeError)                        2
    ├── NotFoundError (FileNotFoundError)                            3
    ├── CorruptError (ValueError)                                    4
    │   └── FormatError                                              4
    │       └── VersionError                                         4
    ├── StateMismatchError (ValueError)                              5
    ├── MemoryStoreError (OSError)                                   6
    ├── BusyError (RuntimeError)                                     7
    ├── NotDurableError (TimeoutError)                               8
    ├── AgentError (RuntimeError)                                    9
    └── NonFiniteLossError (FloatingPointError)                     10

Each error also derives from the built-in that a caller would catch, and carries the exit code of the command line.
"""

from __future__ import annotations

__all__ = [
    "AgentError",
    "BusyError",
    "CorruptError",
    "FormatError",
    "MemoryStoreError",
    "NonFiniteLossError",
    "NotDurableError",
    "NotFoundError",
    "RekindleError",
    "StateMismatchError",
    "UnsupportedValueError",
    "UsageError",
    "VersionError",
]


class RekindleError(Exception):
    """Base of all errors raised by Rekindle."""

    exit_code = 1


class UsageError(RekindleError, ValueError):
    """An argument, or the order of calls, makes no sense."""

    exit_code = 2


class UnsupportedValueError(UsageError, TypeError):
    """The state holds a value that the format has no type for; the message names its path in the state."""


class NotFoundError(RekindleError, FileNotFoundError):
    """A root, checkpoint, job or file does not exist."""

    exit_code = 3


class CorruptError(RekindleError, ValueError):
    """Bytes differ from their checksum, or a part of a checkpoint is missing."""

    exit_code = 4


class FormatError(CorruptError):
    """A file is not what its name says."""


class VersionError(FormatError):
    """A file was written by a newer major version of the format: update Rekindle to read it."""


class StateMismatchError(RekindleError, ValueError):
    """A sound checkpoint does not fit the live state: other names, shapes or dtypes."""

    exit_code = 5


class MemoryStoreError(RekindleError, OSError):
    """The memory store can't be used: too small, read-only, or owned by somebody else."""

    exit_code = 6


class BusyError(RekindleError, RuntimeError):
    """Another live process holds what was asked for."""

    exit_code = 7


class NotDurableError(RekindleError, TimeoutError):
    """A checkpoint or a file did not reach storage in time. It stays in memory and is still being drained."""

    exit_code = 8


class AgentError(RekindleError, RuntimeError):
    """The node agent did not start, or does not answer."""

    exit_code = 9


class NonFiniteLossError(RekindleError, FloatingPointError):
    """``Checkpointer.report`` was given a loss that is infinite or not a number."""

    exit_code = 10
