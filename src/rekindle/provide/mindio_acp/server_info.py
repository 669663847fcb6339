"""Takes the settings that programs give to ``mindio_acp.initialize``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from rekindle.common.os_errors import explain
from rekindle.errors import RekindleError
from rekindle.files.settings import current_settings

__all__ = ["initialize"]

log = logging.getLogger("rekindle")

_LIMIT = "REKINDLE_FILES_LIMIT"
_CAPACITY = "memfs.data_block_pool_capacity_in_gb"


def _between(least: int, most: int) -> Callable[[str], bool]:
    return lambda text: text.isascii() and text.isdigit() and least <= int(text) <= most


_CHECKS: dict[str, Callable[[str], bool]] = {
    _CAPACITY: _between(1, 1024),
    "memfs.data_block_size_in_mb": _between(1, 1024),
    "memfs.write.parallel.enabled": lambda text: text in ("true", "false"),
    "memfs.write.parallel.thread_num": _between(2, 96),
    "memfs.write.parallel.slice_in_mb": _between(1, 1024),
    "background.backup.thread_num": _between(1, 256),
}
"""Tells for each setting if a value is one. Only the capacity means anything here: the rest needs no tuning."""


def initialize(server_info: Mapping[str, str] | None = None) -> int:
    """Checks that files can be saved, and takes settings. May be called again; never waits, and starts nothing.

    Args:
        server_info: settings as texts. ``memfs.data_block_pool_capacity_in_gb`` bounds the memory that files take, if
            it is less than the default and no setting of Rekindle's own does. The other names are checked only.

    Returns:
        0, or -1 for an unknown name, a value out of range, or settings of Rekindle that make no sense.
    """
    info: Any = {} if server_info is None else server_info
    if not isinstance(info, Mapping):
        log.error("mindio_acp.initialize: %r: must map names of settings to texts", info)
        return -1
    for name, value in info.items():
        if name not in _CHECKS or not isinstance(value, str) or not _CHECKS[name](value):
            log.error("mindio_acp.initialize: %s=%r: no such setting, or a value out of range", name, value)
            return -1
    try:
        if _CAPACITY in info and current_settings().limit is None:
            _take_limit(int(info[_CAPACITY]))
    except (RekindleError, OSError) as error:
        log.error("mindio_acp.initialize: %s", explain(error))
        return -1
    return 0


def _take_limit(gigabytes: int) -> None:
    """Lets files take at most so much memory, unless the default is less. Child processes keep to it too."""
    found = os.statvfs(current_settings().base.parent)
    if gigabytes << 30 < found.f_blocks * found.f_frsize // 2:
        os.environ[_LIMIT] = f"{gigabytes}GiB"
