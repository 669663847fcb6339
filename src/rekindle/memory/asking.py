"""Keeps the note by which a rank asks for its snapshots to be carried to storage. The receipts say which."""

from __future__ import annotations

from rekindle.memory.mark import Mark, mark_of
from rekindle.memory.notes import write_note
from rekindle.memory.paths import JobPaths

__all__ = ["Asking"]


class Asking:
    """Writes one job's note, and sees when it was. Safe to use from any thread or process."""

    def __init__(self, paths: JobPaths) -> None:
        self._path = paths.directory / "asked"

    def ask(self) -> None:
        """Has the agent look. Raises OSError when that can't be noted."""
        write_note(self._path, b"")

    def mark(self) -> Mark:
        """Returns what changes each time that a rank asks."""
        return mark_of(self._path)
