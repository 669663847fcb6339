"""Keeps the old name of ``rekindle.storage.store``, for stores that were written against it."""

from __future__ import annotations

from rekindle.storage.store import Contents, Published, Store

__all__ = ["Contents", "Published", "Store"]
