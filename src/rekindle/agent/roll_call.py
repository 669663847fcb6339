"""Asks the agents of all nodes that send this one no beats how far their ranks are, before a hang is called one.

In a large job an agent hears a few others. The rank that all wait for may be on a node that it doesn't hear.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from rekindle.agent.beat import Beat
from rekindle.agent.others import Roll
from rekindle.memory.nodes import Node, Nodes
from rekindle.peers.asking import ask_and_read

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
        self._call: asyncio.Task[Roll] | None = None
        self._called_at = self._answered_at = -math.inf

    def answer(self) -> Roll | None:
        """Returns what the nodes have answered, once for each call; None until then."""
        if not self._asked:
            return Roll({}, True)
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

    async def _ask(self) -> Roll:
        try:
            answers = await asyncio.to_thread(ask_and_read, self._nodes, self._asked, self._message, _REPLY, _read)
        except RuntimeError as error:  # no thread is to be had
            log.warning("the other nodes can't be asked which rank hangs: %s", error)
            return Roll({}, True)
        finally:
            self._answered_at = time.monotonic()
        beats = [answer for answer in answers if isinstance(answer, Beat)]
        silent = [node for node, answer in zip(self._asked, answers, strict=True) if not isinstance(answer, Beat)]
        for beat in beats:
            self._hear(beat)
        if silent:
            log.warning(
                "of the nodes asked which rank hangs %d of %d do not answer, such as %s",
                *(len(silent), len(answers), silent[0].name),
            )
        pages = {rank: page for beat in beats for rank, page in beat.pages.items()}
        return Roll(pages, all(beat.cleared for beat in beats if beat.pages))


def _read(answer: dict[str, Any]) -> Beat | None:
    """Returns the account in an answer; None for another one, as an older agent's, which knows no such question.

    Its times are given by how long ago they were, so it is to be read when it comes.
    """
    try:
        return Beat.from_json(answer)
    except (ValueError, KeyError, TypeError):
        return None
