"""Keeps torch's own watchdog of NCCL from ending ranks that still have their state to secure, and frees stuck ones.

torch is imported by functions only: the launcher sets the environment without it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

__all__ = [
    "SETTINGS",
    "abort_communicators",
    "aborts_by_itself",
    "can_abort",
    "set_defaults",
    "uses_nccl",
    "warn_of_settings",
]

log = logging.getLogger("rekindle")

SETTINGS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")
"""Environment variables that torch reads when it makes a process group.

The first is 3 by default, and 1 under torchrun: after an error of NCCL's the process is torn down, with 1 and 2 the
communicators are aborted. What is queued behind a collective then runs as if that had succeeded. The second is 1 by
default: an error of the device, such as a failed assertion in a kernel, ends the process, whatever the first one says.
"""
_KNOWN = {"gloo", "nccl"}
"""Backends of torch.distributed of which is known when they abort communicators."""
_OFF = ("0", "n", "no", "f", "false")
"""Values, in lower case, that torch takes for no."""


def set_defaults(environ: MutableMapping[str, str]) -> bool:
    """Switches off what the user has not set. Returns True if NCCL's own error handling is off by that."""
    handled = SETTINGS[0] not in environ
    for name in SETTINGS:
        environ.setdefault(name, "0")
    return handled


def uses_nccl() -> bool:
    """Returns True if the process group of all ranks speaks NCCL, or ROCm's RCCL, which goes by the same name."""
    import torch.distributed as dist  # noqa: PLC0415

    return dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config())


def aborts_by_itself() -> bool:
    """Returns True if communicators may be aborted when a death or an error is noticed, at any time.

    False only where that is known: NCCL's settings are off, Gloo aborts nothing that a device waits for, or the process
    has no process group. Other backends, such as HCCL and XCCL, have watchdogs with settings of their own.
    """
    handled = os.environ.get(SETTINGS[0], "").lower() not in _OFF
    blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() not in _OFF
    return (uses_nccl() and (handled or blocking)) or not _device_backends() <= _KNOWN


def _device_backends() -> set[str]:
    """Returns the backends by which the devices that this process uses speak with other ranks."""
    import torch.distributed as dist  # noqa: PLC0415

    from rekindle.devices.table import all_backends  # noqa: PLC0415

    if not (dist.is_available() and dist.is_initialized()):
        return set()
    by_kind = dict(pair.split(":", 1) for pair in str(dist.get_backend_config()).split(",") if ":" in pair)
    return {by_kind[backend.kind] for backend in all_backends() if backend.in_use() and backend.kind in by_kind}


def warn_of_settings(rank: int) -> None:
    """Warns, on rank 0, where torch may end a rank after a fault, or let its updates run on, before it is secured."""
    wrong = [name for name in SETTINGS if os.environ.get(name, "").lower() not in _OFF]
    if rank == 0 and wrong and uses_nccl():
        log.warning(
            "after a fault torch may end ranks before their state is secured, or let updates run on incomplete "
            "gradients, as %s not 0: training then goes back to an earlier snapshot. Launch with 'rekindle run', or "
            "set %s before init_process_group()",
            *(f"{' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'}", " ".join(f"{name}=0" for name in wrong)),
        )


def can_abort() -> bool:
    """Returns True if torch can abort communicators: 2.6 and newer do."""
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    return hasattr(distributed_c10d, "_abort_process_group")


def abort_communicators() -> None:
    """Aborts all communicators, which ends the kernels that wait for dead ranks. May hang."""
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    distributed_c10d._abort_process_group()
