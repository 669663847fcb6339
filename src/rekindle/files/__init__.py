"""Saves any object at any path, memory first: ``save``, ``load`` and ``flush``, and what belongs to them.

Imports no torch: programs without it save bytes.
"""

from __future__ import annotations

from rekindle.files.flushing import flush
from rekindle.files.listing import FileStatus, status
from rekindle.files.loading import load
from rekindle.files.preloading import preload
from rekindle.files.saving import save
from rekindle.files.settings import configure

__all__ = ["FileStatus", "configure", "flush", "load", "preload", "save", "status"]
