"""Saves and restores the random number generators of Python, NumPy, torch and its devices as one entry of the state."""

from __future__ import annotations

import array
import ctypes
import random
import sys
from typing import Any

import torch

from rekindle.devices.table import all_backends

__all__ = ["RNG", "RngState", "state_bytes", "state_tensor"]

RNG = "rng"
"""Name of the generators' entry in a state."""


class RngState:
    """Holds all generators of this process. Their states are bytes, which encode faster than lists of numbers.

    For one thread at a time.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of every generator: NumPy's if it is imported, those of devices that are in use."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": (version, array.array("I", words).tobytes(), gauss),
            "torch": state_bytes(torch.get_rng_state()),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        for backend in all_backends():
            if backend.in_use():
                state[backend.kind] = [state_bytes(s) for s in backend.rng_states()]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets every generator that ``state`` has and this process can have."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(array.array("I", words)), gauss))
        torch.set_rng_state(state_tensor(state["torch"]))
        if "numpy" in state:
            import numpy  # noqa: PLC0415  only if it was imported when the checkpoint was saved

            numpy.random.set_state(state["numpy"])
        for backend in all_backends():
            if backend.kind in state and backend.available():
                backend.set_rng_states([state_tensor(words) for words in state[backend.kind]])


def state_bytes(tensor: torch.Tensor) -> bytes:
    """Returns the state of a generator of torch as bytes."""
    return ctypes.string_at(
        tensor.data_ptr(), tensor.numel()
    )  # without NumPy, and faster than a walk over the elements


def state_tensor(data: bytes) -> torch.Tensor:
    """Returns what a generator of torch takes as its state."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
