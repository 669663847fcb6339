"""Makes a forked process the worker that a cold start would have made: environment, streams, name, random numbers."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

from rekindle.common.process_start import mark_warm

__all__ = ["become_worker", "run_users_sitecustomize", "set_name"]

_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 15, 35, 14
_NO_FILE = 0xFFFFFFFF
_FIXED_SEED = 67280421310721
"""First seed of torch's generator in those versions that don't draw one at the import."""


class _MemoryMap(ctypes.Structure):
    """struct prctl_mm_map of Linux."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


_STAT_FIELDS = {
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
    "arg_start": 48,
    "arg_end": 49,
}
"""Fields of /proc/self/stat, as proc(5) counts them."""

_shown: list[Any] = []
"""The block that /proc/PID/environ shows: the kernel reads it from this process as long as that lives."""


def become_worker(environment: dict[str, str], streams: Iterable[int]) -> None:
    """Take over the environment and the standard streams, and draw random numbers of its own."""
    for target, given in enumerate(streams):
        os.dup2(given, target)
        os.close(given)
    mark_warm()
    os.environ.clear()  # so that the order is a cold start's too
    os.environ.update(environment)
    _show_environment()
    _reseed()
    thread: Any = threading.main_thread()
    thread._set_native_id()  # a fork leaves the old one there


def set_name(name: str) -> None:
    """Set the name that ``ps -o comm`` and ``top`` show."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _show_environment() -> None:
    """Have /proc/PID/environ tell the new environment, for debuggers and ``ps``.

    A kernel without CONFIG_CHECKPOINT_RESTORE refuses, and goes on to show the old one.
    """
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    block = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    held = ctypes.create_string_buffer(block, len(block))
    with open("/proc/self/stat") as file:
        stat = file.read().rpartition(")")[2].split()
    fields = {name: int(stat[number - 3]) for name, number in _STAT_FIELDS.items()}
    begin = ctypes.addressof(held)
    told = _MemoryMap(**fields, env_start=begin, env_end=begin + len(block), brk=libc.sbrk(0), exe_fd=_NO_FILE)
    size = ctypes.c_ulong(ctypes.sizeof(told))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(told), size, ctypes.c_ulong(0)) == 0:
        _shown.append(held)


def _reseed() -> None:
    """Draw anew what modules have drawn at their import: ranks with one seed would train on the same numbers.

    Python's own generator does so at each fork.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.default_generator.initial_seed() != _FIXED_SEED:
        torch.default_generator.seed()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)


def run_users_sitecustomize() -> bool:
    """Runs the sitecustomize module that Python would have found without Rekindle's. False if there is none."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return False
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)
    return True
