"""Defines what an agent's monitor asks and tells of the other nodes. A job on one node has none."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

from rekindle.agent.beat import Page
from rekindle.memory.elsewhere import Elsewhere
from rekindle.memory.fault import Fault

__all__ = ["Others", "Roll"]


class Roll(NamedTuple):
    """Holds what the nodes have answered that send this one no beats."""

    pages: dict[int, Page]
    """Pages of their ranks."""
    cleared: bool
    """True if none of them has late ranks of which it does not know yet if a debugger holds one."""


class Others:
    """The other nodes of the start, of which there are none. ``rekindle.agent.mesh`` knows those that there are.

    Used in the agent's event loop. Nothing here waits for another node.
    """

    name = ""
    """Name of this node among them; empty while there are none."""
    patience = 0.0
    """Seconds without a sign after which a node that nobody hears is lost."""
    since = -math.inf
    """Time at which the start began, or from which on they are known. Earlier faults are not of this start."""

    def tell(self, fault: Fault) -> None:
        """Tells all of a fault."""

    async def ask(self, seconds: float) -> list[Fault]:
        """Asks all for a fault that they know of, and returns those that are told of in so many seconds."""
        return []

    def collective_failed(self) -> None:
        """Notes that a collective of this node's ranks has failed."""

    def pages(self) -> dict[int, Page]:
        """Returns the newest pages of their ranks."""
        return {}

    def silent(self) -> str:
        """Returns words for the first node that is silent, or was lost; empty if there is none."""
        return ""

    def misses(self) -> bool:
        """Returns True while nobody hears a node that was heard before."""
        return False

    def reached(self) -> list[int]:
        """Returns how far the ranks of each node are that is heard, see ``Beat.reached``."""
        return []

    def paused_at(self) -> float:
        """Returns when a rank of another node was last known to pause."""
        return -math.inf

    def unsettled_at(self) -> float:
        """Returns when a node was last known not to hear another one that may be back, or just came back."""
        return -math.inf

    def call_roll(self) -> Roll | None:
        """Asks for the pages of ranks that ``pages`` lacks. Returns each call's answer once; None until it is there."""
        return Roll({}, True)

    def judges(self) -> bool:
        """True if this node is the one to say that ranks hang, and which one."""
        return True

    def cleared(self) -> bool:
        """True if no debugger holds a rank of another node, as far as they have said."""
        return True

    def elsewhere(self) -> Elsewhere:
        """Returns their memory, to be asked by another thread."""
        return Elsewhere()

    def lost_ranks(self) -> Collection[int]:
        """Returns the ranks that this node keeps copies for, once nothing was heard of their node for long.

        For any thread.
        """
        return ()

    def safety(self) -> dict[str, Any]:
        """Tells how far steps are safe from the loss of a node, see ``rekindle.agent.node_safety``."""
        return {"node_safe": None, "copying": None}

    def status(self) -> list[dict[str, Any]]:
        """Describes all nodes for people, this one included; empty where there is only one."""
        return []
