"""Tests that only ``python -m tests.trouble --full`` runs: they take long for what they could find at each change."""

from __future__ import annotations

import os

import pytest

__all__ = ["FULL", "rare"]

FULL = os.environ.get("REKINDLE_TROUBLE") == "full"
rare = pytest.mark.skipif(not FULL, reason="only with REKINDLE_TROUBLE=full, as python -m tests.trouble --full sets it")
