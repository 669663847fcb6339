"""Ranks on nodes of a lab, forked from the tests' server, which has torch loaded: a start takes no imports."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from multiprocessing.process import BaseProcess

from tests.fork_server import context
from tests.nodes.lab import Node
from tests.nodes.train import Task, train

__all__ = ["start_rank"]

_NAMESPACES = ("mnt", "uts", "ipc", "net", "pid")


def start_rank(node: Node, task: Task, rank: int, environment: dict[str, str]) -> BaseProcess:
    """Starts one rank. The process that is returned ends as the rank does, and lives outside of the node."""
    process = context.Process(target=_enter_and_train, args=(node.pid, task, rank, environment))
    process.start()
    return process


def _enter_and_train(node: int, task: Task, rank: int, environment: dict[str, str]) -> None:
    try:
        _enter(node)
    except FileNotFoundError:  # it has been lost just now
        os._exit(1)
    if (child := os.fork()) == 0:
        _train(task, rank, environment)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _enter(node: int) -> None:
    """Moves this process to a node, and its children into the node's processes. It must have one thread only."""
    files = [os.open(f"/proc/{node}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    setns = ctypes.CDLL(None, use_errno=True).setns
    for file in files:
        if setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)


def _train(task: Task, rank: int, environment: dict[str, str]) -> None:
    """Trains, and ends this process."""
    try:
        os.environ |= environment
        os.environ.pop("REKINDLE_MEMORY", None)
        train(task, rank)
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    except BaseException:
        logging.exception("trainer failed")
        os._exit(1)
    os._exit(0)
