"""Keeps this node's agent reachable for those of other nodes, and a mesh of them while a start trains on several nodes.

The agent listens at the address that a trainer has named in ``job.json``, and joins the mesh that ``nodes.json``
describes. All is in files: an agent that follows a dead one takes its port and its place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rekindle.agent.mesh import VERBS, Mesh
from rekindle.agent.monitor import RankMonitor
from rekindle.agent.others import Others
from rekindle.common.os_errors import describe_error
from rekindle.errors import FormatError
from rekindle.format.fields import check_integer, loads
from rekindle.format.receipt import read_file, write_atomic
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.mark import Mark, mark_of
from rekindle.memory.nodes import Nodes
from rekindle.peers.local_state_sender import LocalStateSender
from rekindle.peers.local_states import local_state_handlers
from rekindle.peers.server import Handler, PeerServer, listen
from rekindle.peers.snapshots import snapshot_handlers
from rekindle.peers.wire import Credentials, Link, WireError

__all__ = ["MeshKeeper"]

log = logging.getLogger("rekindle.agent")

_TICK = 0.05
"""Seconds between two looks at the files, which take some microseconds."""
_AGAIN = 1.0
"""Seconds after which a look that failed is made again: threads or files may be short for a moment."""
_FORMER_GOES = 5.0
"""Seconds after which another program has the port that the other nodes know: this one's beats are heard from any."""
_BEAT = 0.09
"""Seconds after a beat from which on the next look sends another one."""


class MeshKeeper:
    """Serves one job's agent, in its event loop. A mesh that can't be had is one warning: the job goes on without."""

    def __init__(
        self, job: JobDir, monitor: RankMonitor, durable: Callable[[], int], stop: Callable[[bool], dict[str, Any]]
    ) -> None:
        """``durable`` returns the newest step that this node has seen on storage; -1 if it is unknown.

        ``stop`` ends the job on this node, or only looks if it may, and returns the answer. For any thread.
        """
        self._job, self._monitor, self._durable, self._stop = job, monitor, durable, stop
        self._host = self._start = ""
        self._info: JobInfo | None = None
        self._job_mark: Mark = None
        self._nodes_mark: Mark = None
        self._server: PeerServer | None = None
        self._mesh: Mesh | None = None
        self._sender: LocalStateSender | None = None
        self._address: dict[str, Any] = {}
        """Address on which this agent listens, and the start in which it began to; with the port 0 if it can't."""
        self._named = False
        """True once trainers can read of it."""
        self._tried_at = 0.0
        """Time of the first try to listen since it last did; 0.0 before one."""
        self._beat_at = 0.0
        self._look_at = 0.0
        """Time of the next look at the files, after one that failed."""

    async def serve(self) -> None:
        """Looks after the mesh until cancelled."""
        warned = False
        try:
            while True:
                try:
                    self._check()
                except Exception as error:
                    if not warned:
                        log.warning(
                            "faults on other nodes are noticed late here, without a mesh: %s: %s", *_words(error)
                        )
                    warned = True
                await asyncio.sleep(_TICK)
        finally:
            if self._server is not None:
                self._server.close()  # first: who connects now is to see that this agent ends
            self._leave()

    def _check(self) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _AGAIN
            self._look()
            self._look_at = 0.0  # nothing has failed
        if self._mesh is not None and now >= self._beat_at + _BEAT:
            self._beat_at = now
            self._mesh.tick(now)

    def _look(self) -> None:
        """Does what is new in the files. What fails is tried again: the marks of the files come last."""
        mark = mark_of(self._job.paths.job)
        if mark != self._job_mark:
            self._read_job()
            self._job_mark = mark
        if self._address and not self._named:
            with suppress(OSError):  # memory may be full: the next look tries again
                write_atomic(self._job.paths.address, json.dumps(self._address).encode())
                self._named = True
        mark = mark_of(self._job.paths.nodes)
        if mark != self._nodes_mark and self._server is not None:
            self._join()
            self._nodes_mark = mark

    def _read_job(self) -> None:
        info = None
        with suppress(FormatError):  # the drain reports it
            info = self._job.read_job()
        if info is None:
            return
        self._info = info
        if info.start != self._start:
            self._start, self._nodes_mark = info.start, None  # its nodes may have been named already
            self._leave()
        if info.host and (info.host != self._host or self._server is None):
            self._host = info.host
            self._listen()

    # -- being reachable ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Listens on the job's address. A former agent's is taken out of the trainers' sight.

        Raises OSError where other nodes know of one port only, and a former agent may have it still.
        """
        known, now = self._known_port(), time.monotonic()
        self._tried_at = self._tried_at or now
        waits = known and now < self._tried_at + _FORMER_GOES
        if self._server is not None:
            _in_background(self._server.close)
            self._server = None
        self._address = {"pid": os.getpid(), "host": self._host, "port": 0, "start": self._start}
        self._named = False
        try:
            listener = listen(self._host, known) if waits else _bind(self._host, known or self._former_port())
        except OSError as error:
            if waits:
                raise
            log.warning(
                "can't listen to other nodes on %s, so faults there are noticed late; $REKINDLE_ADDRESS gives "
                "another address: %s",
                *(self._host, describe_error(error)),
            )
            return
        finally:
            self._job.paths.address.unlink(missing_ok=True)
        server = PeerServer(listener, self._credentials, self._handlers())
        try:
            server.start()
        except RuntimeError:
            listener.close()
            raise
        self._server, self._tried_at = server, 0.0
        self._address["port"] = listener.getsockname()[1]
        log.info("listens to other nodes on %s port %d", self._host, self._address["port"])

    def _known_port(self) -> int:
        """Returns the port at which the other nodes of the start that trains look for this one; 0 if none is known."""
        with suppress(FormatError):
            nodes = Nodes.read(self._job)
            if nodes is not None and (nodes.start, nodes.here.host) == (self._start, self._host):
                return nodes.here.port
        return 0

    def _former_port(self) -> int:
        """Returns the port on which the agent before has listened: other nodes know it. 0 if there was none."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            address = loads(read_file(self._job.paths.address))
            if address["host"] == self._host:
                return check_integer(address["port"], 0, 65535)
        return 0

    def _handlers(self) -> dict[str, Handler]:
        own: dict[str, Handler] = {**dict.fromkeys(VERBS, self._handle), "stop": self._handle_stop}
        return {**own, **snapshot_handlers(self._job), **local_state_handlers(self._job, self._nodes)}

    def _nodes(self) -> Nodes | None:
        """Returns the nodes of the start that trains; None while they aren't known. For any thread."""
        mesh = self._mesh
        return None if mesh is None else mesh.nodes

    def _credentials(self) -> Credentials | None:
        """Returns the credentials of that start; None while its nodes aren't known. For any thread."""
        nodes = self._nodes()
        return None if nodes is None else Credentials(nodes.secret, nodes.start, nodes.here.name)

    def _handle(self, link: Link, message: dict[str, Any]) -> dict[str, Any] | None:
        mesh = self._mesh
        if mesh is None:
            raise WireError("this node's start has ended")
        return mesh.handle(link, message)

    def _handle_stop(self, link: Link, message: dict[str, Any]) -> dict[str, Any]:
        return self._stop(message.get("only_look") is not False)

    # -- the mesh -----------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Joins the mesh of the start that trains, once its nodes are known."""
        nodes = Nodes.read(self._job)
        if self._info is None or nodes is None or nodes.start != self._start or not nodes.here.port:
            return
        if self._mesh is None or self._mesh.nodes != nodes:
            self._leave()
            self._monitor.others = self._mesh = Mesh(nodes, self._monitor, self._durable, self._info)
            if self._monitor.current is not None:
                self._mesh.tell(self._monitor.current)
            log.info("is node %s, one of %d", nodes.here.name, len(nodes.nodes))
        if self._sender is None:
            sender = LocalStateSender(self._job, nodes)
            sender.start()
            self._sender = sender

    def _leave(self) -> None:
        if self._mesh is not None:
            self._mesh.close()
            self._mesh, self._monitor.others = None, Others()
        if self._sender is not None:
            _in_background(self._sender.close)
            self._sender = None


def _bind(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on ``port`` if it can, else on another one. Raises OSError."""
    try:
        return listen(host, port)
    except OSError:
        if not port:
            raise
        return listen(host, 0)


def _in_background(close: Callable[[], None]) -> None:
    """Closes what may wait for another node."""
    threading.Thread(target=close, name="rekindle-close", daemon=True).start()


def _words(error: Exception) -> tuple[str, str]:
    return type(error).__name__, describe_error(error)
