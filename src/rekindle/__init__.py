"""Rekindle keeps large PyTorch training jobs alive through faults.

Importing this package imports neither torch nor the agent: both come with the first use of a name that needs them.
"""

from __future__ import annotations

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
    from rekindle.launch.compile_cache import CompileCache
    from rekindle.memory.fault import Fault
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
    "replica_groups",
]

__version__ = "0.1.0"

_show_warnings()

_LAZY = {
    "Checkpoint": "rekindle.checkpointer",
    "Checkpointer": "rekindle.checkpointer",
    "CompileCache": "rekindle.launch.compile_cache",
    "Fault": "rekindle.memory.fault",
    "Metrics": "rekindle.checkpointer",
    "ReplicaGroup": "rekindle.state.replicas",
    "Values": "rekindle.state.values",
    "replica_groups": "rekindle.state.replicas",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'rekindle' has no attribute {name!r}")
    import importlib  # noqa: PLC0415  only for names that need more than this file

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
