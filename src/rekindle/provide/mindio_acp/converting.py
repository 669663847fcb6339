"""Converts files of MindIO's format to files of ``torch.save``."""

from __future__ import annotations

import logging
import os

from rekindle import files
from rekindle.common.os_errors import explain
from rekindle.errors import FormatError, RekindleError, UsageError
from rekindle.files.saving import canonical_target_within, write_straight
from rekindle.provide.mindio_acp.format import as_torch_file, bytes_of, read_map

__all__ = ["convert"]

log = logging.getLogger("rekindle")


def convert(src: str, dst: str) -> int:
    """Writes the object of a file in MindIO's format as a file of ``torch.save``, whole or not at all.

    Returns:
        0, or -1 with the reason in the log: no file in that format, one of bytes, a damaged one, the same path twice, a
        symbolic link, or a path that can't be written.
    """
    try:
        _convert(src, dst)
    except (RekindleError, OSError) as error:
        log.error("mindio_acp.convert: %s is not converted: %s", src, explain(error))
        return -1
    return 0


def _convert(src: str, dst: str) -> None:
    source, target = canonical_target_within(src), canonical_target_within(dst)
    for path in (source, target):
        if os.path.islink(path):
            raise UsageError(f"{path}: is a symbolic link: give the path of the file")
    if source == target:
        raise UsageError(f"{target}: is the file itself: give another path")
    data = files.load(source, raw=True)
    table = read_map(data, source)
    if bytes_of(data, table, source) is not None:
        raise FormatError(f"{source}: is a file of bytes, and there is no object in it")
    write_straight(target, as_torch_file(data, table))
