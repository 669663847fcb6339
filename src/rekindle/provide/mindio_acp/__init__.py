"""Stands in for MindIO's ``mindio_acp``: the same calls, return values and files, over ``rekindle.files``.

Programs written for it run unchanged: see docs/mindspore.md and docs/files.md. Programs that only use files, such as
MindSpore, need no torch.
"""

from __future__ import annotations

from rekindle.provide.mindio_acp.checking import register_checker
from rekindle.provide.mindio_acp.converting import convert
from rekindle.provide.mindio_acp.flushing import flush
from rekindle.provide.mindio_acp.helper import CheckpointHelper
from rekindle.provide.mindio_acp.loading import load, preload
from rekindle.provide.mindio_acp.saving import multi_save, save
from rekindle.provide.mindio_acp.server_info import initialize
from rekindle.provide.mindio_acp.streams import create_file, open_file

__all__ = [
    "CheckpointHelper",
    "convert",
    "create_file",
    "flush",
    "initialize",
    "load",
    "multi_save",
    "open_file",
    "preload",
    "register_checker",
    "save",
]
