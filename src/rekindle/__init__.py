"""Rekindle keeps large PyTorch training jobs alive through faults.

Importing this package imports neither torch nor the agent: both come with the first use of a name that needs them.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from rekindle.common.console import show_warnings as _show_warnings
from rekindle.errors import (
    AgentError,
    BusyError,
    CorruptError,
    FormatError,
    MemoryStoreError,
    NonFiniteLossError,
    NotDurableError,
    NotFoundError,
    RekindleError,
    StateMismatchError,
    UnsupportedValueError,
    UsageError,
    VersionError,
)

if TYPE_CHECKING:
    from rekindle.checkpointer import Checkpoint, Checkpointer, Metrics
    from rekindle.files import flush, load, save
    from rekindle.launch.compile_cache import CompileCache
    from rekindle.memory.fault import Fault
    from rekindle.restore.weights import load_model
    from rekindle.state.replicas import ReplicaGroup, replica_groups
    from rekindle.state.values import Values

__all__ = [
    "AgentError",
    "BusyError",
    "Checkpoint",
    "Checkpointer",
    "CompileCache",
    "CorruptError",
    "Fault",
    "FormatError",
    "MemoryStoreError",
    "Metrics",
    "NonFiniteLossError",
    "NotDurableError",
    "NotFoundError",
    "RekindleError",
    "ReplicaGroup",
    "StateMismatchError",
    "UnsupportedValueError",
    "UsageError",
    "Values",
    "VersionError",
    "flush",
    "load",
    "load_model",
    "replica_groups",
    "save",
]

__version__ = "0.1.0"

_show_warnings()
# The import of a room puts its module here, under the room's name, once. ``save`` is the name of a function, too: with
# the import behind us, the name is free for good, and looked up below.
_import_module("rekindle.save")
globals().pop("save", None)  # nothing to remove where this module is loaded once more

_LAZY = {
    "Checkpoint": "rekindle.checkpointer",
    "Checkpointer": "rekindle.checkpointer",
    "CompileCache": "rekindle.launch.compile_cache",
    "Fault": "rekindle.memory.fault",
    "Metrics": "rekindle.checkpointer",
    "ReplicaGroup": "rekindle.state.replicas",
    "Values": "rekindle.state.values",
    "flush": "rekindle.files",
    "load": "rekindle.files",
    "load_model": "rekindle.restore.weights",
    "replica_groups": "rekindle.state.replicas",
    "save": "rekindle.files",
}
_ROOMS = ("data", "devices", "files")
"""Rooms whose names are public."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY and name not in _ROOMS:
        raise AttributeError(f"module 'rekindle' has no attribute {name!r}")
    if name in _ROOMS:
        return _import_module(f"rekindle.{name}")
    return getattr(_import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
