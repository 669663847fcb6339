"""Stands in for ``mindio_ttp.controller_ttp``. Nothing listens: each node's agent does a controller's work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rekindle.provide.mindio_ttp import mindx
from rekindle.provide.mindio_ttp.callbacks import say_once
from rekindle.provide.mindio_ttp.checking import check_address, check_rank, refuse_repair
from rekindle.provide.mindio_ttp.processor import current

__all__ = [
    "tft_destroy_controller",
    "tft_init_controller",
    "tft_notify_controller_change_strategy",
    "tft_notify_controller_dump",
    "tft_notify_controller_on_global_rank",
    "tft_notify_controller_prepare_action",
    "tft_notify_controller_stop_train",
    "tft_query_high_availability_switch",
    "tft_register_mindx_callback",
    "tft_start_controller",
    "ttp_logger",
]

ttp_logger = SimpleNamespace(LOGGER=logging.getLogger("rekindle"))

_DONE, _FAILED = 0, 1
_DUMPS = ("dump", "exit", "retry", "recover", "migration", "downgrade", "upgrade")
"""Strategies that end the start. Those that would repair it are answered as the first."""


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """Checks the numbers. Raises UsageError."""
    check_rank("tft_init_controller", rank, world_size, least=-1)
    refuse_repair(arf=enable_arf, zit=enable_zit, local_copy=enable_local_copy)


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """Checks the address, on which nothing listens. Raises UsageError."""
    check_address("tft_start_controller", bind_ip, port)


def tft_destroy_controller() -> None:
    """Does nothing: there is none."""


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """Keeps an orchestrator's callback. Returns 0, or 1 if it can't be."""
    return mindx.register(action, func)


def tft_notify_controller_stop_train(
    fault_ranks: dict[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    """Ends the start by a dump. Returns 0; 1 for a pause, which can't be had, and in a process that doesn't train."""
    if stop_type == "stop":
        return _dump()
    say_once("pause", "tft_notify_controller_stop_train(%r): training isn't paused, and goes on", stop_type)
    return _FAILED


def tft_notify_controller_on_global_rank(fault_ranks: dict[int, int], time: int = 1) -> int:
    """Returns 0. The agents know already who has failed."""
    return _DONE


def tft_notify_controller_prepare_action(action: str, fault_ranks: dict[int, int] | None = None) -> int:
    """Returns 1: no rank is taken out of a running start."""
    say_once("prepare", "tft_notify_controller_prepare_action(%r): ranks aren't switched while they train", action)
    return _FAILED


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """Ends the start by a dump, whichever repair is wanted; "continue" lets it be. Returns 0, or 1 if it can't."""
    if strategy == "continue":
        return _DONE
    return _dump() if strategy in _DUMPS else _FAILED


def tft_notify_controller_dump() -> int:
    """Dumps, and ends the start. Returns 0; 1 in a process that doesn't train."""
    return _dump()


def tft_query_high_availability_switch() -> bool:
    """Returns True: faults are seen to."""
    return True


def _dump() -> int:
    processor = current()
    return _DONE if processor is not None and processor.order_dump() else _FAILED
