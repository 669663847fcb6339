"""Watches the address at which a job's launchers meet: torch's store there is one of them, and dies with its node."""

from __future__ import annotations

import os
import shlex
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Timer
from typing import Any

__all__ = ["SILENT_FOR", "MeetingPoint"]

SILENT_FOR = 30
"""Seconds without an answer after which the store is lost. TCP itself would send again for a quarter of an hour. A
shorter silence is waited for: of a link that comes back, of a switch that is started anew."""
_PROBE_EVERY = 5
"""Seconds between the kernel's own questions over a connection on which the store's answer is awaited."""
_ANSWERS_WITHIN = 3.0
"""Seconds that an address gets to take a connection, when it is asked why it is lost."""
_PATIENCE = 10.0
"""Seconds after which a launcher that can't reach the store says so. Nodes start that far apart."""
_LEAVE_WITHIN = 2.0
"""Seconds that other launchers get to read that the job has ended, before the store ends with this one."""
_EXCHANGE_WITHIN = timedelta(seconds=10)
"""Time that nodes which have met get to exchange addresses, a matter of milliseconds; torch waits for a minute."""
_OPTIONS = ("--rdzv-endpoint", "--rdzv_endpoint")
_LOST_AT_ONCE = "a node was lost just after all had met"


class MeetingPoint:
    """The store that the launchers of a job share, as one of them sees it."""

    def __init__(self, args: Any, nodes: int) -> None:
        from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint  # noqa: PLC0415

        self._args, self._nodes = args, nodes
        endpoint = args.rdzv_endpoint
        if args.rdzv_backend == "static" and not endpoint:
            endpoint = f"{args.master_addr}:{args.master_port or 29500}"
        with suppress(ValueError):  # torch raises it, too
            self._host, self._port = parse_rendezvous_endpoint(endpoint, default_port=29400)
        self._handler: Any = None
        self._patience: Timer | None = None

    def expect(self, say: Callable[[str], object]) -> None:
        """Says once, after a while without a connection, why there is none: torch tries for a minute."""

        def complain() -> None:
            if self._handler is None and (found := self._probe()) is not None:
                say(f"{self._where}, where the nodes are to meet, is not reached yet: {self._why_unreached(found)}")

        if self._nodes > 1:
            self._patience = Timer(_PATIENCE, complain)
            self._patience.daemon = True
            self._patience.start()

    def enter(self, handler: Any) -> None:
        """Notes that the store has taken this launcher's connection; bounds how long it may be silent from now on."""
        self._handler = handler  # and with it the store, which torch would end before others have read its last word
        if self._patience is not None:
            self._patience.cancel()
        if self._nodes > 1:
            _bound_exchange(handler)
            _bound_silence(self._port)

    def miss(self, say: Callable[[str], object]) -> bool:
        """Says that a node was lost as the nodes met. Returns True if they can meet again without it."""
        if self._args.rdzv_backend == "static":
            return False
        say(f"{_LOST_AT_ONCE} at {self._where}: the others meet again")
        return True

    def leave(self) -> None:
        """Keeps the store for a moment if this launcher has it, so that others read in it that the job has ended."""
        until = time.monotonic() + _LEAVE_WITHIN
        while self._nodes > 1 and _serves_others(self._port) and time.monotonic() < until:
            time.sleep(0.05)
        self._handler = None

    # -- what is told of its loss ---------------------------------------------------------------------------------

    def describe(self, error: Exception) -> str:
        """Says in one line why this launcher ends, which torch has ended with this error of its rendezvous."""
        from torch.distributed import DistStoreError  # noqa: PLC0415
        from torch.distributed.elastic.rendezvous import (  # noqa: PLC0415
            RendezvousClosedError,
            RendezvousTimeoutError,
        )

        if isinstance(error, RendezvousClosedError):
            return "ended, because the job has ended on another node"
        if isinstance(error, RendezvousTimeoutError):
            return (
                f"ended: too few nodes have come to {self._where}: start 'rekindle run' on all of them, with the same "
                "--nnodes, --rdzv-endpoint and --rdzv-id (they wait for 600 s, or for join_timeout of --rdzv-conf)"
            )
        if not _breaks_connection(error):
            return f"ended: {error}"
        if self._handler is None:
            why = self._why_unreached(self._probe())
            return f"can't begin: {self._where}, where the nodes are to meet, was not reached: {why}"
        if isinstance(error, DistStoreError):  # the store has answered
            return f"ended: {_LOST_AT_ONCE} at {self._where}"
        return f"ended: {self._where}, where the nodes met, is lost: {self._why_lost()}"

    def lost(self, error: Exception) -> bool:
        """Returns True if the error means that the store, which this launcher had reached, is lost."""
        from torch.distributed import DistStoreError  # noqa: PLC0415

        return self._handler is not None and _breaks_connection(error) and not isinstance(error, DistStoreError)

    def command(self, arguments: list[str]) -> str:
        """Returns the command that goes on with these arguments: it has the nodes meet at this one."""
        host = self._args.local_addr or socket.getfqdn()
        endpoint = f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"
        script = len(arguments) - len(self._args.training_script_args) - 1
        options = list(_without_endpoint(arguments[:script]))
        return shlex.join(["rekindle", "run", "--rdzv-endpoint", endpoint, *options, *arguments[script:]])

    @property
    def _where(self) -> str:
        return f"{self._host}:{self._port}"

    def _why_unreached(self, found: OSError | None) -> str:
        if isinstance(found, socket.gaierror):
            return f"the name {self._host} is not known here: see that --rdzv-endpoint names a node of the job"
        if isinstance(found, ConnectionRefusedError):
            return "nobody listens there: start 'rekindle run' on that node too, with the same --rdzv-endpoint"
        if found is not None:
            return "it does not answer: see that the node is up, and that no firewall closes the port"
        return "something else listens there, or has just begun to: take a free port of that node"

    def _why_lost(self) -> str:
        found = self._probe()
        if isinstance(found, ConnectionRefusedError):
            return "the launcher that had the store has ended"
        if found is not None:
            return "it does not answer: that node is lost, or can't be reached from here"
        return "the connection is broken, though something listens there"

    def _probe(self) -> OSError | None:
        """Returns the error of a new connection, None if it was taken."""
        try:
            socket.create_connection((self._host, self._port), _ANSWERS_WITHIN).close()
        except OSError as error:
            return error
        return None


def _bound_exchange(handler: Any) -> None:
    """Has nodes that have met exchange addresses on a connection of its own, with a bound of its own.

    The handler's other one, for the state of the rendezvous, may stand still for longer, and takes signs of life.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

    store = getattr(handler, "_store", None)  # the static rendezvous has none yet, another backend one of another kind
    if isinstance(store, TCPStore):
        handler._store = TCPStore(store.host, store.port, timeout=min(handler._store.timeout, _EXCHANGE_WITHIN))


def _breaks_connection(error: Exception) -> bool:
    from torch.distributed import DistError  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError  # noqa: PLC0415

    return isinstance(error, (DistError, RendezvousConnectionError))


def _without_endpoint(options: list[str]) -> Iterator[str]:
    """Yields a launcher's options without its endpoint."""
    value = False
    for option in options:
        if value or option in _OPTIONS:
            value = not value
        elif not option.startswith(tuple(f"{name}=" for name in _OPTIONS)):
            yield option


# -- this process's sockets: torch gives no access to those of its store -------------------------------------------


def _bound_silence(port: int) -> None:
    """Has the kernel end connections to this port that bring no answer for ``SILENT_FOR`` seconds."""
    if sys.platform != "linux":  # elsewhere TCP's own limits hold
        return
    for number in _open_descriptors():
        with _opened_socket(number) as opened:
            if opened is not None and _port_of(opened.getpeername) == port:
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_FOR * 1000)
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_EVERY)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY)


def _serves_others(port: int) -> bool:
    """Returns True while this process has connections at this port that are not its own."""
    taken = own = 0
    for number in _open_descriptors():
        with _opened_socket(number) as opened:
            if opened is not None and _port_of(opened.getpeername) is not None:
                taken += _port_of(opened.getsockname) == port
                own += _port_of(opened.getpeername) == port
    return taken > own


def _open_descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # not on every system
        return []


@contextmanager
def _opened_socket(descriptor: int) -> Iterator[socket.socket | None]:
    """Gives the TCP socket of a descriptor, None where it is something else. It stays open."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise OSError
        opened = socket.socket(fileno=os.dup(descriptor))
    except OSError:  # some other file, or closed meanwhile
        yield None
        return
    with opened:
        yield opened if opened.family in (socket.AF_INET, socket.AF_INET6) else None


def _port_of(name: Any) -> int | None:
    """Returns the port at one end of a connection; None where there is none."""
    try:
        return int(name()[1])
    except OSError:
        return None
