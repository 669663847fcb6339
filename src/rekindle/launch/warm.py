"""The launcher's side of warm workers: keeps a spare process, asks it for workers, and starts them cold where it can't.

torchrun starts a worker with ``SubprocessHandler._popen``. Here stands another one, for as long as ``warm_workers()``
lasts: it asks the spare (``spare.py``) for a forked process, which is the launcher's own child like any other.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rekindle.common.backoff import EARLY_TRIES, Backoff
from rekindle.common.os_errors import explain
from rekindle.faults.imports import IMPORTS
from rekindle.launch.adopted import AdoptedProcess
from rekindle.launch.reports import describe_exit
from rekindle.launch.spare import ORDERS, Orders

__all__ = ["WarmWorkers", "warm_workers"]

_HOOK = Path(__file__).parent / "hold"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_ANSWERS_WITHIN = 10.0
"""Seconds that the spare gets for a worker. It takes about 30 ms; an import in its way may take a second or two."""
_ENDS_WITHIN = 5.0
"""Seconds that a killed spare gets to end. It takes milliseconds, unless it waits in the kernel for a file."""
_REPLACED_WITHIN = 6.0
"""Seconds within which a spare that is killed time and again is replaced three times: after 1 s, then 2 s, then 3 s."""

_SET_BY_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
}
"""Environment variables that differ from rank to rank or from start to start, as far as is known before the first
start."""

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

    def __init__(
        self, place: Path, script_dir: Path, say: Callable[[str], object], foresee: Callable[[Path], bool] | None = None
    ) -> None:
        """``place`` is the launcher's directory; ``say`` is given one line for each cold start that has a reason.

        ``foresee`` writes the record of imports before the first start, for a spare node; False if it can't.
        """
        self._record, self._script_dir, self.say = place / IMPORTS, script_dir, say
        self._foresee = foresee
        self._wanted: tuple[list[str], dict[str, str]] | None = None
        """Command and environment of the spare that there is or ought to be; None if there should be none."""
        self._variable: set[str] = set()
        """Environment variables that differ from rank to rank or from start to start. Of all ranks: where this
        process has a RANK itself, as some schedulers set it, one of its ranks has the same."""
        self._deaths = Backoff(_REPLACED_WITHIN)
        """Spares that were killed, or could not be started, since the last warm worker."""
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

        Local rank 0 comes first in each start.
        """
        if rank == 0:
            self._begin_start()
        self._variable |= {name for name in environment if os.environ.get(name) != environment[name]}
        worker = None
        if not self._given_up:
            worker = self._ask(command, environment, streams)
            self._given_up = worker is None
        if worker is not None:
            self._last_warm = self._recorded
            self._deaths.succeed()
        if rank == 0 and self._spare is None:
            same = command[0] == sys.executable  # and not another interpreter, or a program in front such as numactl
            self._wanted = (command, environment) if same else None
        return worker

    def tend(self) -> None:
        """Start a spare where there is none, also in place of one that was killed. To be called every now and then.

        It must be the main thread that calls: a spare ends with the thread that started it. A spare that ended by
        itself would do so again, so the next one is left to the next restart.
        """
        if self._spare is not None and (code := self._spare.poll()) is not None:
            self.close()
            if code < 0:
                self._count_death(f"the spare process {describe_exit(code)}")
            else:
                self._wanted = None
                self.say(f"the spare process {describe_exit(code)}: the next restart is cold")
        if self._spare is None and self._wanted is not None and self._deaths.due():
            try:
                self._spare, self._socket = self._spawn(*self._wanted)
            except OSError as error:
                self._count_death(f"the spare process can't be started: {explain(error)}")

    def expect(self, command: list[str]) -> None:
        """Have a spare ready for the first start of a node that waits for one. To be called now and then, as ``tend``.

        ``command`` is that of the ranks.
        """
        foresee, self._foresee = self._foresee, None
        if foresee is not None and self._wanted is None and command[0] == sys.executable and foresee(self._record):
            self._variable |= _SET_BY_TORCHRUN
            self._wanted = command, dict(os.environ)
        self.tend()

    def _count_death(self, what: str) -> None:
        """Say what happened to a spare. After a few no other is started: memory may be short, and training needs it."""
        self._deaths.fail()
        if self._deaths.failed > EARLY_TRIES:
            self._wanted = None
            self.say(f"{what}: {self._deaths.failed} times in a row, so the next restart is cold")
        else:
            self.say(f"{what}: restarts are cold until another one is ready")

    def close(self) -> None:
        """End the spare."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._spare is not None:
            _end(self._spare)
            self._spare = None

    def _begin_start(self) -> None:
        self._given_up, last, self._last_warm = False, self._last_warm, None
        self._recorded = self._record_time()
        if last == self._recorded:
            self._decline("the last warm start did not come as far as its second step (with DCP: its first save)")

    def _decline(self, reason: str) -> None:
        self._given_up = True
        self.say(f"started cold: {reason}")

    def _record_time(self) -> int:
        with suppress(FileNotFoundError):
            return self._record.stat().st_mtime_ns
        return 0

    # -- asking ---------------------------------------------------------------------------------------------------

    def _ask(self, command: list[str], environment: dict[str, str], streams: list[int]) -> AdoptedProcess | None:
        if self._wanted is None or self._socket is None or not self._recorded:
            return None  # the first start, no start that came as far as its second step, or no spare, as was said
        if command != self._wanted[0]:
            self._decline("the ranks of this node have different arguments")
            return None
        try:
            with _adopting():
                worker, reason = self._request(environment, streams)
        except OSError as error:
            worker, reason = None, explain(error)
        if worker is None:
            self._decline(reason)
            self.close()
            return None
        return AdoptedProcess(worker, command)

    def _request(self, environment: dict[str, str], streams: list[int]) -> tuple[int | None, str]:
        """Returns the process id of a new worker, which is this process's child, or None and the reason."""
        assert self._socket is not None and self._spare is not None
        _wake(self._spare.pid)
        line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with line, other, tempfile.TemporaryFile() as request:
            # A message is too small for some environments.
            request.write(json.dumps({"environment": environment, "variable": sorted(self._variable)}).encode())
            request.flush()
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._socket, [b"w"], [other.fileno(), request.fileno(), *streams])
            other.close()
            until = time.monotonic() + _ANSWERS_WITHIN
            answer = json.loads(_receive(line, until) or "{}")
            if "pid" not in answer:
                return None, answer.get("cold", "the spare process is gone")
            with suppress(TimeoutError):
                _receive(line, until)  # the worker's word that it is ready; nothing if it has been killed meanwhile
            if not _is_own_child(answer["pid"]):
                return None, "a worker of the spare process did not become a child of the launcher"
            with suppress(BrokenPipeError, ConnectionResetError):
                line.send(b"g")
            return answer["pid"], ""

    # -- the spare ------------------------------------------------------------------------------------------------

    def _spawn(self, command: list[str], environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Starts a spare. Returns it, and the socket over which it is asked for workers."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        plain = {name: value for name, value in environment.items() if name not in self._variable}
        orders = Orders(
            socket=its.fileno(),
            launcher=os.getpid(),
            record=str(self._record),
            script_dir=str(self._script_dir),
            python_path=plain.get("PYTHONPATH"),
            variable=sorted(self._variable),
            without={},
        )
        path = os.pathsep.join(filter(None, [str(_HOOK), orders.python_path]))
        told = {**plain, "PYTHONPATH": path, ORDERS: orders.encode(), "REKINDLE_SPARE_CHECK": "1"}
        with its:
            try:
                entered = [command[0], "-u", "-c", _ENTER, str(_HOOK), *command]
                spare = subprocess.Popen(entered, env=told, pass_fds=[its.fileno()], start_new_session=True)
            except OSError:
                ours.close()
                raise
        return spare, ours


@contextmanager
def warm_workers(workers: WarmWorkers) -> Iterator[WarmWorkers | None]:
    """Has torchrun start its workers by ``workers`` until this ends. Where torch has no place for that, all are cold.

    Gives ``workers``, or None then.
    """
    # Imported here, as the other commands need no torch.
    import torch  # noqa: PLC0415
    import torch.distributed.elastic.multiprocessing.api as multiprocessing_api  # noqa: PLC0415

    api: Any = multiprocessing_api  # torch names no place for another handler
    try:
        handler = _warm_handler(workers)
        before = api.get_subprocess_handler
    except (ImportError, AttributeError):
        workers.say(f"restarts are cold: torch {torch.__version__} starts its workers in a way that is not known here")
        handler = before = None
    if handler is not None:
        api.get_subprocess_handler = handler
    try:
        yield None if handler is None else workers
    finally:
        if handler is not None:
            api.get_subprocess_handler = before
        workers.close()


def _warm_handler(workers: WarmWorkers) -> Any:
    """Returns torchrun's class for one worker, with another way to start it.

    Raises ImportError or AttributeError where torch has no such class, or none that starts it like that.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler  # noqa: PLC0415

    if not hasattr(SubprocessHandler, "_popen"):
        raise AttributeError("SubprocessHandler has no _popen")

    class WarmHandler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            given = [self._stdout, self._stderr]
            streams = [0, *(own if file is None else file.fileno() for own, file in zip((1, 2), given, strict=True))]
            worker = workers.start(self.local_rank_id, list(args), env, streams)
            return super()._popen(args, env) if worker is None else worker

    return WarmHandler


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


def _end(spare: subprocess.Popen[bytes]) -> None:
    """Kills a spare, and with it a process that was about to be a worker, which may be this process's child by now."""
    with suppress(ProcessLookupError):
        os.killpg(spare.pid, signal.SIGKILL)
    until = time.monotonic() + _ENDS_WITHIN
    with suppress(subprocess.TimeoutExpired):
        spare.wait(_ENDS_WITHIN)
    with suppress(ChildProcessError):  # raised once none is left
        while time.monotonic() < until:
            if not os.waitpid(-spare.pid, os.WNOHANG)[0]:
                time.sleep(0.005)


def _is_own_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _receive(line: socket.socket, until: float) -> bytes:
    """Returns the next message; nothing if the other side has gone. Raises TimeoutError at that monotonic time."""
    if not select.select([line], [], [], max(0.0, until - time.monotonic()))[0]:
        raise TimeoutError(f"the spare process did not answer within {_ANSWERS_WITHIN:.0f} s")
    with suppress(ConnectionResetError):
        return line.recv(1 << 16)
    return b""


def _wake(pid: int) -> None:
    """Take a spare out of idle priority, in which it would load on while a busy machine leaves it no processor."""
    with suppress(OSError):  # it has ended, or may not be helped: then it doesn't load at idle priority either
        os.sched_setscheduler(pid, os.sched_getscheduler(0), os.sched_getparam(0))
