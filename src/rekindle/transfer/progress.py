"""Reports the progress of an export or import."""

from __future__ import annotations

__all__ = ["Progress"]


class Progress:
    """Receives progress from any thread. This class ignores it."""

    def begin(self, total: int) -> None:
        """Sets the number of bytes to process."""

    def advance(self, nbytes: int) -> None:
        """Counts ``nbytes`` more bytes as done."""
