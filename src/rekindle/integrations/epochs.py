"""Warns where a start does not train what a user may expect: an epoch has changed, or nothing is left to train."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from rekindle.data.parts import samples_per_step

__all__ = ["epoch_of", "warn_of_no_steps", "warn_of_other_epoch"]

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


def warn_of_no_steps(root: str | os.PathLike[str], step: int) -> None:
    """Warns that the run in ``root`` had come to its end at ``step`` before this start."""
    log.warning(
        "the run in %s is over: it ended at step %d, and this start trains nothing. A root holds one run: give another "
        "one, also of the same script, another root. To go on with this one, ask for more steps; where it was stopped "
        "early, train from its weights in another root",
        *(root, step),
    )
