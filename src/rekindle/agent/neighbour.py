"""Sends another node's agent what it is to know, in a thread of its own: a slow or dead one holds up nobody else."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from rekindle.memory.nodes import Node
from rekindle.peers.wire import Credentials, Link, WireError, call, connect

__all__ = ["Neighbour"]

_CONNECT, _REPLY = 1.0, 1.0
"""Seconds to connect and to reply. A packet that is lost on the way is sent again in steps that double: after a time
without a network a new connection is there sooner than an old one is back."""
_AGAIN, _REFUSED = 0.1, 1.0
"""Seconds between two attempts; and after a refusal of a beat, as by an agent that has not read of the start yet, or
has read of a later one. News don't wait for that."""
_NEWS_FOR = 10.0
"""Seconds for which news that can't be delivered are tried again."""
_MOST_NEWS = 32
"""News that wait to be sent. The oldest go first: a start has one fault, and then a better account of it or two."""

Message = dict[str, Any]


class _News(NamedTuple):
    message: Callable[[], Message]
    """Makes the message as it is sent: it says how long ago things were."""
    until: float
    """Time after which nobody wants to know any more."""
    reply: Future[dict[str, Any] | None] | None


class Neighbour:
    """A link to one node's agent, made when it is needed. Its methods never wait; for any thread."""

    def __init__(
        self, node: Node, credentials: Credentials, refused: Callable[[], None], closed: Callable[[], None]
    ) -> None:
        """``refused`` is called when nobody listens there, ``closed`` when the other end has closed a link."""
        self._node, self._credentials = node, credentials
        self._refused, self._closed_by_other = refused, closed
        self._changed = threading.Condition()
        self._beat: Message | None = None
        self._news: deque[_News] = deque(maxlen=_MOST_NEWS)
        self._over = False
        threading.Thread(target=self._run, name="rekindle-neighbour", daemon=True).start()

    def beat(self, message: Message) -> None:
        """Sends a beat, unless the next one comes first."""
        with self._changed:
            self._beat = message
            self._changed.notify()

    def tell(self, message: Callable[[], Message]) -> None:
        """Sends news before any beat, again and again until they are delivered or old."""
        self._add(_News(message, time.monotonic() + _NEWS_FOR, None))

    def ask(self, message: Callable[[], Message]) -> Future[dict[str, Any] | None]:
        """Sends a question once. Returns the reply to come: None if there is none."""
        reply: Future[dict[str, Any] | None] = Future()
        self._add(_News(message, 0.0, reply))
        return reply

    def close(self) -> None:
        """Ends the thread and the link, once an exchange that is under way has ended."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def _add(self, news: _News) -> None:
        with self._changed:
            self._news.append(news)
            self._changed.notify()

    def _next(self) -> _News | None:
        """Waits for what is to be sent next, and takes it. Returns None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._news or self._beat)
            if self._over:
                return None
            if self._news:
                return self._news.popleft()
            beat, self._beat = self._beat, None
            return _News(lambda: beat or {}, 0.0, None)

    def _run(self) -> None:
        link: Link | None = None
        while (news := self._next()) is not None:
            reply = None
            try:
                link = link or self._connect()
                reply = call(link, news.message(), _REPLY)
            except (OSError, WireError) as error:
                if link is not None:
                    link.close()
                    if isinstance(error, ConnectionError):
                        self._closed_by_other()
                link = None
                self._put_off(news, _REFUSED if isinstance(error, WireError) else _AGAIN)
            if news.reply is not None and news.reply.set_running_or_notify_cancel():
                news.reply.set_result(reply)
        if link is not None:
            link.close()

    def _connect(self) -> Link:
        try:
            return connect(self._node.host, self._node.port, self._credentials, _CONNECT, self._node.name)
        except ConnectionRefusedError:
            self._refused()
            raise

    def _put_off(self, news: _News, pause: float) -> None:
        """Waits before the next attempt, and keeps news for it. After a beat the pause ends with the first news."""
        with self._changed:
            if time.monotonic() < news.until:
                self._changed.wait_for(lambda: self._over, _AGAIN)
                self._news.appendleft(news)
            elif news.reply is None:
                self._changed.wait_for(lambda: self._over or self._news, pause)
