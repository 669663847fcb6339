"""Carries a launcher's words over TCP: runs its state machine (``node.py``) in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from rekindle.launch.rendezvous.hosts import BACKLOG
from rekindle.launch.rendezvous.links import Identity
from rekindle.launch.rendezvous.names import PatientLoop
from rekindle.launch.rendezvous.node import LOST_AFTER, Node
from rekindle.launch.rendezvous.wire import MOST_BYTES, Address, News, Round, decode, encode

__all__ = ["Hub", "View"]

_TICK = 0.1
_LATE = 0.5
"""Most seconds that a pause between two ticks counts for: in a longer one this launcher was stopped."""
_MOST_UNSENT = 1 << 20
"""Bytes that may wait to be sent to one launcher; with more it is lost."""
_MOST_STRANGERS = 256
"""Connections beyond twice the number of the job's nodes."""
_ENDS_WITHIN = 1.0
_NEXT_ADDRESS_AFTER = 0.1
"""Seconds after which the next address of a host with several is tried as well."""


class View(NamedTuple):
    """The state of a launcher as the threads of torchrun see it."""

    round: Round | None = None
    news: News | None = None
    is_member: bool = False
    """True while this launcher leads, or is heard by the one that does."""
    leads: bool = False
    has_members: bool = False
    """True while others follow this launcher, or have not had time to."""
    refused: str = ""
    """The reason for which another job's launcher has sent this one away."""
    was_spare: bool = False
    """True if it has seen the job run without it since the last round that it was part of."""
    failed: str = ""
    """The error that has ended the thread."""


class Hub:
    """A launcher's connections. Its methods are for any thread, and never wait."""

    def __init__(self, me: Identity, listeners: list[socket.socket], took_over: Callable[[], object]) -> None:
        """``took_over`` is called once, when this launcher leads on in place of one that was lost."""
        self.changed = threading.Condition()
        """Notified of each change of ``view``."""
        self.view = View()
        self.errors: dict[Address, OSError] = {}
        """The error of the last connection to each address; none once one was made."""
        self._most_links = 2 * me.most + _MOST_STRANGERS
        self._listeners, self._took_over = listeners, took_over
        self._clock, self._ticked = 0.0, time.monotonic()
        self._node = Node(me, self._clock)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._told = False
        """True once ``took_over`` was called."""
        self._settles = False
        """True while ``_settle`` is to come."""
        self._loop = PatientLoop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="rekindle-rendezvous", daemon=True)
        self._thread.start()

    def want(self, store: Address, pause: int = 0) -> None:
        """Asks for a round after a pause in seconds, and offers a store to it."""
        self._post(lambda: self._node.want(store, self._now(), pause))

    def done(self) -> None:
        """Tells that the ranks have ended well."""
        self._post(self._node.done)

    def bye(self, *, over: bool) -> None:
        """Takes leave of the others; with ``over`` the job has ended."""
        self._post(lambda: self._node.bye(over, self._now()))

    def stop(self) -> None:
        """Ends all connections. Waits for that for a moment."""
        self._post(self._ended.set)
        self._thread.join(_ENDS_WITHIN)

    def _post(self, act: Callable[[], None]) -> None:
        def do() -> None:
            act()
            self._settle_soon()

        with suppress(RuntimeError):  # the thread has ended, as the view tells
            self._loop.call_soon_threadsafe(do)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        why = "it was ended"
        try:
            self._loop.run_until_complete(self._main())
        except Exception as error:  # told to the launcher, which ends
            why = f"{type(error).__name__}: {error}"
        finally:
            self._publish(self.view._replace(is_member=False, failed=why))
            self._loop.close()

    async def _main(self) -> None:
        servers = [
            await asyncio.start_server(self._serve, sock=own, limit=MOST_BYTES, backlog=BACKLOG)
            for own in self._listeners
        ]
        try:
            while not self._ended.is_set():
                self._clock, self._ticked = self._now(), time.monotonic()
                self._node.tick(self._clock)
                self._settle()
                for task in [task for task in self._tasks if task.done()]:
                    self._tasks.remove(task)
                    task.result()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), _TICK)
        finally:
            for server in servers:
                server.close()
            for writer in self._writers.values():
                writer.transport.abort()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    def _now(self) -> float:
        """Returns the time on a clock that stands still while this launcher is stopped."""
        return self._clock + min(max(time.monotonic() - self._ticked, 0.0), _LATE)

    def _settle_soon(self) -> None:
        """Has the state machine settle once after all events that are there: those of a large job come at once."""
        if not self._settles:
            self._settles = True
            self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        """Does what the state machine asks for, and shows its state."""
        self._settles = False
        node = self._node
        node.settle(self._now())
        while node.output:
            done, node.output = node.output, []
            for act, link, address, message in done:
                if act == "connect" and address is not None:
                    self._tasks.add(self._loop.create_task(self._connect(link, address)))
                elif act == "send" and message is not None:
                    self._send(link, encode(message))
                elif act == "drop" and (writer := self._writers.pop(link, None)) is not None:
                    writer.transport.abort()  # what is not on its way yet would wait for one that may be gone
        took_over = node.took_over and not self._told
        self._told = node.took_over
        members = node.has_members(self._now())
        self._publish(View(node.round, node.news, node.is_member, node.leads, members, node.refused, node.was_spare))
        if took_over:
            self._took_over()

    def _publish(self, view: View) -> None:
        if view != self.view:
            with self.changed:
                self.view = view
                self.changed.notify_all()

    def _send(self, link: int, line: bytes) -> None:
        writer = self._writers.get(link)
        if writer is not None and not writer.is_closing():
            writer.write(line)
            if writer.transport.get_write_buffer_size() > _MOST_UNSENT:
                writer.transport.abort()

    async def _connect(self, link: int, address: Address) -> None:
        try:
            opened = asyncio.open_connection(
                address.host, address.port, limit=MOST_BYTES, happy_eyeballs_delay=_NEXT_ADDRESS_AFTER
            )
            reader, writer = await asyncio.wait_for(opened, LOST_AFTER)
        except (OSError, asyncio.TimeoutError, UnicodeError) as error:
            self.errors[address] = error if isinstance(error, OSError) else TimeoutError("it does not answer")
            self._node.lost(link, self._now())
            self._settle_soon()
            return
        self.errors.pop(address, None)
        self._writers[link] = writer
        self._node.connected(link, self._now())
        await self._read(link, reader)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._writers) >= self._most_links:
            writer.transport.abort()
            return
        link = self._node.accept(self._now())
        self._writers[link] = writer
        with suppress(asyncio.CancelledError):  # in Python 3.11 the server's own callback fails at a task that was
            await self._read(link, reader)

    async def _read(self, link: int, reader: asyncio.StreamReader) -> None:
        """Takes the messages of a connection until it ends, or has brought what no launcher would send."""
        self._settle_soon()
        with suppress(OSError, ValueError):
            while link in self._writers and (line := await reader.readline()).endswith(b"\n"):
                self._node.received(link, decode(line), self._now())
                self._settle_soon()
        self._node.lost(link, self._now())
        if (writer := self._writers.pop(link, None)) is not None:
            writer.transport.abort()
        self._settle_soon()
