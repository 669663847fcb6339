"""Acts as one launcher: finds the one that leads, follows it, leads on when it is lost. Has no clock and no sockets."""

from __future__ import annotations

import itertools
from typing import Literal

from rekindle.launch.rendezvous.links import Answer, Identity, Link, Output, Search
from rekindle.launch.rendezvous.roster import REJOIN_WITHIN, Roster
from rekindle.launch.rendezvous.wire import (
    SUCCESSORS,
    Address,
    Alive,
    Bye,
    Done,
    Elsewhere,
    Hello,
    Lead,
    Message,
    News,
    Refused,
    Round,
    Want,
    decode,
    encode,
)

__all__ = ["FIRST_COMES_WITHIN", "LOST_AFTER", "Node"]

LOST_AFTER = 3.0
"""Seconds of silence after which the other end of a connection is lost."""
FIRST_COMES_WITHIN = 10.0
"""Seconds after which a launcher leads from an endpoint that is not the first: the first one's node may start later."""
_SIGN_EVERY = 0.5
"""Seconds between two signs of life."""
_ANSWERS_WITHIN = 1.0
"""Seconds that a launcher gets to say if it leads."""
_ASK_EVERY = 0.1
"""Seconds between two times that all are asked."""
_CLAIM_EVERY = 0.3
"""Seconds between two times that a launcher tells others, which may lead as well, that it leads."""
_MOST_KNOWN = 2 * SUCCESSORS
"""Launchers of earlier days that one that leads tells of it."""
_FIRST_ROUND_AFTER = 1.0
"""Seconds for which a launcher that begins a job makes no round. If the job goes on elsewhere, it hears so by then."""


class Node:
    """A launcher among the others of its job.

    It is told of each event of its connections, and of the time; it puts what is to be done into ``output``.
    """

    def __init__(self, me: Identity, now: float) -> None:
        self.me = me
        self.output: list[Output] = []
        self.round: Round | None = None
        """The newest round that it is part of."""
        self.news: News | None = None
        self.refused = ""
        """The reason for which it will find no job; empty if it may."""
        self.took_over = False
        """True once it leads in place of one that was lost."""
        self._store: Address | None = None
        self._done = False
        """True once the ranks of the newest round have ended well, until they are to be started again."""
        self.was_spare = False
        """True once it has seen the job run without it, until the next round that it is part of."""
        self._numbers = itertools.count()
        self._links: dict[int, Link] = {}
        self._roster: Roster | None = None
        self._stirred = False
        """True if the members are perhaps to be told of something."""
        self._rounds_from = now
        """The time before which it makes no round."""
        self._others_until = now
        """The time until which others come to it that followed a lost launcher before."""
        self._has_led = False
        self._leader: int | None = None
        """The connection to the launcher that leads."""
        self._lost: Address | None = None
        """The address of the leader that was lost last."""
        self._silent = False
        """True if that one fell silent, and did not close the connection."""
        self._lost_at = now
        self._passed: set[Address] = set()
        """Launchers that come before this one, and did not answer when it began to lead: they may lead as well."""
        self._known: dict[Address, None] = {}
        """The launchers that it was told of last as those that may lead next, oldest first: each may lead apart."""
        self._began, self._signed, self._claimed = now, now, now
        self._strangers: set[Address] = set()
        """Addresses at which another job's launchers are."""
        self._has_ended = False
        """True if the job has ended with this launcher."""
        self._hints: set[Address] = set()
        """An address at which another one says that somebody leads, until it is asked."""
        self._search: Search | None = None
        self._search_at = now
        decode(encode(self._hello()))  # raises ValueError for a name that no other launcher would take

    @property
    def leads(self) -> bool:
        return self._roster is not None

    def has_members(self, now: float) -> bool:
        """Returns True while others follow this launcher, or have not had time to since it leads, or they were lost."""
        if self._roster is not None and self._roster.tells(now):
            return True
        return now < self._others_until or any(found.role == "member" for found in self._links.values())

    @property
    def is_member(self) -> bool:
        """True while it leads, or is heard by the one that does."""
        return self.news is not None and (self._roster is not None or self._leader is not None)

    # -- what the launcher itself wants ---------------------------------------------------------------------------

    def want(self, store: Address, now: float, pause: int = 0) -> None:
        """Asks for a round after that pause, and offers a store to it. The ranks have ended, or have not begun."""
        self._store, self._done = store, False
        if self._roster is not None:
            self._roster.want(self.me.id, store, self._number, now, pause)
            self._stirred = True
        elif self._leader is not None:
            self._send(self._leader, Want(store, self._number, pause))

    def done(self) -> None:
        """Tells that the ranks have ended well, and waits for those of other nodes."""
        self._done = True
        if self._roster is not None:
            self._roster.done(self.me.id, self._number)
            self._stirred = True
        elif self._leader is not None:
            self._send(self._leader, Done(self._number))

    def bye(self, over: bool, now: float) -> None:
        """Takes leave of the others; with ``over`` the job has ended, as the next one that leads will hear too."""
        self._has_ended = over
        if self._roster is not None:
            self._roster.bye(self.me.id, over, now)
            self._stirred = True
        elif self._leader is not None:
            self._send(self._leader, Bye(over))

    # -- events of connections --------------------------------------------------------------------------------------

    def accept(self, now: float) -> int:
        """Returns the number of a connection that another launcher has made."""
        link = next(self._numbers)
        self._links[link] = Link("unknown", now)
        return link

    def connected(self, link: int, now: float) -> None:
        """Notes that a connection is made."""
        found = self._links.get(link)
        if found is None:
            self._drop(link)
        elif found.role == "asked":
            found.heard = now
            self._send(link, self._hello())
        elif found.role == "rival" and self._roster is not None:
            found.heard = now
            self._send(link, self._claim())

    def lost(self, link: int, now: float, *, silent: bool = False) -> None:
        """Notes that a connection has ended, or could not be made."""
        found = self._links.pop(link, None)
        if found is None:
            return
        if found.role == "asked" and found.address is not None:
            self._answered(found.address, "none", now)
        elif found.role == "leader":
            self._leader, self._lost, self._silent, self._lost_at = None, found.address, silent, now
            self._seek(now)
        elif found.role == "member" and self._roster is not None:
            self._roster.leave(found.id, now, silent=silent)
            self._stirred = True

    def received(self, link: int, message: Message, now: float) -> None:
        """Takes a message."""
        found = self._links.get(link)
        if found is None:
            return
        if found.role != "unknown":  # who does not say soon who it is has to go
            found.heard = now
        if isinstance(message, Hello) and found.role == "unknown":
            self._take_in(link, found, message, now)
        elif isinstance(message, Lead) and found.role in ("unknown", "rival"):
            self._meet_rival(link, message, now)
        elif found.role == "member" and self._roster is not None:
            self._hear_member(found, message, self._roster, now)
        elif found.role == "asked" and found.address is not None:
            self._hear_asked(link, found, found.address, message, now)
        elif found.role == "leader":
            self._hear_leader(link, message, now)
        elif found.role == "rival" and isinstance(message, Elsewhere) and message.address is not None:
            self._passed.add(message.address)
            self._end(link)

    def tick(self, now: float) -> None:
        """Does what is due. To be called ten times a second."""
        self._end_silent(now)
        signs = now - self._signed >= _SIGN_EVERY
        if signs:
            self._signed = now
            for link, found in self._links.items():
                if found.role in ("leader", "member"):
                    self._send(link, Alive())
        if self._roster is not None:
            self._stirred = True
            if now - self._claimed >= _CLAIM_EVERY:
                self._claimed = now
                self._claim_the_lead(now)
        elif self._leader is None and not self._is_over():
            self._go_on_searching(now)

    def settle(self, now: float) -> None:
        """Makes a round if it is time to, and tells each member what is new to it. To be called after all events."""
        roster = self._roster
        if roster is None or not self._stirred:
            return
        self._stirred = False
        if now >= self._rounds_from:
            roster.tick(now)
        news = roster.news(now)
        if own_news := news.get(self.me.id):
            self._take(own_news)
        if own := roster.round_of(self.me.id):
            self._begin(own)
        for link, found in self._links.items():
            if found.role != "member" or found.id not in news:
                continue
            if found.told != news[found.id]:
                found.told = news[found.id]
                self._send(link, found.told)
            if (told := roster.round_of(found.id)) and told.number > found.round:
                found.round = told.number
                self._send(link, told)

    # -- as a member ------------------------------------------------------------------------------------------------

    def _hear_asked(self, link: int, found: Link, address: Address, message: Message, now: float) -> None:
        if isinstance(message, News):
            if self._leader is None and self._roster is None:
                found.role, self._leader = "leader", link
                self._end_search()
                self._lost, self._silent = None, False
                if self._store is not None:  # perhaps only since the hello
                    self._send(link, Want(self._store, self._number))
                if self._done:
                    self._send(link, Done(self._number))
                if self._has_ended:
                    self._send(link, Bye(over=True))
                self._hear_leader(link, message, now)
            else:
                self._passed.add(address)
                self._end(link)
        elif isinstance(message, Refused):
            self._strangers.add(address)
            if self.news is None and (message.same_job or self._strangers.issuperset(self.me.endpoints)):
                self.refused = message.why
            self._end(link)
            self._answered(address, "none", now)
        elif isinstance(message, Elsewhere):
            self._end(link)
            # That it still follows one that has just fallen silent says only that it has not noticed yet.
            late = self._silent and message.address == self._lost and now - self._lost_at < _ANSWERS_WITHIN
            if message.address is not None and not late:
                self._ask(message.address, now)
            self._answered(address, "seeks" if message.address is None else "follows", now)

    def _hear_leader(self, link: int, message: Message, now: float) -> None:
        if isinstance(message, News):
            self._take(message)
        elif isinstance(message, Round):
            self._begin(message)
        elif isinstance(message, Elsewhere):
            self._end(link)
            self._leader = None
            self._seek(now, message.address)

    def _take(self, news: News) -> None:
        if self.news is None or news.successors != self.news.successors:
            for _, address in news.successors:
                self._known.pop(address, None)
                self._known[address] = None
            self._known = dict.fromkeys(list(self._known)[-_MOST_KNOWN:])
        self.news = news
        self.was_spare |= news.spare

    def _begin(self, round: Round) -> None:
        if round.number > self._number:
            self.round, self._store, self.was_spare, self._done = round, None, False, False

    @property
    def _number(self) -> int:
        return self.round.number if self.round else 0

    def _hello(self) -> Hello:
        me, last = self.me, self.round
        number, place, world = (last.number, last.place, last.world) if last else (0, -1, 0)
        wants = self._store, self.was_spare, self._done
        return Hello(me.job, me.id, me.address, me.least, me.most, number, place, world, *wants)

    def _is_over(self) -> bool:
        return bool(self.refused) or (self.news is not None and self.news.closed)

    # -- the search for the one that leads ----------------------------------------------------------------------------

    def _seek(self, now: float, hint: Address | None = None) -> None:
        self._end_search()
        self._search_at, self._hints = now, {hint} if hint else set()
        if not self._is_over():
            self._go_on_searching(now)

    def _go_on_searching(self, now: float) -> None:
        if self._search is None:
            if now >= self._search_at:
                self._begin_search(now)
        elif now - (search := self._search).began >= _ANSWERS_WITHIN:
            self._end_search()
            search.answers = {
                address: "none" if answer == "awaited" else answer for address, answer in search.answers.items()
            }
            self._conclude(search, now)

    def _end_search(self) -> None:
        self._search = None
        for link, found in list(self._links.items()):
            if found.role == "asked":
                self._end(link)

    def _begin_search(self, now: float) -> None:
        first, others = self._whom_to_ask()
        self._search = Search(now, frozenset(first))
        for address in [*first, *others, *self._hints]:
            self._ask(address, now)
        self._hints = set()
        if not self._search.answers:
            self._conclude(self._search, now)

    def _whom_to_ask(self) -> tuple[list[Address], list[Address]]:
        """Returns the launchers that may lead: those that come before this one, and the others."""
        endpoints = [address for address in self.me.endpoints if address not in self.me.own]
        if self.news is None:
            before = list(itertools.takewhile(lambda address: address not in self.me.own, self.me.endpoints))
            return before, [address for address in endpoints if address not in before]
        ids = [successor.id for successor in self.news.successors]
        addresses = [successor.address for successor in self.news.successors if successor.id != self.me.id]
        place = ids.index(self.me.id) if self.me.id in ids else len(addresses)
        others = [*addresses[place:], *endpoints]
        if self._lost is not None and not self._silent:
            others.append(self._lost)  # the connection alone may be lost
        return addresses[:place], [address for address in others if address != self._lost or not self._silent]

    def _ask(self, address: Address, now: float) -> None:
        if self._search is not None and address != self.me.address and address not in self._search.answers:
            self._search.answers[address] = "awaited"
            self._connect("asked", address, now)

    def _answered(self, address: Address, answer: Answer, now: float) -> None:
        search = self._search
        if search is not None and search.answers.get(address) == "awaited":
            search.answers[address] = answer
            if "awaited" not in search.answers.values():
                self._conclude(search, now)

    def _conclude(self, search: Search, now: float) -> None:
        """Leads, if nobody else does or comes first; else all are asked again in a moment."""
        self._search, self._search_at = None, now + _ASK_EVERY
        if self._roster is not None or self._leader is not None or self._is_over():
            return
        if not self._may_lead(now) or "follows" in search.answers.values():
            return
        if all(search.answers.get(address, "none") == "none" for address in search.first):
            self._passed = {address for address, answer in search.answers.items() if answer == "none"}
            self._lead(now)

    def _may_lead(self, now: float) -> bool:
        if self.news is not None:
            return self._has_led or self.me.id in [successor.id for successor in self.news.successors]
        if not self.me.own:
            return False
        return self.me.own[0] == self.me.endpoints[0] or now - self._began >= FIRST_COMES_WITHIN

    # -- as the one that leads ----------------------------------------------------------------------------------------

    def _lead(self, now: float) -> None:
        me = self.me
        self._roster = roster = Roster(me.least, me.most, me.last_call, me.id, me.ends_within)
        self._has_led, self._claimed = True, now
        if self.news is not None:
            self.took_over = True
            roster.term, roster.round, roster.world = self.news.term + 1, self.news.round, self.news.world
            self._others_until = now + REJOIN_WITHIN
            roster.succeed(self.news.leads_from, self.news.ended, now, silent=self._silent)
            if self._lost is not None:
                self._passed.add(self._lost)
        else:
            self._rounds_from = now + _FIRST_ROUND_AFTER
        roster.join(self._hello(), now)
        if self._has_ended:
            roster.bye(me.id, True, now)
        self._stirred = True

    def _take_in(self, link: int, found: Link, hello: Hello, now: float) -> None:
        if hello.job != self.me.job:
            # Not told which: an id that nobody guesses keeps strangers out of the job.
            self._send(link, Refused("the launchers there have another --rdzv-id", same_job=False))
        elif self._roster is None:
            leader = self._links[self._leader].address if self._leader is not None else None
            self._send(link, Elsewhere(leader))
        elif (hello.least, hello.most) != (self.me.least, self.me.most):
            own, other = (f"{a}:{b}" for a, b in ((self.me.least, self.me.most), (hello.least, hello.most)))
            self._send(link, Refused(f"the launchers there have --nnodes {own}, and not {other}", same_job=True))
        else:
            for number, older in list(self._links.items()):
                if older.role == "member" and older.id == hello.id and number != link:
                    self._end(number)
            found.role, found.id, found.round, found.told = "member", hello.id, hello.round, None
            self._roster.join(hello, now)
            self._stirred = True

    def _hear_member(self, found: Link, message: Message, roster: Roster, now: float) -> None:
        if isinstance(message, Want):
            roster.want(found.id, message.store, message.after, now, message.pause)
        elif isinstance(message, Done):
            roster.done(found.id, message.after)
        elif isinstance(message, Bye):
            roster.bye(found.id, message.over, now)
        else:
            return
        self._stirred = True

    # -- others that lead ---------------------------------------------------------------------------------------------

    def _claim(self) -> Lead:
        me, roster = self.me, self._roster
        assert roster is not None
        return Lead(me.job, me.id, me.address, roster.round, roster.seen, roster.term, roster.is_done)

    def _claim_the_lead(self, now: float) -> None:
        tried = {found.address for found in self._links.values() if found.role == "rival"}
        followers = {each.address for each in self.news.successors} if self.news else set()
        others = {*self.me.endpoints, *self._passed, *self._known} - followers
        for address in others - {*self.me.own, self.me.address, *tried}:
            self._connect("rival", address, now)

    def _meet_rival(self, link: int, claim: Lead, now: float) -> None:
        """Follows another launcher that leads the same job with a greater claim."""
        if claim.job != self.me.job or claim.id == self.me.id:
            self._end(link)
        elif self._roster is None:
            leader = self._links[self._leader].address if self._leader is not None else None
            if leader is None:
                self._seek(now, claim.address)
            else:
                self._send(link, Elsewhere(leader))
        elif claim.claim > self._claim().claim:
            for number, found in list(self._links.items()):
                if found.role == "member":
                    self._send(number, Elsewhere(claim.address))
                if number != link:
                    self._end(number)
            self._roster = None
            self._seek(now, claim.address)
        elif self._links[link].role != "rival":
            self._send(link, self._claim())

    # -- connections --------------------------------------------------------------------------------------------------

    def _connect(self, role: Literal["asked", "rival"], address: Address, now: float) -> None:
        link = next(self._numbers)
        self._links[link] = Link(role, now, address)
        self.output.append(Output("connect", link, address=address))

    def _send(self, link: int, message: Message) -> None:
        self.output.append(Output("send", link, message=message))

    def _drop(self, link: int) -> None:
        self.output.append(Output("drop", link))

    def _end(self, link: int) -> None:
        self._links.pop(link, None)
        self._drop(link)

    def _end_silent(self, now: float) -> None:
        for link, found in list(self._links.items()):
            bound = _ANSWERS_WITHIN if found.role == "rival" else LOST_AFTER
            if found.role != "asked" and now - found.heard >= bound:  # a search ends those that it has asked
                self._drop(link)
                self.lost(link, now, silent=True)
