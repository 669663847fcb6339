"""Fits torchrun's settings to a job on several nodes: where and how they meet."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from typing import Any

from rekindle.errors import UsageError
from rekindle.launch.rendezvous.entry import BACKEND
from rekindle.launch.rendezvous.hosts import is_this_host

__all__ = ["fit_settings", "forget_defaults"]

_TOLD_BY_USERS = ("rdzv_backend", "node_rank")
"""Options whose defaults differ from the same values given by the user."""


def forget_defaults(parser: ArgumentParser) -> None:
    """Makes options None that neither the command line nor the environment gives, for ``fit_settings`` to set."""
    for name in _TOLD_BY_USERS:
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})


def fit_settings(args: Any, nodes: int) -> None:
    """Sets what the user has left open, for a job of at most so many nodes. Raises UsageError if they can't meet.

    An endpoint without a backend and without a node's rank has one sense: torch's own choice, the static rendezvous,
    would take each node for the first one. A job of one node meets at any free port: torch's static rendezvous would
    give ranks that are started again the addresses of dead ones, and another job on this host may have the same
    endpoint.
    """
    numbered = args.node_rank is not None
    if args.rdzv_backend is None:
        args.rdzv_backend = "static" if numbered or not args.rdzv_endpoint else _open_backend(args, nodes)
    args.node_rank = args.node_rank or 0
    if nodes == 1 or args.standalone:
        return
    if args.rdzv_backend == "static" and not (numbered or args.rdzv_endpoint or args.master_port is not None):
        raise UsageError(
            f"--nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT, one of the nodes and a free port on it, the same "
            "on each node: nothing was started"
        )


def _open_backend(args: Any, nodes: int) -> str:
    """Returns the way in which nodes meet at an endpoint. Raises UsageError for a job of one node at another host."""
    if nodes > 1:
        return BACKEND
    host, _, port = args.rdzv_endpoint.rpartition(":")
    if not args.standalone and port != "0" and not is_this_host(host.strip("[]")):
        raise UsageError(
            f"--nnodes 1 is a job of this node alone, and --rdzv-endpoint {args.rdzv_endpoint} is another one: for a "
            "spare give --rdzv-backend rekindle on both nodes, else leave the endpoint out: nothing was started"
        )
    args.rdzv_endpoint = "localhost:0"
    return "c10d"
