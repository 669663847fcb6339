"""Captures the random generators that the order of a loader of Accelerate's comes from, and sets them again."""

from __future__ import annotations

from typing import Any

import torch

from rekindle.state.rng import RngState

__all__ = ["capture_random", "own_generators", "set_own_generators", "set_random"]


def capture_random(loader: Any) -> dict[str, Any]:
    """Returns the state of all global generators, and of the loader's own."""
    return {"global": RngState().state_dict(), "own": own_generators(loader)}


def set_random(loader: Any, state: dict[str, Any]) -> None:
    """Sets what ``capture_random`` has returned."""
    RngState().load_state_dict(state["global"])
    set_own_generators(loader, state["own"])


def own_generators(loader: Any) -> list[bytes]:
    """Returns the state of each generator of the loader's own: on several ranks one that they share, or the user's."""
    return [bytes(generator.get_state().tolist()) for generator in _generators(loader)]


def set_own_generators(loader: Any, states: list[bytes]) -> None:
    """Sets what ``own_generators`` has returned."""
    for generator, state in zip(_generators(loader), states, strict=False):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _generators(loader: Any) -> list[torch.Generator]:
    base = getattr(loader, "base_dataloader", None)
    found = [getattr(loader, "synchronized_generator", None), getattr(base, "generator", None)]
    return [generator for generator in dict.fromkeys(found) if isinstance(generator, torch.Generator)]
