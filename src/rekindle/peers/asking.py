"""Asks the agents of other nodes one question, all at once, for a person who waits for the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

from rekindle.errors import RekindleError
from rekindle.memory.nodes import Node, Nodes
from rekindle.peers.wire import Credentials, call, connect

__all__ = ["Answer", "ask_and_read", "ask_nodes"]

T = TypeVar("T")

_AT_A_TIME = 64
"""Nodes that are asked at a time."""

Answer = dict[str, Any] | OSError | RekindleError
"""The reply of a node, or the reason why there is none."""


def ask_nodes(nodes: Nodes, asked: Sequence[Node], message: Mapping[str, Any], seconds: float) -> list[Answer]:
    """Returns the answer of each of the ``asked`` nodes, which have agents. Each gets so many ``seconds``."""
    return ask_and_read(nodes, asked, message, seconds, lambda answer: answer)


def ask_and_read(
    nodes: Nodes,
    asked: Sequence[Node],
    message: Mapping[str, Any],
    seconds: float,
    read: Callable[[dict[str, Any]], T],
) -> list[T | OSError | RekindleError]:
    """Returns what ``read`` makes of each answer. It is called as soon as that is there, by several threads."""
    if not asked:
        return []

    def ask(node: Node) -> T | OSError | RekindleError:
        until = time.monotonic() + seconds
        try:
            with closing(connect(node.host, node.port, Credentials.of(nodes), seconds, node.name)) as link:
                return read(call(link, message, max(0.1, until - time.monotonic())))
        except (OSError, RekindleError) as error:
            return error

    with ThreadPoolExecutor(min(_AT_A_TIME, len(asked)), thread_name_prefix="rekindle-ask") as pool:
        return list(pool.map(ask, asked))
