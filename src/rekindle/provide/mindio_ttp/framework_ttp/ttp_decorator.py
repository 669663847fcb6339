"""Defines the calls of a training program: beginning, ends of updates, replicas, errors, and the decorator."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, NoReturn

from rekindle.errors import UsageError
from rekindle.provide.mindio_ttp.callbacks import DAMAGE, callbacks, say_once
from rekindle.provide.mindio_ttp.checking import check_address, check_rank, refuse_repair
from rekindle.provide.mindio_ttp.dump import STOP_FIRST
from rekindle.provide.mindio_ttp.framework_ttp.enums import Action, OptimizerType, RepairType, ReportState
from rekindle.provide.mindio_ttp.processor import Processor, begin, current, end

__all__ = [
    "Action",
    "OptimizerType",
    "RepairType",
    "ReportState",
    "get_device",
    "get_mindio_export_version",
    "set_mindio_export_version",
    "tft_destroy_processor",
    "tft_end_updating_os",
    "tft_exception_handler",
    "tft_get_reboot_type",
    "tft_get_repair_step",
    "tft_get_repair_type",
    "tft_init_processor",
    "tft_is_reboot_node",
    "tft_pause_train",
    "tft_report_error",
    "tft_report_load_ckpt_step",
    "tft_reset_limit_step",
    "tft_set_dp_group_info",
    "tft_set_optimizer_replica",
    "tft_set_step_args",
    "tft_start_copy_os",
    "tft_start_processor",
    "tft_start_updating_os",
    "tft_wait_next_action",
    "tft_wait_repair_action",
]

log = logging.getLogger("rekindle")

_HARMLESS = ("RS_NORMAL", "RS_INIT_FINISH", "RS_PREREPAIR_FINISH", "RS_STEP_FINISH")
"""States that are no error."""
_MINDSPEED = ("MindSpeed", "MindSpeed-LLM")

_version: str | None = None
"""Name of the framework, once it has told."""


# -- beginning and ending --------------------------------------------------------------------------------------------


def tft_init_processor(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """Makes this rank's processor. Raises UsageError."""
    check_rank("tft_init_processor", rank, world_size)
    refuse_repair(arf=enable_arf, zit=enable_zit, local_copy=enable_local_copy)
    begin(rank, world_size)


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Joins the job. A collective: waits for all ranks, for a bounded time. Raises where one doesn't come."""
    check_address("tft_start_processor", master_ip, port)
    _processor("tft_start_processor").start()


def tft_destroy_processor() -> None:
    """Leaves the job, once storage has its last record. The end of the process does so too."""
    end()


def set_mindio_export_version(framework_type: str) -> None:
    """Tells the framework: MindSpeed's stop and clean devices before a dump. Raises UsageError for another one."""
    global _version
    if framework_type not in _MINDSPEED:
        raise UsageError(f"framework {framework_type!r}: must be {' or '.join(_MINDSPEED)}")
    _version = framework_type
    os.environ[STOP_FIRST] = "1"


def get_mindio_export_version() -> str | None:
    """Returns the framework that ``set_mindio_export_version`` was told; None if it was not called."""
    return _version


def get_device() -> int:
    """Returns the index of the device that the calling thread uses; 0 without one."""
    import torch  # noqa: PLC0415

    accelerator = getattr(torch, "accelerator", None)  # torch 2.6
    if accelerator is None or not accelerator.is_available():
        return 0
    index: int = accelerator.current_device_index()
    return index


# -- training --------------------------------------------------------------------------------------------------------


def tft_exception_handler(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the function that trains. At a fault all ranks dump, and end; this rank's exception is raised on."""
    if not callable(func):
        raise TypeError(f"tft_exception_handler: {func!r} is not callable")

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        callbacks.args = args if _version in _MINDSPEED else list(args)
        answer = _processor("the decorated function").run(lambda: func(*args, **kwargs))
        end()
        return answer

    return wrapper


def tft_start_updating_os(backup_step: int = -1) -> None:
    """Tells that the optimizer's update begins. ``backup_step`` is not used."""
    _processor("tft_start_updating_os").start_update()


def tft_end_updating_os(step: int) -> None:
    """Tells that ``step`` updates are complete. Raises UsageError for a step that can't be."""
    if type(step) is not int or step < 1:
        raise UsageError(f"tft_end_updating_os({step!r}): must be the number of completed updates, 1 or more")
    _processor("tft_end_updating_os").end_update(step)


def tft_start_copy_os() -> None:
    """Does nothing: no local copy is made by the optimizer."""
    say_once("copy", "tft_start_copy_os: accepted, and no local copy of the optimizer is used")


def tft_set_optimizer_replica(rank: int, replica_info: list[dict[str, Any]]) -> None:
    """Tells which ranks hold copies of this rank's shards. Raises UsageError."""
    processor = _processor("tft_set_optimizer_replica")
    if rank != processor.rank:
        raise UsageError(f"tft_set_optimizer_replica: rank {rank!r}, and this is rank {processor.rank}")
    processor.tell_replicas(replica_info)


def tft_set_dp_group_info(rank: int, dp_rank_list: list[int]) -> None:
    """Does nothing: it is for a start that goes on with fewer ranks."""


def tft_set_step_args(args: Any) -> None:
    """Sets what callbacks get as ``args``, unless the framework is MindSpeed or None is given."""
    if args is not None and _version not in _MINDSPEED:
        callbacks.args = args


def tft_report_load_ckpt_step(step: int) -> None:
    """Does nothing: the next step that is told counts."""


def tft_reset_limit_step() -> None:
    """Does nothing: no step is a limit to a start that lives."""


def tft_pause_train(cur_step: int) -> None:
    """Does nothing: training isn't paused."""


# -- errors ----------------------------------------------------------------------------------------------------------


def tft_report_error(error_type: int | ReportState, error_code: str = "") -> None:
    """Dumps, if the state is one of an error, and returns when this rank has done its part. Raises UsageError."""
    try:
        state = error_type if isinstance(error_type, ReportState) else ReportState(error_type)
    except ValueError:
        raise UsageError(f"tft_report_error: {error_type!r} is no value of ReportState") from None
    if state.name not in _HARMLESS:
        words = f"the program has reported {state.name}" + (f", {error_code}" if error_code else "")
        _processor("tft_report_error").fail(RuntimeError(words), damaged=state.name in DAMAGE)


def tft_wait_next_action() -> int:
    """Returns ``Action.EXIT.value`` once this rank has done its part in a dump, or none has come in time."""
    _processor("tft_wait_next_action").await_dump()
    return int(Action.EXIT.value)


def tft_wait_repair_action() -> int:
    """Returns as ``tft_wait_next_action`` does: nothing is repaired."""
    return tft_wait_next_action()


def tft_get_repair_step() -> int:
    """Returns the step that was dumped; 0 if there is none."""
    processor = current()
    return 0 if processor is None or processor.result is None else processor.result.step


def tft_get_repair_type() -> str:
    """Returns "dump" after a fault, else "unknow", as the original spells it."""
    processor = current()
    return "unknow" if processor is None or processor.result is None else "dump"


def tft_is_reboot_node() -> bool:
    """Returns False: no rank joins a running start."""
    return False


def tft_get_reboot_type() -> str:
    """Returns "arf", as the original does where there is no hot switch."""
    return "arf"


def _processor(call: str) -> Processor:
    found = current()
    if found is None:
        _refuse(call)
    return found


def _refuse(call: str) -> NoReturn:
    raise UsageError(f"{call}: call tft_init_processor and tft_start_processor first")
