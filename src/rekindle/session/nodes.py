"""Lets the nodes of a start learn of each other: where their agents listen, and the secret by which these speak."""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from rekindle.common.os_errors import describe_error
from rekindle.errors import RekindleError
from rekindle.format.fields import check_integer, loads
from rekindle.format.receipt import read_file
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import LONGEST_TEXT, SECRET_BYTES, Node, Nodes
from rekindle.peers.local_states import Kept, bring_local_state, kept_local_states
from rekindle.peers.wire import Credentials, connect
from rekindle.session.agent_keeper import AgentKeeper
from rekindle.session.group import ProcessGroup, SingleProcess
from rekindle.session.session import Session

__all__ = ["Introduction", "arrange", "enter_mesh", "find_host", "read_address"]

log = logging.getLogger("rekindle")

T = TypeVar("T")

_ANSWERS_WITHIN = 15.0
"""Seconds in which the agent of a node must listen, and then know the other nodes. It has started just now, perhaps, on
processors that have other work. One that can't listen says so."""
_STARTS_WITHIN = 5.0
"""Seconds after which a start waits for no agent where none runs."""
_LOOK_EVERY = 0.02
_ELSEWHERE = "192.0.2.1"
"""An address of no host, kept for examples: the way to it is the way to anywhere else. Nothing is sent there."""
_ANY_PORT = 9
_ASKS = ""
"""Name under which a rank asks its own agent: that has no link with one of its own name."""


class Introduction(NamedTuple):
    """One node's word to all others, given by its first rank."""

    name: str
    """Name of the host."""
    address: tuple[str, int] | None
    """Host and port on which its agent listens; None if it doesn't."""
    ranks: list[int]
    domain: str
    secret: bytes
    """Secret for this start. That of the first node counts."""
    kept: Mapping[int, Kept] = MappingProxyType({})
    """Newest local state that it has of each rank."""


def find_host() -> str:
    """Returns the address at which other nodes reach this one: $REKINDLE_ADDRESS, else that of the way to MASTER_ADDR.

    Returns an empty text, and logs a warning, where none can be found. Sends nothing but questions for names.
    """
    given, master = os.environ.get("REKINDLE_ADDRESS"), os.environ.get("MASTER_ADDR") or _ELSEWHERE
    try:
        if given:
            return str(socket.getaddrinfo(given, _ANY_PORT, type=socket.SOCK_DGRAM)[0][4][0])
        found = _address_towards(master)
        if _is_loopback(found) and not (master == "localhost" or _is_loopback(master)):
            with suppress(OSError):  # this host's own name, which only stands for loopback on the host itself
                return _address_towards(_ELSEWHERE)
        return found
    except OSError as error:
        log.warning(
            "no address is found at which other nodes reach this one, so its memory is of no use to them: %s: %s; set "
            "$REKINDLE_ADDRESS to one",
            *(given or master, describe_error(error)),
        )
        return ""


def enter_mesh(group: SingleProcess | ProcessGroup, session: Session, host: str) -> None:
    """Tells all nodes of each other, sees that their agents know it, and has ranks get their newest local states.

    A collective of a start on several nodes. ``host`` is the address on which the agent of this node was told to
    listen. A node whose agent can't be reached is in no mesh: the job goes on as if it had none there, and one warning
    says so.
    """
    until = time.monotonic() + _ANSWERS_WITHIN
    own = _introduce(session, host, until) if session.is_first_on_node else None
    introductions: list[Introduction] = [one for one in group.gather(own) if one is not None]
    nodes = arrange(introductions, session)
    answers: list[bool] = group.gather(not session.is_first_on_node or _tell_agent(session.job_dir, nodes, until))
    reached = [
        node if answers[node.ranks[0]] else replace(node, host="", port=0)  # its agent has no word of this start
        for node in nodes.nodes
    ]
    session.nodes = replace(nodes, nodes=reached)
    if session.slots is not None:
        kept = {one.ranks[0]: one.kept for one in introductions}
        bring_local_state(session.job_dir, session.slots.rank, session.nodes, [kept[one.ranks[0]] for one in reached])
    absent = [f"{node.name} (rank {node.ranks[0]})" for node in reached if not node.port]
    if absent and group.rank == 0:
        log.warning(
            "the agents of other nodes can't reach that of %s: faults there are noticed late, memory there is read by "
            "its own ranks only, and no node keeps copies for another one; see that no firewall is between, or set "
            "$REKINDLE_ADDRESS; %s there may say why",
            *(", ".join(absent), session.job_dir.paths.agent_log.name),
        )


def arrange(introductions: Sequence[Introduction], session: Session) -> Nodes:
    """Orders the nodes by domain and name, and gives hosts of one name different ones. Alike on all nodes."""
    names: set[str] = set()
    nodes = []
    for one in introductions:
        name, number = one.name, 1
        while name in names:
            number += 1
            name = f"{one.name}-{number}"
        names.add(name)
        host, port = one.address or ("", 0)
        nodes.append(Node(name, host, port, one.ranks, one.domain))
    nodes.sort(key=lambda node: (node.domain, node.name))
    own = next(number for number, node in enumerate(nodes) if session.rank in node.ranks)
    incarnation = session.agreed.incarnation
    return Nodes(incarnation.id, incarnation.generation, introductions[0].secret, own, nodes)


def _introduce(session: Session, host: str, until: float) -> Introduction:
    """Waits for the agent of this node to listen, and introduces the node."""
    address = None
    if session.keeper is not None and host:
        address = _await_address(session, session.keeper, host, until)
    domain = os.environ.get("REKINDLE_DOMAIN") or os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    name = socket.gethostname()[: LONGEST_TEXT - 8] or "node"
    return Introduction(
        name=name,
        address=address,
        ranks=session.local_ranks,
        domain=domain[:LONGEST_TEXT],
        secret=secrets.token_bytes(SECRET_BYTES),
        kept={} if session.job is None else kept_local_states(session.job),
    )


def _await_address(session: Session, keeper: AgentKeeper, host: str, until: float) -> tuple[str, int] | None:
    """Returns ``host`` and the port on which this node's agent listens there, once it does; None if it won't."""
    gone, start = time.monotonic() + _STARTS_WITHIN, session.agreed.incarnation.id

    def look() -> tuple[str, int] | None:
        found = read_address(session.job_dir, host, start)
        return (host, 0) if found is None and time.monotonic() > gone and not keeper.agent_lives else found

    address = _await(look, until)
    return address if address is not None and address[1] else None


def read_address(job: JobDir, host: str, start: str) -> tuple[str, int] | None:
    """Returns ``host`` and the port on which the living agent listens there; 0 if it can't in this start.

    None before it has tried.
    """
    try:
        found = loads(read_file(job.paths.address))
        if (found["pid"], found["host"]) != (job.agent(), host):
            return None
        port = check_integer(found["port"], 0, 65535)
        return (host, port) if port or found["start"] == start else None
    except (OSError, RekindleError, ValueError, TypeError, KeyError):
        return None


def _tell_agent(job: JobDir, nodes: Nodes, until: float) -> bool:
    """Tells the agent of this node of the others. True once it speaks with whoever has the secret of this start."""
    try:
        if not nodes.here.port:
            job.keep_beside(job.paths.nodes, None)
            job.paths.nodes.unlink(missing_ok=True)  # an earlier start's
            return False
        nodes.write(job)
    except OSError:
        return False
    here, credentials = nodes.here, Credentials(nodes.secret, nodes.start, _ASKS)

    def ask() -> bool | None:
        try:
            connect(here.host, here.port, credentials, max(0.1, until - time.monotonic()), here.name).close()
        except (OSError, RekindleError):  # it has not read of this start yet
            return None
        return True

    return _await(ask, until) or False


def _await(look: Callable[[], T | None], until: float) -> T | None:
    """Returns what ``look`` finds, as soon as it does; None at the time ``until``, by the monotonic clock."""
    while True:
        found = look()
        if found is not None or time.monotonic() > until:
            return found
        time.sleep(_LOOK_EVERY)


def _address_towards(host: str) -> str:
    """Returns the local address of packets to ``host``. Raises OSError where there is no way there."""
    family, _, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
