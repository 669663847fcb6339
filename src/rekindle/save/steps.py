"""Refuses what can't be right: the number of a step that can't be the one just completed, a loss that is not finite."""

from __future__ import annotations

import logging
import math

import torch

from rekindle.errors import NonFiniteLossError, UsageError
from rekindle.format.lineage import ShardId
from rekindle.format.names import MAX_STEP
from rekindle.save.updates import Updates

__all__ = ["check_loss", "check_step"]

log = logging.getLogger("rekindle")


def check_step(n: int, newest: ShardId | None, base: ShardId | None, updates: Updates) -> None:
    """Raise UsageError, with the right way to count, for an ``n`` that was passed or can't be.

    Where it may be right, after a write that need not have been an update, a warning says so once.
    ``newest`` was saved last, ``base`` was restored, ``updates`` counts those made since.
    """
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= MAX_STEP:
        raise UsageError(f"step {n!r}: must be the number of completed updates, a whole number of 0 to {MAX_STEP}")
    if newest is not None and n < newest.step:
        raise UsageError(f"step {n} after step {newest.step}: steps must grow")
    if newest is None and base is not None and n < base.step:
        raise UsageError(f"step {n} after restoring step {base.step}: steps must grow")
    if n == (base.step if base is not None else 0) and updates.made():
        right = (
            "A step is a number of completed updates: loop by 'for step in range(start + 1, total + 1)', where start "
            "is what restore() returned"
        )
        if base is None and not updates.announced():
            log.warning(
                "step 0 after a write to the state: right if it was no update of training, but weights loaded by hand "
                "or an optimizer's state made with a learning rate of zero. %s",
                right,
            )
            updates.begin()
            return
        before = f"step {n} was restored" if base is not None else "training began at step 0"
        raise UsageError(f"step {n} after an update: {before}, and the state is that of step {n + 1} by now. {right}")
    if updates.made_since(n):
        raise UsageError(
            f"step {n} again after an update: step {n} was complete before it, and the state is that of a later step "
            "by now. A step is a number of completed updates: pass the next one"
        )


def check_loss(loss: float | torch.Tensor, step: int) -> None:
    """Raise NonFiniteLossError for a loss, of the step after ``step``, that is infinite or not a number."""
    value = loss.item() if isinstance(loss, torch.Tensor) else loss
    if not math.isfinite(value):
        raise NonFiniteLossError(f"the loss of the step after step {step} is {value}")
