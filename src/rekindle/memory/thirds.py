"""Keeps the notes by which a drain and the ranks agree on third slots.

While a drain reads the older one of a rank's two snapshots, and the newest stays, a save needs a third slot. A drain
asks for it and waits a little. The ranks make it, or note that they won't.
"""

from __future__ import annotations

import time

from rekindle.memory.notes import read_note, write_note
from rekindle.memory.paths import JobPaths

__all__ = ["Thirds"]

_LATELY = 10.0
"""Seconds for which a question counts, and for which a rank that refused makes none."""


class Thirds:
    """Reads and writes one job's notes on third slots. Writing raises OSError when the directory is gone."""

    def __init__(self, paths: JobPaths) -> None:
        self._made, self._asked = paths.directory / "third", paths.directory / "third-asked"

    def are_made(self, start: str) -> bool:
        """Returns True if the ranks of ``start`` make them when asked, and none has refused lately."""
        try:
            noted, refused = read_note(self._made).decode().split()
            return noted == start and not _is_lately(int(refused))
        except (OSError, ValueError):
            return False

    def write_made(self, start: str, *, refused: bool = False) -> None:
        """Notes that the ranks of ``start`` make them when asked. ``refused``: that one won't for the next seconds."""
        write_note(self._made, f"{start} {_now() if refused else 0:020d}".encode())

    def are_asked(self) -> bool:
        """Returns True if a drain has lately asked for them."""
        try:
            return _is_lately(int(read_note(self._asked)))
        except (OSError, ValueError):
            return False

    def ask(self) -> None:
        """Asks each rank of the node for one."""
        write_note(self._asked, b"%020d" % _now())


def _now() -> int:
    """Returns milliseconds on this host's clock, which starts over with each boot."""
    return int(time.monotonic() * 1e3)


def _is_lately(noted: int) -> bool:
    return noted > 0 and 0 <= _now() - noted < _LATELY * 1e3
