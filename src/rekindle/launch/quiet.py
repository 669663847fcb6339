"""Keeps those messages of torchrun's from people that the launcher replaces by lines of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_cpp", "quiet_loggers"]

_LOG_LEVEL = "LOGLEVEL"
"""Environment variable of torchrun: a user who sets it wants to read its log."""
_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""Environment variable that torch reads when it is loaded."""
_QUIET = (
    "failed (exitcode:",
    "Sending process %s closing",
    "Received %s death signal",
    "Got termination signal",
    "The node '",
    "Error waiting on exit barrier",
    "\n****",
    "master_addr is only used",
)
"""Beginnings of torchrun's messages at each failure and start, in place of which Rekindle writes its own."""
_LOGGERS = (
    "run",
    "elastic.agent.server.api",
    "elastic.multiprocessing.api",
    "elastic.rendezvous.dynamic_rendezvous",
)


def quiet_loggers() -> None:
    """Leaves these messages out of torchrun's log."""
    if _LOG_LEVEL not in os.environ:
        for name in _LOGGERS:
            logging.getLogger(f"torch.distributed.{name}").addFilter(_not_quiet)


def _not_quiet(record: logging.LogRecord) -> bool:
    """Returns False for a message that is left out."""
    return not str(record.msg).startswith(_QUIET)


@contextmanager
def quiet_cpp() -> Iterator[None]:
    """Has the part of torch that is C++, if it is loaded in this block, write no log in this process.

    It would show 20 lines of its own frames for each question to a store that is lost, and raises an error besides.
    Other processes, the ranks among them, are not affected.
    """
    if _LOG_LEVEL in os.environ or _CPP_LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_CPP_LOG_LEVEL] = "FATAL"
    try:
        yield
    finally:
        del os.environ[_CPP_LOG_LEVEL]
