"""Keeps what ``rekindle verify`` has found on storage, and when: in one file beside the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from rekindle.errors import FormatError
from rekindle.format.fields import check_seconds, loads
from rekindle.format.lineage import CheckpointKey
from rekindle.storage.store import Store

__all__ = ["VERDICTS", "Verdict", "load_verdicts", "note_verdicts"]

VERDICTS = "verified.json"
_LONGEST = 16 << 20
"""Bytes of the file, at most. A verdict takes 60."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of reading every byte of a checkpoint on storage."""

    at: float
    """Time of it, in seconds since 1970."""
    sound: bool

    @staticmethod
    def name_of(key: CheckpointKey) -> str:
        """Returns the name under which a checkpoint's verdict is kept."""
        return f"{key.step}-{key.incarnation.id}"


def load_verdicts(store: Store) -> dict[str, Verdict]:
    """Returns the verdicts by name; none where the file is missing or damaged. Raises OSError as storage does."""
    try:
        found = loads(store.read_extra(VERDICTS, _LONGEST))
        return {str(name): Verdict(check_seconds(at), bool(sound)) for name, (at, sound) in found.items()}
    except (FileNotFoundError, NotADirectoryError, FormatError, ValueError, TypeError, AttributeError):
        return {}


def note_verdicts(store: Store, news: Mapping[str, Verdict]) -> None:
    """Adds verdicts, and drops those of checkpoints that storage has no more. Raises OSError.

    Of two that write at the same time one's news may be lost. Then these checkpoints count as not read back.
    """
    there = {Verdict.name_of(entry.stamp.checkpoint) for entry in store.published()}
    kept = {name: one for name, one in load_verdicts(store).items() if name in there}
    told = {name: [round(one.at, 3), one.sound] for name, one in (kept | dict(news)).items()}
    store.write_extra(VERDICTS, json.dumps(told).encode())
