"""Has the agents of a job's other nodes end it too, for ``rekindle stop``."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rekindle.errors import BusyError, FormatError, NotDurableError
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Node, Nodes, describe_node
from rekindle.peers.asking import ask_nodes

__all__ = ["OtherAgents"]

_ANSWERS_WITHIN = 3.0
"""Seconds that a node gets to answer."""
_AGAIN = 0.2
"""Seconds between two questions whether an agent has ended."""
_ENDED = "its agent has ended"


class OtherAgents:
    """The agents of the other nodes of a job's newest start; none of a job on one node."""

    def __init__(self, job: JobDir) -> None:
        self._nodes: Nodes | None = None
        with suppress(OSError, FormatError):
            self._nodes = Nodes.read(job)
        nodes = self._nodes.nodes if self._nodes is not None else []
        self._others = [node for number, node in enumerate(nodes) if self._nodes and number != self._nodes.own]
        self.said: dict[str, str] = {}
        """The words of each node that needs no further waiting, by its name and ranks."""

    def ask(self) -> None:
        """Asks all to end the job. Raises BusyError where it is still trained."""
        answers = self._ask_all(self._others, only_look=True)
        busy = [
            f"{name} by processes {', '.join(map(str, answer['trainers']))}"
            for name, answer in answers.items()
            if answer.get("trainers")
        ]
        if busy:
            raise BusyError(f"the job is being trained on other nodes: {'; '.join(busy)}: end them first")
        self._ask_all([node for node in self._others if _describe(node) in answers])

    def wait(self, deadline: float, progress: Callable[[], object]) -> None:
        """Waits until the agents that were asked have ended. Raises NotDurableError if they don't in time."""
        while left := [node for node in self._others if _describe(node) not in self.said]:
            answers = self._ask_all(left, _ENDED)
            if answers and time.monotonic() > deadline:
                late = "; ".join(f"{name}: {answer.get('why') or 'not ready'}" for name, answer in answers.items())
                raise NotDurableError(f"other nodes have not finished in time: {late}")
            progress()
            time.sleep(_AGAIN)

    def leave(self, words: str) -> None:
        """Asks none of them."""
        self.said = dict.fromkeys(map(_describe, self._others), words)

    def _ask_all(
        self, nodes: list[Node], refused: str = "no agent listens there", *, only_look: bool = False
    ) -> dict[str, dict[str, Any]]:
        """Returns the answers, by name and ranks. ``said`` gets the reasons of those that don't answer."""
        answers: dict[str, dict[str, Any]] = {}
        if self._nodes is None:
            return answers
        asked = [node for node in nodes if node.port]
        for node in nodes:
            if not node.port:
                self.said[_describe(node)] = "can't be reached from other nodes: run 'rekindle stop' there, too"
        message = {"verb": "stop", "only_look": only_look}
        for node, answer in zip(asked, ask_nodes(self._nodes, asked, message, _ANSWERS_WITHIN), strict=True):
            if isinstance(answer, ConnectionError):  # refused, or closed as the agent ended
                self.said[_describe(node)] = refused
            elif isinstance(answer, Exception):
                self.said[_describe(node)] = f"is not asked to stop: {answer}"
            else:
                answers[_describe(node)] = answer
        return answers


def _describe(node: Node) -> str:
    return describe_node(node.name, node.ranks)
