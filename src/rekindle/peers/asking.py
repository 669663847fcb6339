"""Asks the agents of other nodes one question, all at once, for a person who waits for the answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

from rekindle.errors import RekindleError
from rekindle.memory.nodes import Node, Nodes
from rekindle.peers.wire import Credentials, call, connect

__all__ = ["Answer", "ask_nodes"]

_AT_A_TIME = 64
"""Nodes that are asked at a time."""

Answer = dict[str, Any] | OSError | RekindleError
"""The reply of a node, or the reason why there is none."""


def ask_nodes(nodes: Nodes, asked: Sequence[Node], message: Mapping[str, Any], seconds: float) -> list[Answer]:
    """Returns the answer of each of the ``asked`` nodes, which have agents. Each gets so many ``seconds``."""
    if not asked:
        return []
    with ThreadPoolExecutor(min(_AT_A_TIME, len(asked)), thread_name_prefix="rekindle-ask") as pool:
        return list(pool.map(partial(_ask, nodes, message, seconds), asked))


def _ask(nodes: Nodes, message: Mapping[str, Any], seconds: float, node: Node) -> Answer:
    until = time.monotonic() + seconds
    try:
        with closing(connect(node.host, node.port, Credentials.of(nodes), seconds, node.name)) as link:
            return call(link, message, max(0.1, until - time.monotonic()))
    except (OSError, RekindleError) as error:
        return error
