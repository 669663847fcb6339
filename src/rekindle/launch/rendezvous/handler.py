"""Is torchrun's rendezvous: gives each start of the ranks its nodes, their order and a store."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rekindle.errors import UsageError
from rekindle.faults.torchelastic import FRESH_STORE
from rekindle.launch.provide import seconds_to_end
from rekindle.launch.rendezvous.hosts import is_this_host, listen, own_host
from rekindle.launch.rendezvous.hub import Hub, View
from rekindle.launch.rendezvous.links import Identity
from rekindle.launch.rendezvous.roster import COMES_BACK_WITHIN, ENDS_WITHIN
from rekindle.launch.rendezvous.wire import Address, Elsewhere, Round, decode, encode

__all__ = ["SPARE", "Rendezvous"]

DEFAULT_PORT = 29400
"""The port of an endpoint that names none, as c10d's."""
_LAST_CALL, _JOIN, _READ = 1.0, 600.0, 60.0
"""Seconds that ``--rdzv-conf`` may set otherwise: ``last_call_timeout``, ``join_timeout``, ``read_timeout``."""
_PATIENCE = 10.0
"""Seconds after which a launcher that reaches nobody says so. Nodes start that far apart."""
_WAITS_QUIETLY = 30.0
"""Seconds after which one that has reached others says that it waits for more: ranks may take as long to end."""
_ENDS_QUIETLY = 5.0
"""Seconds after which one whose ranks have ended well says that it waits for those of others."""
SPARE = "the job runs; this node is a spare, and waits for a place"
_START = "start 'rekindle run' on all of them, with the same --nnodes, --rdzv-endpoint and --rdzv-id"
_START_AT = "start 'rekindle run' there, with the same --nnodes and --rdzv-id, and --rdzv-endpoint {}"
_EXCHANGE_WITHIN = timedelta(seconds=10)
"""Time that nodes which have met get to exchange their numbers of ranks, a matter of milliseconds."""
_LEAVE_WITHIN = 2.0
"""Seconds that others get to hear that the job has ended, and to read the last words in the store of this node."""
_KILLED_WITHIN = 30.0
"""Seconds that the kernel gets to end ranks that were killed, after the time in which they may end by themselves."""
_LOOK_EVERY = 0.5
_LONGEST_PAUSE = 1 << 16

_log = logging.getLogger(__name__)


class Rendezvous:
    """torch's ``RendezvousHandler``, by its methods: the class itself can't be imported before torch is."""

    def __init__(self, params: Any) -> None:
        """``params`` are torch's. Begins to look for the others."""
        self.say: Callable[[str], object] = _log.warning
        """Given each line for people."""
        self.prepare: Callable[[], object] = lambda: None
        """Called now and then by the thread that waits for a round, while this node is a spare."""
        self.pause = 0.0
        """Seconds until the next round, for all nodes. It counts once, from when this one asks for the round."""
        self._start = _START
        """Words on how others come to the job."""
        self._endpoints = _parse(params.endpoint)
        self._backend: str = params.backend
        self._run_id: str = params.run_id
        self._join_within = _seconds(params, "join_timeout", _JOIN)
        self._read_within = _seconds(params, "read_timeout", _READ)
        local = [each for each in self._endpoints if _may_listen(params, each)]
        listeners = {each: made for each in local if (made := listen(each.port)) is not None}
        opened = [*listeners.values()] or [_listen_anywhere()]
        self._host = params.local_addr or own_host(self._endpoints, local)
        own = tuple(listeners)
        address = own[0] if own else Address(self._host, opened[0].getsockname()[1])
        name = uuid.uuid4().hex[:16]
        last_call = _seconds(params, "last_call_timeout", _LAST_CALL)
        self._ends_within = max(ENDS_WITHIN, seconds_to_end() + _KILLED_WITHIN)
        least, most = params.min_nodes, params.max_nodes
        me = Identity(
            self._run_id, name, address, least, most, last_call, self._endpoints, own, ends_within=self._ends_within
        )
        self._address = Address(self._host, address.port)
        self._offered: Any = None
        """The store that this node offers to the next round."""
        self._kept: Any = None
        """The store of the newest round, while this node has it."""
        self._is_part = self._was_member = False
        os.environ[FRESH_STORE] = "1"  # for the ranks
        try:
            decode(encode(Elsewhere(self._address)))  # an address that the others would take
            self._hub = Hub(me, opened, self._tell_of_the_lead)
        except ValueError as error:
            for each in opened:
                each.close()
            raise UsageError(f"--rdzv-id {self._run_id!r}, or the address {self._address}: {error}") from None

    @property
    def is_first_round(self) -> bool:
        """True while the newest round of this node is the job's first one."""
        return self._hub.view.round is not None and self._hub.view.round.is_first

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks use the round's store, so that all know its address as soon as they know of the round."""
        return True

    def get_backend(self) -> str:
        """Returns the name of this kind of rendezvous."""
        return self._backend

    def get_run_id(self) -> str:
        """Returns the job's name."""
        return self._run_id

    def next_rendezvous(self) -> Any:
        """Returns the next round, once the nodes are there. Raises one of torch's errors if it doesn't come."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415
        from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo  # noqa: PLC0415

        self._is_part = False
        before = self._hub.view.round
        if self._offered is None:
            self._offered = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_EXCHANGE_WITHIN)
        pause, self.pause = min(math.ceil(self.pause), int(self._join_within / 2), _LONGEST_PAUSE), 0.0
        self._hub.want(Address(self._host, self._offered.port), pause)
        round = self._wait_for_round(before.number if before else 0, pause)
        self._kept, self._offered = self._offered if round.place == 0 else None, None
        self._is_part = True
        host, port = round.store
        store = self._kept or TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_EXCHANGE_WITHIN)
        info = RendezvousStoreInfo(host, port)
        return RendezvousInfo(PrefixStore("rekindle/launchers", store), round.place, round.world, info)

    def num_nodes_waiting(self) -> int:
        """Returns 1 if the ranks are to be started again for other nodes, else 0. A spare node is no reason."""
        news = self._hub.view.news
        return news.waiting if news is not None else 0

    def await_ends(self, within: float) -> bool:
        """Waits until the ranks of all nodes have ended well. Returns False if all are to be started again instead.

        Raises torch's errors if the job is given up on another node, or if a node has gone and for ``within`` seconds
        no other has taken its place.
        """
        from torch.distributed.elastic.rendezvous import RendezvousTimeoutError  # noqa: PLC0415

        if self.num_nodes_waiting():
            return False
        self._hub.done()
        began = whole = time.monotonic()
        said = False
        with self._hub.changed:
            while (news := self._hub.view.news) is None or not news.done:
                view, now = self._hub.view, time.monotonic()
                self._check(view, 0.0)
                if news is not None and news.waiting:
                    return False
                if news is not None and view.is_member and not news.missing:
                    whole = now
                if now - whole >= within:
                    gone = "a node has gone whose ranks may not have ended well"
                    raise RendezvousTimeoutError(f"{gone}, and none takes its place within {within:g} s")
                if not said and now - began >= _ENDS_QUIETLY:
                    said = True
                    self.say("all ranks of this node have ended well: waits for those of others")
                self._hub.changed.wait(_LOOK_EVERY)
        return True

    def is_closed(self) -> bool:
        """Returns True once the job has ended."""
        news = self._hub.view.news
        return news is not None and news.closed

    def set_closed(self) -> None:
        """Ends the job on all nodes, once their ranks have ended."""
        self._hub.bye(over=True)

    def shutdown(self) -> bool:
        """Takes leave of the others. A node that is part of the job ends it; one that is not just goes."""
        self._hub.bye(over=self._is_part)
        news = self._hub.view.news
        until = time.monotonic() + (COMES_BACK_WITHIN if news is not None and news.done else _LEAVE_WITHIN)
        with self._hub.changed:
            while self._is_part and not _may_end(self._hub.view) and (left := until - time.monotonic()) > 0:
                self._hub.changed.wait(left)
        self._hub.stop()
        return True

    def _wait_for_round(self, after: int, pause: int) -> Round:
        """Returns the next round that this node is part of."""
        from torch.distributed.elastic.rendezvous import RendezvousTimeoutError  # noqa: PLC0415

        began = idle = time.monotonic() + pause
        complained = spared = False
        while True:
            with self._hub.changed:
                view, now = self._hub.view, time.monotonic()
                if view.round is not None and view.round.number > after:
                    return view.round
                self._check(view, now - began)
                is_spare = view.is_member and view.news is not None and view.news.spare
                if is_spare:
                    idle = now
                    if not spared:
                        spared = True
                        self.say(SPARE)
                if now - idle >= self._join_within:
                    raise RendezvousTimeoutError(self._describe_absence())
                if not complained and now - idle >= (_WAITS_QUIETLY if self._was_member else _PATIENCE):
                    complained = True
                    self.say(self._describe_wait())
                self._hub.changed.wait(_LOOK_EVERY)
            if is_spare:
                self.prepare()

    def _check(self, view: View, seconds: float) -> None:
        """Raises an error if the round will not come."""
        from torch.distributed.elastic.rendezvous import (  # noqa: PLC0415
            RendezvousClosedError,
            RendezvousConnectionError,
            RendezvousGracefulExitError,
            RendezvousStateError,
        )

        self._was_member |= view.is_member
        if view.failed:
            raise RendezvousStateError(f"the rendezvous has failed: {view.failed}")
        if view.refused:
            raise RendezvousConnectionError(f"another job is at {self._where}: {view.refused}")
        if view.news is not None and (view.news.closed or view.news.done):
            raise RendezvousGracefulExitError if view.was_spare or view.news.done else RendezvousClosedError
        if not self._was_member and seconds >= self._read_within:
            why = self._why_unreached()
            raise RendezvousConnectionError(f"{self._where}, where the nodes are to meet, was not reached: {why}")

    # -- for people -------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return ",".join(map(str, self._endpoints))

    def _tell_of_the_lead(self) -> None:
        self._start = _START_AT.format(self._address)
        self.say(
            f"the launcher that led is lost: this one leads on, at {self._address}. Nodes that are started from now on "
            f"find the job by --rdzv-endpoint {self._address}"
        )

    @property
    def _others_end(self) -> bool:
        news = self._hub.view.news
        return news is not None and news.ending

    def _describe_wait(self) -> str:
        if not self._was_member:
            return f"{self._where}, where the nodes are to meet, is not reached yet: {self._why_unreached()}"
        if self._others_end:
            return (
                f"waits for the ranks of other nodes to end, for {self._join_within:g} s at most (join_timeout of "
                f"--rdzv-conf): after {self._ends_within:g} s a spare takes the place of their node, if there is one"
            )
        return (
            f"waits for other nodes, for {self._join_within:g} s at most (join_timeout of --rdzv-conf): {self._start}"
        )

    def _describe_absence(self) -> str:
        within = f"within {self._join_within:g} s (join_timeout of --rdzv-conf)"
        if self._others_end:
            return f"ranks of other nodes have not ended {within}: see what holds them there, as a mount that hangs"
        return f"too few nodes have come to {self._where} {within}: {self._start}"

    def _why_unreached(self) -> str:
        errors = [error for address in self._endpoints if (error := self._hub.errors.get(address)) is not None]
        if not errors:
            return "what listens there does not answer as a launcher: it hangs, or another program has the port"
        for error in errors:
            if isinstance(error, socket.gaierror):
                return "its name is not known here: see that --rdzv-endpoint names a node of the job"
        if any(isinstance(error, ConnectionRefusedError) for error in errors):
            return "nobody listens there: start 'rekindle run' on that node too, with the same --rdzv-endpoint"
        return "it does not answer: see that the node is up, and that no firewall closes the port"


def _may_end(view: View) -> bool:
    """Returns True once nobody needs this launcher any more, or it can't tell anybody that the job has ended."""
    news = view.news
    if view.failed or news is None or (news.closed and not view.is_member):
        return True
    return news.over and not (view.leads and view.has_members)


def _parse(text: str) -> tuple[Address, ...]:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint  # noqa: PLC0415

    try:
        found = [Address(*parse_rendezvous_endpoint(part, DEFAULT_PORT)) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not all(address.port for address in found):
        raise UsageError(f"each part of the rendezvous endpoint {text!r} needs a port that the nodes know")
    return tuple(dict.fromkeys(found))


def _seconds(params: Any, name: str, unset: float) -> float:
    value = params.get(name, unset)
    with suppress(ValueError):
        if (seconds := float(value)) >= 0:
            return seconds
    raise UsageError(f"{name} of --rdzv-conf is {value!r}: must be a number of seconds")


def _may_listen(params: Any, endpoint: Address) -> bool:
    """Returns True if the launcher of this endpoint is to be here. ``is_host`` of ``--rdzv-conf`` knows it better."""
    told: bool | None = params.get_as_bool("is_host")
    if told and "," in params.endpoint:
        raise UsageError("is_host=1 of --rdzv-conf doesn't tell which one of several endpoints is this node")
    return is_this_host(endpoint.host) if told is None else told


def _listen_anywhere() -> socket.socket:
    opened = listen(0)
    assert opened is not None
    return opened
