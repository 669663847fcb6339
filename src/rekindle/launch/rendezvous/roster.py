"""Decides for the launcher that leads who takes part in which round: a state machine without clock or sockets."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rekindle.launch.rendezvous.wire import FIRST_ROUNDS, SUCCESSORS, Address, Hello, News, Round, Successor

__all__ = ["COMES_BACK_WITHIN", "ENDS_WITHIN", "REJOIN_WITHIN", "SMALLER_SIDE_WAITS", "VACANT_FOR", "Roster"]

VACANT_FOR = 1.0
"""Seconds for which a place has to be free until a spare node takes it, if its node was not silent before: that one may
just have lost a connection, and be there again at once."""
REJOIN_WITHIN = 2.0
"""Seconds that the others get to come to a launcher that has begun to lead. All notice the loss of the one before
within half a second."""
COMES_BACK_WITHIN = 10.0
"""Seconds for which a launcher that was lost may come and hear that the job is done."""
SMALLER_SIDE_WAITS = 30.0
"""Seconds for which those who see less than half of the nodes wait for the others: more of them may be together
elsewhere, and go on first."""
ENDS_WITHIN = 60.0
"""Seconds that the ranks of a node get to end once all are to start again. torchrun sends them SIGKILL after 30; only
the kernel can hold them longer, as when they read a file of a mount that hangs, or give much memory back."""

_DIGITS = 5
"""Digits of a launcher's name that the numbers of its rounds differ by from those of others."""


@dataclass
class _Member:
    id: str
    address: Address
    came: int
    """Its number in the order in which members came first."""
    round: int
    place: int
    store: Address | None
    """The store that it offers; None while its ranks run."""
    was_spare: bool
    """True once it has seen the job run without it."""
    leaves: bool = False
    """True once it has taken its leave."""
    rests_until: float = 0.0
    """The time before which it begins no round."""
    late: bool = False
    """True while its ranks don't end, though all are to start again: its place is free."""


@dataclass
class Roster:
    """The members of a job, and their places: the node's ranks in the newest round.

    A node that comes back has its place kept. The others are given to spare nodes, in the order in which they came.
    """

    least: int
    most: int
    last_call: float
    """Seconds for which a job that may grow waits for further nodes."""
    own: str
    """The launcher that leads."""
    ends_within: float = ENDS_WITHIN
    term: int = 1
    round: int = 0
    world: int = 0
    closed: bool = False
    _members: dict[str, _Member] = field(default_factory=dict)
    _vacant: dict[int, float] = field(default_factory=dict)
    """The time from which on each place without a node is free."""
    _away: dict[int, float] = field(default_factory=dict)
    """The times at which the nodes of places were lost that had not taken their leave."""
    ended: set[int] = field(default_factory=set)
    """The places whose ranks have ended well, also once their nodes have left."""
    is_done: bool = False
    """True once those of all places have."""
    _assigned: dict[str, Round] = field(default_factory=dict)
    """The newest round, as each of its members is told of it; empty if another launcher made it."""
    _came: int = 0
    _changed: float = 0.0
    """The time at which a node last came, went or asked for a round."""
    _few_since: float | None = None
    """The time from which on less than half of the newest round's nodes are here."""
    _due_since: float | None = None
    """The time from which on ranks that run are to end."""

    def succeed(self, place: int, ended: frozenset[int], now: float, *, silent: bool) -> None:
        """Takes over from a launcher that was lost, perhaps by silence, with the node of this place: -1 for a spare.

        ``ended`` are the places whose ranks have ended well, as it has told.
        """
        self.ended = set(ended)
        self._vacant = {other: now + REJOIN_WITHIN for other in range(self.world)}
        self._away = dict.fromkeys(self._vacant, now)
        if place in self._vacant:
            self._vacate(place, now, silent)
        self._changed = now

    def join(self, hello: Hello, now: float) -> None:
        """Takes a member in, also one that has been here before."""
        if hello.round > self.round:  # made by a launcher that was lost before it had told this one
            self.round, self.world, self._assigned = hello.round, hello.world, {}
            self._vacant, self.ended = {place: now + REJOIN_WITHIN for place in range(hello.world)}, set()
        before = self._members.get(hello.id)
        self._came += before is None
        came = before.came if before else self._came
        member = _Member(hello.id, hello.address, came, hello.round, hello.place, hello.store, hello.was_spare)
        told = self._assigned.get(hello.id)
        if told is not None and told.number > hello.round:  # its connection broke before it heard of it
            member.round, member.place, member.store = told.number, told.place, None
        self._members[hello.id] = member
        if self._holds(member):
            self._vacant.pop(member.place, None)
            self._away.pop(member.place, None)
            (self.ended.add if hello.done and member.round == hello.round else self.ended.discard)(member.place)
        self._changed = now

    def want(self, id: str, store: Address, after: int, now: float, pause: float = 0.0) -> None:
        """Notes that a member's ranks have ended, and that it asks for a round after that one, and after a pause."""
        member = self._members.get(id)
        if member is not None and member.round <= after:
            member.store, member.late, self._changed = store, False, now
            member.rests_until = now + pause
            if self._holds(member):
                self._vacant.pop(member.place, None)
                self.ended.discard(member.place)

    def done(self, id: str, after: int) -> None:
        """Notes that a member's ranks of that round have ended well."""
        member = self._members.get(id)
        if member is not None and member.round == after and self._holds(member):
            self.ended.add(member.place)

    def leave(self, id: str, now: float, *, silent: bool = False) -> None:
        """Notes that a member is lost, perhaps because it was silent for long."""
        member = self._members.pop(id, None)
        if member is not None:
            if self._holds(member):
                self._vacate(member.place, now, silent)
                if not member.leaves:
                    self._away[member.place] = now
            self._changed = now

    def _vacate(self, place: int, now: float, silent: bool) -> None:
        self._vacant[place] = now if silent else now + VACANT_FOR

    def bye(self, id: str, over: bool, now: float) -> None:
        """Notes that a member takes its leave; with ``over`` the job has ended, else it goes on without it."""
        self.closed = self.closed or over
        if not over:
            self.leave(id, now)
        elif id in self._members:
            self._members[id].leaves = True

    def tells(self, now: float) -> bool:
        """Returns True while the job is done, and one that was lost, as one that was stopped, may come and hear it."""
        return self.is_done and any(now - since < COMES_BACK_WITHIN for since in self._away.values())

    @property
    def seen(self) -> int:
        """The newest round's nodes that are here."""
        return len(self._holders())

    def tick(self, now: float) -> None:
        """Makes a round, if it is time to. To be called every now and then, and whenever something has changed."""
        self._give_up_late(now)
        few = self.round > 0 and 2 * self.seen < self.world
        self._few_since = (now if self._few_since is None else self._few_since) if few else None
        if self.seen:
            for member in self._candidates():
                member.was_spare = True
        self.is_done |= 0 < self.world == len(self.ended)
        if self.closed or self.is_done or not self._may_go_on(now) or self._waits(now):
            return
        chosen = self._seat(now)
        if chosen and chosen[0].store is not None:
            self._begin(chosen, chosen[0].store)

    def round_of(self, id: str) -> Round | None:
        """Returns the newest round for a member; None for one that is no part of it."""
        return self._assigned.get(id)

    def news(self, now: float) -> dict[str, News]:
        """Returns what each member has to know."""
        here = [member for member in self._members.values() if not member.leaves]
        others = sorted((member for member in here if member.id != self.own), key=self._succession)
        successors = tuple(Successor(member.id, member.address) for member in others[:SUCCESSORS])
        next_ones = {self.own, *(successor.id for successor in successors)}
        leader = self._members.get(self.own)
        place = leader.place if leader is not None and self._holds(leader) else -1
        runs = self.seen > 0
        waiting = int(self._is_due(now))  # not their number: each change of it would be told to all
        ending = bool(waiting) and any(member.store is None for member in self._holders())
        over = not any(map(self._holds, here))
        missing = len(self.ended.union(member.place for member in self._holders())) < self.world
        return {
            member.id: News(
                term=self.term,
                round=self.round,
                world=self.world,
                successors=successors,
                leads_from=place,
                waiting=0 if member.store is not None else waiting if self._holds(member) else min(1, member.round),
                ending=ending and member.store is not None,
                ended=frozenset(self.ended) if member.id in next_ones else frozenset(),
                spare=runs and member.store is not None and not self._holds(member),
                missing=missing,
                done=self.is_done,
                closed=self.closed,
                over=over and member.leaves,
            )
            for member in self._members.values()
        }

    def _holds(self, member: _Member) -> bool:
        """Returns True if a member has a place in the newest round."""
        return 0 < self.round == member.round and member.place >= 0 and not member.late

    def _holders(self) -> list[_Member]:
        return [member for member in self._members.values() if self._holds(member)]

    def _waits(self, now: float) -> bool:
        """Returns True while ranks of the newest round run, or a node pauses before it starts its own again."""
        return any(member.store is None or member.rests_until > now for member in self._holders())

    def _give_up_late(self, now: float) -> None:
        """Frees the places of nodes whose ranks don't end, for which all others would wait."""
        if not self._is_due(now):
            self._due_since = None
        elif self._due_since is None:
            self._due_since = now
        elif now - self._due_since >= self.ends_within:
            for member in self._holders():
                if member.store is None:
                    member.late = True
                    self._vacate(member.place, now, silent=True)

    def _succession(self, member: _Member) -> tuple[bool, int, int]:
        return not self._holds(member), member.place, member.came

    def _may_go_on(self, now: float) -> bool:
        """Returns False while another side of a parted job may have more of its nodes.

        Spares alone never go on: they remember nothing, and would begin the job anew from storage. With nodes that were
        started since, in place of half of the round's at least, they do: who has started these has given the others up.
        So do the spares of a job of one node, which are there for nothing else.
        """
        if not self.round or 2 * self.seen >= self.world:
            return True
        if self._few_since is None or now - self._few_since < SMALLER_SIDE_WAITS:
            return False
        return self.seen > 0 or self.most == 1 or 2 * sum(map(self._is_fresh, self._candidates())) >= self.world

    def _candidates(self) -> list[_Member]:
        """Returns the members that want a place, in the order in which they came."""
        waiting = (m for m in self._members.values() if not self._holds(m) and m.store is not None and not m.leaves)
        return sorted(waiting, key=lambda member: member.came)

    @staticmethod
    def _is_fresh(member: _Member) -> bool:
        """Returns True if a member has neither been part of the job nor seen it run."""
        return not member.round and not member.was_spare

    def _is_due(self, now: float) -> bool:
        """Returns True if ranks that run are to end: for others whose ranks have, or for a node that takes a place.

        So are ranks that have ended well, also for a node that is lost: others that it was lost to end by themselves.
        """
        holders = self._holders()
        if self.closed or self.is_done or not holders:
            return False
        if any(member.store is not None for member in holders):
            return True
        if not self._may_go_on(now):
            return False
        free = [since for place, since in self._vacant.items() if place not in self.ended and since <= now]
        if self._candidates():
            return bool(free) or (self.world < self.most and now - self._changed >= self.last_call)
        gone = any(now - since >= SMALLER_SIDE_WAITS for since in free)  # nobody is in a hurry: it may come back
        return gone and len(holders) >= self.least and all(member.place in self.ended for member in holders)

    def _seat(self, now: float) -> list[_Member]:
        """Returns the members of the next round by place; none if it has to wait."""
        candidates = self._candidates()
        if not self.seen:
            candidates.sort(key=lambda member: not self._is_fresh(member))  # on a fresh one's host may be memory
            first = sorted(candidates[: self.most], key=lambda member: (_natural(member.address), member.came))
            called = len(first) == self.most or now - self._changed >= self.last_call
            return first if called and len(first) >= self.least else []
        if any(since > now for since in self._vacant.values()):
            return []
        seats = {member.place: member for member in self._members.values() if self._holds(member)}
        free = [place for place in range(self.most) if place not in seats]
        for member in [m for m in candidates if m.place in free]:  # it had that place, and missed a round
            if member.place in free:
                free.remove(member.place)
                seats[member.place] = member
                candidates.remove(member)
        seats.update(zip(free, candidates, strict=False))
        return [seats[place] for place in sorted(seats)] if len(seats) >= self.least else []

    def _begin(self, members: list[_Member], store: Address) -> None:
        # Rounds that two launchers make apart, each without the other, must not have the same number.
        self.round += 1 + int(self.own[:_DIGITS], 16) + (FIRST_ROUNDS if self.round else 0)
        self.world, self._vacant, self._away, self.ended = len(members), {}, {}, set()
        self._assigned = {
            member.id: Round(self.round, place, self.world, store) for place, member in enumerate(members)
        }
        for place, member in enumerate(members):
            member.round, member.place, member.store = self.round, place, None


def _natural(address: Address) -> list[tuple[bool, int, str]]:
    """Returns a key by which node-2 comes before node-10."""
    parts = re.split(r"(\d+)", address.host)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts if part]
