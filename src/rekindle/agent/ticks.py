"""Has the loops of an agent wake up together: to wake up takes more of a core than most of them do then."""

from __future__ import annotations

import asyncio
import time

__all__ = ["next_tick"]


async def next_tick(seconds: float) -> None:
    """Sleeps until the next multiple of ``seconds`` on this host's monotonic clock."""
    await asyncio.sleep(seconds - time.monotonic() % seconds)
