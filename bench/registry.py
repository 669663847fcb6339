"""Lists the contenders by name: in saving, in the training loop, in loading; and those that can't run, with reasons."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from contenders import (
    KEEP,
    Contender,
    DcpAsync,
    DcpSave,
    DcpStager,
    Rekindle,
    RekindleAtOnce,
    RekindleSnapshots,
    TorchSave,
    load_dcp,
    load_torch,
)
from peers import Dlrover, Orbax, SnapshotAsync, SnapshotTake, load_dlrover, load_orbax, load_snapshot
from training import Training

import rekindle

__all__ = ["CONTENDERS", "LOADS", "LOOP", "REKINDLE", "Load", "absent", "is_peer"]

REKINDLE = "Rekindle"

CONTENDERS: dict[str, type[Contender]] = {
    REKINDLE: Rekindle,
    "Rekindle, overlap=False": RekindleAtOnce,
    "torch.save": TorchSave,
    "dcp.save": DcpSave,
    "dcp.async_save": DcpAsync,
    "dcp.async_save, stager kept": DcpStager,
    "torchsnapshot take": SnapshotTake,
    "torchsnapshot async_take": SnapshotAsync,
    "DLRover flash checkpoint": Dlrover,
    "Orbax async (JAX)": Orbax,
}

LOOP: dict[str, type[Contender]] = {
    "Rekindle, snapshots only": RekindleSnapshots,
    **{name: kind for name, kind in CONTENDERS.items() if kind is not Orbax},
}
"""Orbax is left out: torch's training would have to make JAX's arrays, and pay for that."""


class Load(NamedTuple):
    """One way to load."""

    writer: str
    """The contender that wrote what is read."""
    load: Callable[[Training, Path], float]
    """Seconds that it took; the state must then be the saved one."""
    needs_state: bool = True
    """True if AdamW's state must exist before. It doesn't in a new process, so making it isn't counted."""


class _Stays(Exception):
    """Leaves a Checkpointer as an exception does: memory stays for the next load, where close() would give it back."""


def _from(place: str) -> Callable[[Training, Path], float]:
    def load(training: Training, path: Path) -> float:
        """Seconds, the ``Checkpointer`` being made included."""
        state = {"model": training.model, "optimizer": training.optimizer}
        began = time.perf_counter()
        checkpointer = rekindle.Checkpointer(path.parent, state, keep=KEEP, strict=True)
        checkpointer.restore()
        seconds = time.perf_counter() - began
        with suppress(_Stays), checkpointer:
            raise _Stays
        if checkpointer.metrics.restored_from != place:
            raise SystemExit(f"restored from {checkpointer.metrics.restored_from}, not from {place}")
        return seconds

    return load


LOADS: dict[str, Load] = {
    "Rekindle, memory": Load(REKINDLE, _from("memory"), False),
    "Rekindle, storage": Load(REKINDLE, _from("storage"), False),
    "Rekindle, overlap=False": Load("Rekindle, overlap=False", _from("memory"), False),
    "torch.load": Load("torch.save", load_torch, False),
    "dcp.load": Load("dcp.save", load_dcp),
    "dcp.load of async_save": Load("dcp.async_save", load_dcp),
    "dcp.load of async_save, stager kept": Load("dcp.async_save, stager kept", load_dcp),
    "torchsnapshot restore": Load("torchsnapshot take", load_snapshot),
    "torchsnapshot restore of async_take": Load("torchsnapshot async_take", load_snapshot),
    "DLRover, storage": Load("DLRover flash checkpoint", load_dlrover, False),
    "Orbax restore (JAX)": Load("Orbax async (JAX)", load_orbax),
}
"""Loading what the asynchronous ones wrote is done to see that they wrote the state as it was at the save."""


def is_peer(name: str) -> bool:
    """True if ``name`` may be left out, as it is neither Rekindle's nor torch's."""
    return bool({**LOOP, **CONTENDERS}[name].module)


def absent(name: str) -> str | None:
    """Why ``name`` can't take part; None when all that it imports is there."""
    module = {**LOOP, **CONTENDERS}[name].module
    try:
        found = not module or importlib.util.find_spec(module) is not None
    except ImportError:
        found = False
    return None if found else f"{module.split('.')[0]} is not installed"
