"""Fits torchrun's settings to the number of nodes: where and how they meet."""

from __future__ import annotations

import os
import uuid
from argparse import ArgumentParser
from typing import Any

from rekindle.errors import UsageError
from rekindle.launch.rendezvous.entry import BACKEND
from rekindle.launch.rendezvous.hosts import is_this_host

__all__ = ["fit_settings", "forget_defaults"]

_TOLD_BY_USERS = ("rdzv_backend", "node_rank")
"""Options whose defaults differ from the same values given by the user."""
_NO_ID = "none"
"""torchrun's own default. By its id a start knows the one before."""


def forget_defaults(parser: ArgumentParser) -> None:
    """Makes options None that neither the command line nor the environment gives, for ``fit_settings`` to set."""
    for name in _TOLD_BY_USERS:
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})


def fit_settings(args: Any, nodes: int) -> None:
    """Sets what the user has left open, for a job of at most so many nodes. Raises UsageError if they can't meet.

    An endpoint without a backend and without a node's rank has one sense: torch's own choice, the static rendezvous,
    would take each node for the first one. A job of one node needs no place to meet, whatever is said of one: torch's
    rendezvous would give ranks that are started again the addresses of dead ones, in all releases but a few, and
    another job on this host may have the same port.
    """
    numbered = args.node_rank is not None
    args.node_rank = args.node_rank or 0
    if args.standalone and nodes > 1:
        raise UsageError(f"--standalone is a job of one node, and --nnodes is {args.nnodes}: nothing was started")
    if args.standalone or (nodes == 1 and args.rdzv_backend is None):
        _stay_alone(args, numbered)
    elif args.rdzv_backend is None:
        args.rdzv_backend = "static" if numbered or not args.rdzv_endpoint else BACKEND
    given = numbered or args.rdzv_endpoint or args.master_port is not None
    if nodes > 1 and args.rdzv_backend == "static" and not given:
        raise UsageError(
            f"--nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT, one of the nodes and a free port on it, the same "
            "on each node: nothing was started"
        )


def _stay_alone(args: Any, numbered: bool) -> None:
    """Sets a job of this node alone. Raises UsageError if its endpoint is another host: two would train the same."""
    host, _, port = args.rdzv_endpoint.rpartition(":")
    anywhere = args.standalone or numbered or not args.rdzv_endpoint or port == "0"
    if not anywhere and not is_this_host((host or args.rdzv_endpoint).strip("[]")):
        raise UsageError(
            f"--nnodes 1 is a job of this node alone, and --rdzv-endpoint {args.rdzv_endpoint} is another one: for a "
            "spare give --rdzv-backend rekindle on both nodes, else leave the endpoint out: nothing was started"
        )
    args.rdzv_backend, args.rdzv_endpoint, args.standalone = BACKEND, "", False
    if args.rdzv_id == _NO_ID:
        args.rdzv_id = str(uuid.uuid4())
