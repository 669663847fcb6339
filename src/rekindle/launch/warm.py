"""The launcher's side of warm workers: keeps a spare process, asks it for workers, and starts them cold where it can't.

torchrun starts a worker with ``SubprocessHandler._popen``. Here stands another one, for as long as ``warm_workers()``
lasts: it asks the spare (``spare.py``) for a forked process, which is the launcher's own child like any other.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rekindle.faults.imports import IMPORTS
from rekindle.launch.adopted import AdoptedProcess
from rekindle.launch.spare import ORDERS, Orders

__all__ = ["WarmWorkers", "warm_workers"]

_HOOK = Path(__file__).parent / "hold"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_ANSWERS_WITHIN = 10.0
"""Seconds that the spare gets for a worker. It takes about 30 ms; an import in its way may take a second or two."""

_ENTER = """
import os, sys
sitecustomize = sys.modules.get("sitecustomize")
if os.path.dirname(getattr(sitecustomize, "__file__", "")) == sys.argv[1]:
    del os.environ["REKINDLE_SPARE_CHECK"]
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs the script's command, once it is sure that this interpreter will be held before the script begins."""


class WarmWorkers:
    """The spare of one launcher, and how each start of the workers went."""

    def __init__(self, place: Path, script_dir: Path, say: Callable[[str], object]) -> None:
        """``place`` is the launcher's directory; ``say`` is given one line for each cold start that has a reason."""
        self._record, self._script_dir, self._say = place / IMPORTS, script_dir, say
        self._command: list[str] = []
        self._spare: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._given_up = False
        """True in a start whose workers are all cold."""
        self._recorded = 0
        """Time of the record when this start began; 0 without one."""
        self._last_warm: int | None = None
        """That time, once a worker of this start is warm."""

    def start(self, rank: int, command: list[str], environment: dict[str, str], streams: list[int]) -> Any:
        """Returns a worker made by the spare, or None when this one has to be started cold.

        Local rank 0 comes first in each start. Starts a spare when there is none.
        """
        if rank == 0:
            self._begin_start()
        variable = sorted(name for name in environment if os.environ.get(name) != environment[name])
        worker = None
        if not self._given_up:
            worker = self._ask(command, environment, variable, streams)
            self._given_up = worker is None
        if worker is not None:
            self._last_warm = self._recorded
        if self._spare is None:
            self._start_spare(command, environment, variable)
        return worker

    def close(self) -> None:
        """End the spare."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._spare is not None:
            self._spare.kill()
            self._spare.wait()
            self._spare = None

    def _begin_start(self) -> None:
        self._given_up, last, self._last_warm = False, self._last_warm, None
        self._recorded = self._record_time()
        if last == self._recorded:
            self._decline("the last warm start did not come as far as its second step")

    def _decline(self, reason: str) -> None:
        self._given_up = True
        self._say(f"started cold: {reason}")

    def _record_time(self) -> int:
        with suppress(FileNotFoundError):
            return self._record.stat().st_mtime_ns
        return 0

    # -- asking ---------------------------------------------------------------------------------------------------

    def _ask(
        self, command: list[str], environment: dict[str, str], variable: list[str], streams: list[int]
    ) -> AdoptedProcess | None:
        if self._socket is None or not self._recorded:
            return None  # the first start, or no start that came as far as its second step
        if command != self._command:
            self._decline("the ranks of this node have different arguments")
            return None
        with _adopting():
            answer, line = self._request(environment, variable, streams)
            with line:
                if "pid" in answer and _is_own_child(answer["pid"]):
                    line.send(b"g")
                    return AdoptedProcess(answer["pid"], command)
        self._decline(answer.get("cold", "the spare process is gone"))
        self.close()
        return None

    def _request(
        self, environment: dict[str, str], variable: list[str], streams: list[int]
    ) -> tuple[dict[str, Any], socket.socket]:
        """Returns the spare's or the worker's answer, empty if none comes, and the line on which it came."""
        assert self._socket is not None
        line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = os.memfd_create("rekindle-request")  # a message is too small for some environments
        try:
            with open(request, "wb", closefd=False) as file:
                file.write(json.dumps({"environment": environment, "variable": variable}).encode())
            socket.send_fds(self._socket, [b"w"], [other.fileno(), request, *streams])
        except OSError:
            return {}, line
        finally:
            other.close()
            os.close(request)
        with suppress(OSError, ValueError):
            if select.select([line], [], [], _ANSWERS_WITHIN)[0]:
                return dict(json.loads(line.recv(1 << 16))), line
        return {}, line

    # -- the spare ------------------------------------------------------------------------------------------------

    def _start_spare(self, command: list[str], environment: dict[str, str], variable: list[str]) -> None:
        """Start a spare, by the main thread: it ends when the thread that started it does."""
        if command[0] != sys.executable:
            return  # another interpreter, or a program in front of it such as numactl
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        plain = {name: value for name, value in environment.items() if name not in variable}
        orders = Orders(
            socket=its.fileno(),
            launcher=os.getpid(),
            record=str(self._record),
            script_dir=str(self._script_dir),
            python_path=plain.get("PYTHONPATH"),
            variable=variable,
            without={},
        )
        path = os.pathsep.join(filter(None, [str(_HOOK), orders.python_path]))
        told = {**plain, "PYTHONPATH": path, ORDERS: orders.encode(), "REKINDLE_SPARE_CHECK": "1"}
        with its:
            self._spare = subprocess.Popen(
                [command[0], "-u", "-c", _ENTER, str(_HOOK), *command],
                env=told,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        self._socket, self._command = ours, command


@contextmanager
def warm_workers(workers: WarmWorkers) -> Iterator[None]:
    """Has torchrun start its workers by ``workers`` until this ends."""
    # Imported here, as the other commands need no torch.
    import torch.distributed.elastic.multiprocessing.api as multiprocessing_api  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler  # noqa: PLC0415

    class WarmHandler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            given = [self._stdout, self._stderr]
            streams = [0, *(own if file is None else file.fileno() for own, file in zip((1, 2), given, strict=True))]
            worker = workers.start(self.local_rank_id, list(args), env, streams)
            return super()._popen(args, env) if worker is None else worker

    api: Any = multiprocessing_api  # torch names no place for another handler
    before = api.get_subprocess_handler
    api.get_subprocess_handler = WarmHandler
    try:
        yield
    finally:
        api.get_subprocess_handler = before
        workers.close()


@contextmanager
def _adopting() -> Iterator[None]:
    """Lets this process be the parent of descendants whose parent ends, as init is at other times."""
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _is_own_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
