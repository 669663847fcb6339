"""Fits torchrun's settings to a job on several nodes: where they meet, and how soon a lost one is given up."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from typing import Any

from rekindle.errors import UsageError

__all__ = ["fit_settings", "forget_defaults"]

_TOLD_BY_USERS = ("rdzv_backend", "node_rank")
"""Options whose defaults differ from the same values given by the user."""
_NODES_A_SECOND = 64
"""Nodes whose signs of life the rendezvous' store takes in a second: each rewrites a state as long as their number."""
_SLOWEST_SIGNS = 5
"""Seconds between two signs of life, at most; torch's own default."""


def forget_defaults(parser: ArgumentParser) -> None:
    """Makes options None that neither the command line nor the environment gives, for ``fit_settings`` to set."""
    for name in _TOLD_BY_USERS:
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})


def fit_settings(args: Any, nodes: int) -> None:
    """Sets what the user has left open, for a job of at most so many nodes. Raises UsageError if they can't meet.

    An endpoint without a backend and without a node's rank has one sense: torch's own choice, the static rendezvous,
    would take each node for the first one.
    """
    numbered = args.node_rank is not None
    if args.rdzv_backend is None:
        args.rdzv_backend = "c10d" if nodes > 1 and args.rdzv_endpoint and not numbered else "static"
    args.node_rank = args.node_rank or 0
    if nodes == 1 or args.standalone:
        return
    if args.rdzv_backend != "static":
        args.rdzv_conf = _with_settings(args.rdzv_conf, nodes)
    elif not (numbered or args.rdzv_endpoint or args.master_port is not None):
        raise UsageError(
            f"--nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT, one of the nodes and a free port on it, the same "
            "on each node: nothing was started"
        )


def _with_settings(conf: str, nodes: int) -> str:
    """Returns ``--rdzv-conf`` with settings that the user hasn't given.

    A node that shows no sign of life for three seconds is no member any more, by torch's own settings for 15 s. When
    enough nodes have met, they wait for one second for further ones (``--nnodes MIN:MAX``), by torch's for 30 s.
    """
    given = {part.partition("=")[0].strip() for part in conf.split(",")}
    ours = {
        "keep_alive_interval": min(_SLOWEST_SIGNS, 1 + nodes // _NODES_A_SECOND),
        "keep_alive_max_attempt": 3,
        "last_call_timeout": 1,
    }
    return ",".join([*filter(None, [conf]), *(f"{name}={value}" for name, value in ours.items() if name not in given)])
