"""What a Checkpointer may be given, and what the surroundings should not be."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

from rekindle.errors import UsageError

__all__ = ["check_settings", "tell_what_a_node_costs", "warn_of_shared_store", "what_storage_alone_means"]

log = logging.getLogger("rekindle")


def check_settings(
    overlap: Any, budget: Any, counts: dict[str, Any], optional: dict[str, Any], times: dict[str, Any]
) -> None:
    """Raise UsageError for arguments that make no sense, naming the first one."""
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in (counts | given).items():
        least = 0 if name == "memory_headroom" else 1
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 63:
            raise UsageError(
                f"{name} is {value!r}: must be a whole number of at least {least}, and less than 2 to the 63rd"
            )
    if not (isinstance(overlap, bool) or overlap in ("auto", "verify")):
        raise UsageError(f"overlap is {overlap!r}: must be 'auto', True, False or 'verify'")
    if not isinstance(budget, (int, float)) or not 0 < budget < 1:
        raise UsageError(f"snapshot_budget is {budget!r}: must be a share of training time, such as 0.01")
    for name, value in times.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        zero = name == "persist_seconds" and value == 0  # storage is never left in peace
        if not number or not (0 < value < math.inf or zero):
            raise UsageError(
                f"{name} is {value!r}: must be a number of seconds, {'0 or ' * (name == 'persist_seconds')}more than 0"
            )


def tell_what_a_node_costs(seconds: float | None, every: int | None) -> None:
    """Log the training that the loss of this node would lose.

    Storage gets a checkpoint at most every so many ``seconds``, or those of ``every`` so many steps; with neither the
    newest one as soon as it is free, of which there is nothing to tell.
    """
    if every is not None:
        log.info(
            "storage gets every step that is a multiple of %d: if this node is lost, up to %d steps are lost, and "
            "those made while the last of them was written (persist_every)",
            *(every, every),
        )
    elif seconds is not None:
        log.info(
            "storage gets a checkpoint at most every %g s, and is written to for at most a tenth of the time: if this "
            "node is lost, up to %g s of training are lost, and more if writing a checkpoint takes over %g s "
            "(persist_seconds, persist_every). A fault of processes loses none of this: memory has the newest snapshot",
            *(seconds, seconds, seconds / 10),
        )


def what_storage_alone_means(seconds: float | None) -> str:
    """The price of having no memory store, where storage is left in peace for so many ``seconds``, or never."""
    if seconds is None:
        return "which slows training at each save"
    return (
        f"at most every {seconds:g} s and for at most a tenth of the time: a process that dies loses what was trained "
        "since, unless guard() secures it (persist_seconds, persist_every)"
    )


def warn_of_shared_store(rank: int) -> None:
    """torchrun of torch 2.13 lets restarted workers meet the addresses of dead ones; say so before it happens."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and shared:
        log.warning(
            "torchrun reuses its store after a restart, and restarted ranks may fail to find each other: launch with "
            "'rekindle run', or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; with several nodes use --rdzv-backend c10d "
            "rather than --master-addr and --master-port"
        )
