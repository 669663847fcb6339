"""Asks the agents of all nodes that send this one no beats how far their ranks are, before a hang is called one.

In a large job an agent hears a few others. The rank that all wait for may be on a node that it doesn't hear.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rekindle.agent.beat import Beat, Page
from rekindle.memory.nodes import Node, Nodes
from rekindle.peers.asking import ask_nodes

__all__ = ["RollCall"]

log = logging.getLogger("rekindle.agent")

_REPLY = 1.0
"""Seconds that each node gets to connect and to answer."""
_AGAIN = 2.0
"""Seconds from one call to the next: the ranks that are late here may be no hang by the word of others. Answers are of
no use for longer than that: they may be of an earlier silence."""


class RollCall:
    """The calls of one start. Used in the event loop; the questions are asked in other threads."""

    def __init__(
        self, nodes: Nodes, asked: Sequence[Node], message: dict[str, Any], hear: Callable[[Beat], None]
    ) -> None:
        """``hear`` is called with each answer, in the event loop."""
        self._nodes, self._asked, self._message, self._hear = nodes, asked, message, hear
        self._call: asyncio.Task[dict[int, Page]] | None = None
        self._called_at = self._answered_at = -math.inf

    def pages(self) -> dict[int, Page] | None:
        """Returns the pages of the ranks on the nodes that have answered, once for each call; None until then."""
        if not self._asked:
            return {}
        now, call = time.monotonic(), self._call
        if call is not None and not call.done():
            return None
        self._call = None
        if call is not None and now < self._answered_at + _AGAIN:
            return call.result()
        if now >= self._called_at + _AGAIN:
            self._called_at = now
            self._call = asyncio.get_running_loop().create_task(self._ask())
        return None

    async def _ask(self) -> dict[int, Page]:
        try:
            answers = await asyncio.to_thread(ask_nodes, self._nodes, self._asked, self._message, _REPLY)
        except RuntimeError as error:  # no thread is to be had
            log.warning("the other nodes can't be asked which rank hangs: %s", error)
            return {}
        finally:
            self._answered_at = time.monotonic()
        pages: dict[int, Page] = {}
        silent = []
        for node, answer in zip(self._asked, answers, strict=True):
            beat = None
            if isinstance(answer, dict):
                with suppress(ValueError, KeyError, TypeError):
                    beat = Beat.from_json(answer)
            if beat is None:  # as of an older agent, which knows no such question
                silent.append(node.name)
                continue
            pages |= beat.pages
            self._hear(beat)
        if silent:
            log.warning(
                "of the nodes asked which rank hangs %d of %d do not answer, such as %s",
                *(len(silent), len(answers), silent[0]),
            )
        return pages
