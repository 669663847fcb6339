"""Keeps the callables by which vendors' devices are cleared after a fault, so that the state on them can be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from rekindle.errors import UsageError

__all__ = ["Clearing", "register", "registered"]

Hook = Callable[[torch.device], object]


@dataclass(frozen=True)
class Clearing:
    """Three callables for one kind of device, each of which gets a device. Called in this order, one after the other.

    Raises UsageError for what is not callable.
    """

    stop: Hook | None = None
    """Ends what the device does: a thread that waits for it gets an error, or goes on. Nothing it does after counts."""
    clean: Hook | None = None
    """Frees what the ended work has left. An answer of False: the device's memory is lost, and it is not restored."""
    restore: Hook | None = None
    """Lets the device take work again: the copies of the state come next."""

    def __post_init__(self) -> None:
        for field in fields(self):
            hook = getattr(self, field.name)
            if not (hook is None or callable(hook)):
                raise UsageError(f"{field.name} is {hook!r}: must be a callable that gets a torch.device, or None")


_registered: dict[str, Clearing] = {}
"""Maps types of devices to what was registered."""


def register(name: str, *, stop: Hook | None = None, clean: Hook | None = None, restore: Hook | None = None) -> None:
    """Tells how devices of a type are cleared after a fault, in place of what is known of that type.

    ``guard()`` calls the three, for each device that holds state, if the device can't be read beside what it does, and
    the user has given no ``on_stop``: all ``stop`` first, then all ``clean``, then all ``restore``, in one thread that
    has a fifth of the time left until ``gasp_deadline``. Without any of the three nothing is done to such devices. Of
    type "cpu" they are called at each fault, as the host's memory can always be read.

    Raises UsageError for a type of device that torch doesn't know, and for what is not callable.
    """
    try:
        kind = torch.device(name).type
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {name!r} is no type that torch knows: {error}") from error
    if kind != name:
        raise UsageError(f"device {name!r}: give the type alone, {kind!r}")
    _registered[name] = Clearing(stop, clean, restore)


def registered(kind: str) -> Clearing | None:
    """Returns what was registered for a type of device; None if nothing was."""
    return _registered.get(kind)
