"""Runs the tests that need a device, each in a process of its own: ``python -m tests.gpu``, with pytest's options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main([str(Path(__file__).parent), "-v", "-m", "gpu", *sys.argv[1:]]))
