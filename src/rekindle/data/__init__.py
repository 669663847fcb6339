"""Brings the order of the data back after a restart, in the middle of an epoch: ``Resumable``."""

from __future__ import annotations

from rekindle.data.resumable import Resumable

__all__ = ["Resumable"]
