"""Judges from beats which nodes are there: a state machine without clock, sockets or threads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

__all__ = ["BEAT_EVERY", "PATIENCE", "SUSPECT", "Event", "Membership", "State"]

BEAT_EVERY = 0.1
"""Seconds between two beats to a neighbour, and between two ticks."""
SUSPECT = 1.0
"""Seconds without a beat after which a node is silent. Ten beats: full processors or lost packets cost two or three."""
PATIENCE = 10.0
"""Seconds without a sign after which a node that nobody hears is lost: switches and agents come back within that time.
The price: a job whose node lost its power stands still that long before it is restarted."""

_FIRST = 5.0
"""Seconds within which the first beat of a node is to come: its agent may just be starting."""
_LATE = 0.5
"""Most seconds that a pause between two ticks counts for: in a longer one this agent was stopped, and heard nobody."""
_CLOSED = 0.3
"""Seconds without a beat after which a node that has closed its links, and a failed collective, make a loss."""
_TOGETHER = 1.0
"""Seconds by which a collective may fail before the last beat of the node that it failed by: beats are delayed too."""
_OVERTAKEN = 0.5
"""Seconds for which beats may still come after the end of a link: they came by another one."""
_CUT = 0.55
"""Seconds without a beat after which its link may have lost more. Ranks notice a cut only if it is longer: the kernel
sends what is lost again after 0.2 and 0.6 s, and 0.8 s later for the next time."""
_REFUSED = 3.0
"""Seconds for which a refused connection shows that the host is up. A node that isn't heard is tried each second."""
_REFUSES_FOR = 3
"""Patiences after which a node is lost though its host is up, if no step was completed since its last beat. Its agent
alone would have been followed by another one within seconds: all that ran there has ended, as in a container."""
_ALL_HEAR_ALL = 16
"""Nodes up to which each one sends beats to all others; above it, to about two for each doubling of their number."""

State = Literal["there", "silent", "agent gone", "lost", "unknown"]


@dataclass(frozen=True)
class Event:
    """A change in what this node knows of another one."""

    kind: Literal["silent", "back", "lost", "agent gone"]
    node: int
    why: str
    """The reason, for people: the end of a sentence that names the node."""
    seconds: float
    """The time without a beat of this node."""


class _Peer:
    """One other node. Times are those of this agent's own clock, which begins at 0."""

    def __init__(self) -> None:
        self.heard = 0.0
        self.hears: frozenset[int] = frozenset()
        self.known = False
        """True once a beat came. A node that was never heard may be behind a firewall: it is no loss."""
        self.closed: float | None = None
        """The time at which it closed a link."""
        self.refused: float | None = None
        """The time of its last refusal since its last beat."""
        self.lost = False
        """True from a loss to the next beat."""
        self.away = 0.0
        """The seconds without a beat before it came back."""
        self.settled = 0.0
        """The time by which what its link has lost is sent again."""
        self.state: State = "unknown"

    @property
    def has_ended(self) -> bool:
        """True if it closed or refused a link, and no beat says otherwise."""
        return self.refused is not None or (self.closed is not None and self.heard < self.closed + _OVERTAKEN)

    def speaks(self, time: float) -> bool:
        """True if its word counts: it sends beats."""
        return self.known and not self.has_ended and time - self.heard < SUSPECT

    def last_sign(self, stepped: float) -> float:
        return max(self.heard, stepped, self.refused or 0.0)


class Membership:
    """The nodes of one start, as one of them sees them.

    A node is never lost while a node that is heard hears it, while its host refuses connections (the agent alone has
    ended, unless that lasts), while ranks of this node complete steps, or if it was never heard. All times are seconds
    of one clock.
    """

    def __init__(
        self, own: int, count: int, now: float, patience: float = PATIENCE, *, absent: Collection[int] = ()
    ) -> None:
        """``absent`` are the nodes whose agents can't listen: they take no part."""
        self.patience = patience
        self.neighbours = _neighbours(own, [node for node in range(count) if node not in absent])
        self._peers = {node: _Peer() for node in self.neighbours}
        self._ticked, self._clock = now, 0.0
        self._failed: float | None = None
        self._stepped = 0.0

    def heard(self, node: int, now: float, hears: Collection[int]) -> None:
        """Notes a beat of a node, which names the nodes that it hears itself."""
        peer = self._peers.get(node)
        if peer is not None:
            time = self._time(now)
            if peer.known and time - peer.heard > _CUT:
                peer.settled = time + min(time - peer.heard, self.patience)
            if peer.state not in ("there", "unknown"):
                peer.away = max(peer.away, time - peer.heard)
            peer.heard, peer.hears, peer.known = time, frozenset(hears), True
            peer.refused, peer.lost = None, False

    def refused(self, node: int, now: float) -> None:
        """Notes that a node's host is up, and nobody listens there."""
        if node in self._peers:
            self._peers[node].refused = self._time(now)

    def closed(self, node: int, now: float) -> None:
        """Notes that a node has ended a link with this one."""
        if node in self._peers:
            self._peers[node].closed = self._time(now)

    def collective_failed(self, now: float) -> None:
        """Notes that a rank of this node failed in an exchange with others."""
        self._failed = self._time(now)

    def progressed(self, now: float) -> None:
        """Notes that a rank of this node completed a step: the ranks that it exchanges gradients with are alive."""
        self._stepped = self._time(now)

    def hears(self, now: float) -> list[int]:
        """Returns the nodes to name in this node's beats."""
        time = self._time(now)
        return [node for node, peer in self._peers.items() if peer.speaks(time)]

    def state(self, node: int) -> State:
        """Returns the judgement of the last tick; "unknown" of a node not heard yet, or that is no neighbour."""
        return self._peers[node].state if node in self._peers else "unknown"

    def silence(self, node: int, now: float) -> float | None:
        """Returns the seconds since a node's last beat; None if none was heard."""
        peer = self._peers.get(node)
        return self._time(now) - peer.heard if peer is not None and peer.known else None

    def settles(self) -> bool:
        """Returns True while ranks may wait for what the link of a node lost before its beats came back.

        The kernel sends it again after pauses that double: at the latest when the link has been back for as long as it
        was away.
        """
        return any(self._clock < peer.settled for peer in self._peers.values())

    def misses(self) -> bool:
        """Returns True while nobody hears a node that was heard before."""
        gone = (node for node, peer in self._peers.items() if peer.known and peer.state in ("silent", "lost"))
        return any(not self._is_heard_by_others(node) for node in gone)

    def tick(self, now: float) -> list[Event]:
        """Returns what has changed since the last tick. To be called each ``BEAT_EVERY``."""
        self._clock, self._ticked = self._time(now), now
        events = []
        for node, peer in self._peers.items():
            before, peer.state = peer.state, self._judge(node, peer)
            if peer.state == before or peer.state == "unknown":
                continue
            peer.lost = peer.state == "lost"
            if peer.state != "there":
                events.append(Event(peer.state, node, self._why(node, peer), self._clock - peer.heard))
            elif before != "unknown":
                events.append(Event("back", node, f"heard again after {peer.away:.1f} s", peer.away))
                peer.away = 0.0
        return events

    def _time(self, now: float) -> float:
        """Returns the time on a clock that stands still while this agent is stopped."""
        return self._clock + min(max(now - self._ticked, 0.0), _LATE)

    def _judge(self, node: int, peer: _Peer) -> State:
        silence = self._clock - peer.heard
        if peer.lost or self._is_lost(node, peer, silence):
            return "lost"
        if silence < (SUSPECT if peer.known else _FIRST):
            return "there" if peer.known else "unknown"
        return "agent gone" if self._refuses(peer) else "silent"

    def _is_lost(self, node: int, peer: _Peer, silence: float) -> bool:
        if silence < _CLOSED or not peer.known:
            return False
        over = not self._refuses(peer) and self._clock - peer.last_sign(self._stepped) >= self.patience
        over = over or self._clock - max(peer.heard, self._stepped) >= _REFUSES_FOR * self.patience
        return (over or self._has_failed(peer)) and not self._is_heard_by_others(node)

    def _has_failed(self, peer: _Peer) -> bool:
        """Returns True if a node ended and ranks of this one noticed. The end of an agent alone fails no collective."""
        return peer.has_ended and self._failed is not None and self._failed >= peer.heard - _TOGETHER

    def _refuses(self, peer: _Peer) -> bool:
        return peer.refused is not None and self._clock - peer.refused < _REFUSED

    def _is_heard_by_others(self, node: int) -> bool:
        return any(node in peer.hears and peer.speaks(self._clock) for peer in self._peers.values())

    def _why(self, node: int, peer: _Peer) -> str:
        if not peer.known:
            return "no beat of it since the start: see that nodes can connect to each other"
        if peer.state == "agent gone":
            return "its host is up, and no agent listens there: its ranks start another one"
        silence = f"no sign of it for {self._clock - peer.heard:.1f} s"
        if peer.state == "silent":
            if self._is_heard_by_others(node):
                return f"{silence}, though another node hears it"
            return f"{silence}: it is lost if that lasts for {self.patience:g} s"
        if self._has_failed(peer):
            silence = "its connections are closed, and a rank's exchange with others has failed"
        elif self._refuses(peer):
            silence += ", and no step is completed meanwhile: its host is up, and nothing runs there any more"
        others = len(self._peers)
        heard = sum(peer.speaks(self._clock) for peer in self._peers.values())
        if 2 * (1 + heard) < 1 + others:
            return f"{silence}; this node hears only {heard} of {others} others, so it may be the one that is cut off"
        return f"{silence}, and no other node hears it" if others > 1 else silence


def _neighbours(own: int, present: list[int]) -> list[int]:
    """Returns the nodes that this one exchanges beats with.

    In a large job these are the ones at distances 1, 2, 4 and so on, on both sides, and those around the opposite node,
    which is the partner: words that are told on reach all of a thousand nodes within five beats. Any two neighbours
    have a third one in common, which tells a broken link between them from a loss.
    """
    if own not in present:
        return []
    if len(present) <= _ALL_HEAR_ALL:
        return [node for node in present if node != own]
    place, size, half = present.index(own), len(present), len(present) // 2
    ways = [1 << power for power in range(half.bit_length())] + [half, half + 1]
    near = {(place + sign * way) % size for way in ways for sign in (1, -1)} - {place}
    return [present[index] for index in sorted(near)]
