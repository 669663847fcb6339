"""How far long work is."""

from __future__ import annotations

__all__ = ["Progress"]


class Progress:
    """Told by any thread. This one keeps it to itself."""

    def begin(self, total: int) -> None:
        """So many bytes will be worked on."""

    def advance(self, nbytes: int) -> None:
        """So many more bytes are done."""
