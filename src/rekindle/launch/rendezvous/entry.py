"""Makes the rendezvous "rekindle" known to torch, which looks for it early: the rest is imported when it is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["BACKEND", "get_creator", "register"]

BACKEND = "rekindle"


def get_creator() -> Callable[[Any], Any]:
    """Returns what makes the handler: the entry point ``torchrun.handlers``."""
    return _create


def register() -> None:
    """Makes the name known to torchrun, also where this package's entry points are not."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry  # noqa: PLC0415

    rendezvous_handler_registry.register(BACKEND, _create)


def _create(params: Any) -> Any:
    """Makes the handler. A job of one node without an endpoint is at no place where another one could come to it."""
    if params.max_nodes == 1 and not params.endpoint:
        from rekindle.launch.rendezvous.alone import Alone  # noqa: PLC0415

        return Alone(params)
    from rekindle.launch.rendezvous.handler import Rendezvous  # noqa: PLC0415

    return Rendezvous(params)
