"""Warns where an epoch no longer has the steps that it had when a place in it was saved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rekindle.data.parts import samples_per_step

__all__ = ["epoch_of", "warn_of_other_epoch"]

log = logging.getLogger("rekindle")


def epoch_of(loader: Any) -> list[int]:
    """Returns the batches of an epoch, 0 if the loader doesn't tell, and the samples of a batch on all ranks."""
    try:
        batches = len(loader)
    except TypeError:
        batches = 0
    return [batches, samples_per_step(loader)]


def warn_of_other_epoch(before: Sequence[int] | None, now: Sequence[int], done: int) -> None:
    """Warns if an epoch's steps, and their samples, are not those of ``before``: ``done`` steps are another place."""
    if before is not None and list(before) != list(now):
        log.warning(
            "the data is not that of the checkpoint: an epoch had %s steps of %d samples, and has %s of %d now. The %d "
            "steps that are done count as as many of these, so some samples come twice or never",
            *(before[0] or "some", before[1], now[0] or "some", now[1], done),
        )
