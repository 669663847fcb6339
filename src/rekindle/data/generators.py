"""Captures, sets and isolates the random generators that loading data draws from."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rekindle.data.parts import generators_of
from rekindle.state.rng import RngState, state_bytes, state_tensor

__all__ = ["LoaderGenerators", "Seeds", "isolated"]


class LoaderGenerators:
    """Holds all generators that an epoch's order may come from: the process's, and those of a loader's own."""

    def __init__(self, loader: Any) -> None:
        self._process, self._own = RngState(), generators_of(loader)

    def own_states(self) -> list[bytes]:
        """Returns the states of the loader's own."""
        return [state_bytes(generator.get_state()) for generator in self._own]

    def load_own(self, states: list[bytes]) -> None:
        """Sets the loader's own. One that was not there when the states were taken stays as it is."""
        for generator, state in zip(self._own, states, strict=False):
            generator.set_state(state_tensor(state))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each generator."""
        return {"process": self._process.state_dict(), "own": self.own_states()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets each generator."""
        self._process.load_state_dict(state["process"])
        self.load_own(state["own"])

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Gives each generator back as it was, whatever the block has drawn."""
        before = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(before)


class Seeds:
    """Gives each batch of each epoch a seed of its own, another one on each rank."""

    def __init__(self) -> None:
        self.base = torch.initial_seed()
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else os.environ.get("RANK", 0)

    def of(self, epoch: int, number: int) -> int:
        """Returns the seed of a batch, of 63 bits."""
        digest = hashlib.blake2b(f"{self.base}/{self._rank}/{epoch}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Seeds the host's generators for the block, and gives them back as they were. Devices' ones are left alone.

    Costs some 50 microseconds, for each batch.
    """
    numpy = sys.modules.get("numpy")
    python, host = random.getstate(), torch.get_rng_state()
    arrays = numpy.random.get_state() if numpy is not None else None
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(host)
        if numpy is not None:
            numpy.random.set_state(arrays)
