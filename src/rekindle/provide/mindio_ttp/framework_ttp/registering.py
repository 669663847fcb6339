"""Registers callbacks. Those of a dump are called at a fault; those of repairs are kept, and never called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rekindle.provide.mindio_ttp.callbacks import callbacks, say_once
from rekindle.provide.mindio_ttp.framework_ttp.enums import ReportState

__all__ = [
    "tft_register_clean_handler",
    "tft_register_decrypt_handler",
    "tft_register_exception_handler",
    "tft_register_exit_handler",
    "tft_register_rebuild_group_handler",
    "tft_register_rename_handler",
    "tft_register_repair_handler",
    "tft_register_rollback_handler",
    "tft_register_save_ckpt_handler",
    "tft_register_stop_handler",
    "tft_register_stream_sync_handler",
    "tft_register_zit_downgrade_rebuild_handler",
    "tft_register_zit_upgrade_rebuild_handler",
    "tft_register_zit_upgrade_repair_handler",
    "tft_register_zit_upgrade_rollback_handler",
]


def tft_register_save_ckpt_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Registers ``func(step, save_info, args, ctx)``: writes this rank's part of a dump, in a thread of its own."""
    callbacks.register("save_ckpt", func, ctx)


def tft_register_rename_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Registers ``func(step, args)``: gives a dump its name. Called on one rank, once all parts are written."""
    callbacks.register("rename", func, ctx)


def tft_register_exit_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Registers ``func(ctx)``: the last thing before a process ends by a fault."""
    callbacks.register("exit", func, ctx)


def tft_register_stop_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Registers ``func(args, ctx)``: stops what devices do, where ``TTP_STOP_CLEAN_BEFORE_DUMP=1``."""
    callbacks.register("stop", func, ctx)


def tft_register_clean_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Registers ``func(is_uce, args, ctx)``: lets devices take work again after ``stop``. Its answer 1 is a failure."""
    callbacks.register("clean", func, ctx)


def tft_register_rebuild_group_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Keeps ``func``, which is never called: groups are made anew by a new start."""
    _keep("rebuild_group", func, ctx)


def tft_register_repair_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Keeps ``func``, which is never called: nothing is repaired in a running start."""
    _keep("repair", func, ctx)


def tft_register_rollback_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Keeps ``func``, which is never called: a new start loads a checkpoint."""
    _keep("rollback", func, ctx)


def tft_register_stream_sync_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Keeps ``func``, which is never called: training isn't paused."""
    _keep("stream_sync", func, ctx)


def tft_register_zit_downgrade_rebuild_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Keeps ``func``, which is never called: a new start may have fewer ranks."""
    _keep("zit_downgrade_rebuild", func, ctx)


def tft_register_zit_upgrade_rebuild_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Keeps ``func``, which is never called: a new start may have more ranks."""
    _keep("zit_upgrade_rebuild", func, ctx)


def tft_register_zit_upgrade_repair_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Keeps ``func``, which is never called: nothing is repaired in a running start."""
    _keep("zit_upgrade_repair", func, ctx)


def tft_register_zit_upgrade_rollback_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Keeps ``func``, which is never called: a new start loads a checkpoint."""
    _keep("zit_upgrade_rollback", func, ctx)


def tft_register_decrypt_handler(decryptor: Callable[..., Any] | None) -> None:
    """Keeps ``decryptor``, which is never called: no key of TLS is read."""
    if decryptor is not None:
        callbacks.register("decrypt", decryptor)


def tft_register_exception_handler(fault_pattern: str, fault_type: str, fault_handle: Callable[[str], str]) -> None:
    """Registers ``fault_handle(text)`` for exceptions with ``fault_pattern`` in their text. The log has its answer.

    Raises KeyError for a ``fault_type`` that is no name of a ReportState.
    """
    callbacks.expect(fault_pattern, ReportState[fault_type].name, fault_handle)


def _keep(name: str, func: Callable[..., Any], ctx: Any) -> None:
    callbacks.register(name, func, ctx)
    say_once(
        "kept",
        "mindio_ttp: the callbacks repair, rollback, rebuild_group, stream_sync and zit_* are kept, and never called: "
        "a fault is answered by a dump, and 'rekindle run' starts all ranks again",
    )
