"""Holds descriptors for the time after a fault: the fault may be that the process has none left."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["SpareDescriptors"]

_COUNT = 16
"""Descriptors that are held. A gasp has few files open at a time; other threads may take some of what is given up."""


class SpareDescriptors:
    """Descriptors of /dev/null: as many as there are, and no more than a gasp needs. Thread-safe."""

    def __init__(self) -> None:
        self._held: list[int] = []
        with suppress(OSError):  # there are fewer
            while len(self._held) < _COUNT:
                self._held.append(os.open(os.devnull, os.O_RDONLY))

    def give_up(self) -> None:
        """Closes them, each once: its number is another file's from then on."""
        with suppress(IndexError):
            while True:
                os.close(self._held.pop())
