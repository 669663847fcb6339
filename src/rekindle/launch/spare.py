"""The warm process: has loaded what the script imports, sleeps, and turns copies of itself into workers.

It is started as a worker is, with the script's own arguments, and held before the script begins (``hold/``). It loads
modules once a start of the script has told which, at idle priority or, where the way back from that is barred, with
rests. Then it sleeps until the launcher asks for a worker, and forks.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from rekindle.launch.become import become_worker, order_modules, run_users_sitecustomize, set_name
from rekindle.launch.preload import Preload, UnfitModuleError, fork

__all__ = ["ORDERS", "Orders", "hold"]

ORDERS = "REKINDLE_SPARE"
"""Environment variable: the spare's orders, in JSON."""

_NAME = "rekindle-spare"
_PR_SET_PDEATHSIG = 1
_CAP_SYS_NICE = 1 << 23
_LOOK_EVERY = 0.5
"""Seconds between looks for the record of imports, while one is awaited."""
_REST = 3.0
"""Rest after each import, in multiples of the processor time that it took, where idle priority can't be had."""
_MOST_PARTS = 8
"""Parts of a package that are left out one by one, at an import of all the others each; then all of it is."""
_ADOPTED_WITHIN = 5.0
"""Seconds within which the launcher becomes a worker's parent; it takes milliseconds."""


@dataclass
class Orders:
    """The launcher's orders to its spare."""

    socket: int
    """Descriptor of the socket over which workers are asked for."""
    launcher: int
    """Process id of the launcher."""
    record: str
    """Path of the record of imports."""
    script_dir: str
    """Folder whose modules are the script's own."""
    python_path: str | None
    """PYTHONPATH of the workers."""
    variable: list[str]
    """Environment variables that differ from start to start."""
    without: dict[str, str]
    """Packages and parts of packages that can't be loaded ahead, and the reasons."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    def leave_out(self, part: str, reason: str) -> None:
        """Note a part of a package that can't be loaded ahead."""
        package = part.partition(".")[0]
        parts = [name for name in self.without if name.startswith(f"{package}.")]
        if len(parts) < _MOST_PARTS:
            self.without[part] = reason
        else:
            self.without = {name: why for name, why in self.without.items() if name not in parts} | {package: reason}


def hold(hook: str) -> bool:
    """Hold this process until it is a worker. Returns True if the user's own sitecustomize has run in it.

    ``hook`` is the folder in ``sys.path`` by which this process came here.
    """
    try:
        orders = Orders(**json.loads(os.environ.pop(ORDERS)))
        sys.path.remove(hook)  # not always the first one: a .pth file may have put another folder before it
        sys.path_importer_cache.pop(hook, None)
        _Spare(orders, hook).serve()
    except BaseException:  # the script must not run in a process that is no worker
        os._exit(1)
    return run_users_sitecustomize()


class _Spare:
    def __init__(self, orders: Orders, hook: str) -> None:
        self._orders, self._hook = orders, hook
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != orders.launcher:
            os._exit(0)  # it died before it could take this process with it
        self._name = Path("/proc/self/comm").read_text().rstrip("\n")
        set_name(_NAME)
        self._socket = socket.socket(fileno=orders.socket)
        os.set_inheritable(orders.socket, False)
        if orders.python_path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = orders.python_path
        self._environment = dict(os.environ)
        self._streams = _Streams(Path(orders.record).parent)
        self._preload = Preload(Path(orders.script_dir), set(orders.variable), set(orders.without))
        self._learnt = 0
        self._changed: set[str] = set()
        self._imported: list[str] = []
        """Modules of the script's last start, in the order of their imports; none before its first one."""
        self._background = _Background()
        self._worker = False
        self._compared: tuple[str | None, str | None] | None = None
        """The start for which the files on disk were found to be those that were loaded: 15 ms for 2,000."""

    def serve(self) -> None:
        """Learn and serve. Returns in a worker."""
        awaited = True  # a start of the script that will tell what it imports
        while not self._worker:
            if self._record_time() > self._learnt:  # first of all: a spare that replaces another one is wanted soon
                self._learn()
                awaited = False
            elif self._has_request(_LOOK_EVERY if awaited else None):
                self._answer()
                awaited = True

    def _has_request(self, seconds: float | None) -> bool:
        return bool(select.select([self._socket], [], [], seconds)[0])

    def _record_time(self) -> int:
        with suppress(FileNotFoundError):
            return os.stat(self._orders.record).st_mtime_ns
        return 0

    # -- learning -------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Load what the record names. Serves requests in between: a worker may be made of what is loaded so far."""
        first = not self._learnt
        self._learnt = self._record_time()
        told = json.loads(Path(self._orders.record).read_bytes())
        self._changed = set(told["changed"])
        self._imported = [] if "foreseen" in told else list(told["modules"])
        try:
            with self._background:
                self._preload.load(told["modules"], self._rest)
                _freeze()
        except UnfitModuleError as unfit:
            self._begin_anew(*unfit.args)
        except _BecameWorker:
            return
        if first:
            self._announce()

    def _rest(self) -> None:
        """Let training have the processor; serve at once when a worker is wanted."""
        if self._has_request(self._background.rest()):
            self._background.leave()
            self._answer()
            if self._worker:
                raise _BecameWorker
            self._background.enter()

    def _begin_anew(self, part: str, reason: str) -> NoReturn:
        """Start this process over without a part of a package: an import can't be undone."""
        self._streams.restore()
        self._orders.leave_out(part, reason)
        os.environ.clear()
        os.environ.update(self._environment)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [self._hook, self._orders.python_path]))
        os.set_inheritable(self._orders.socket, True)
        os.environ[ORDERS] = self._orders.encode()
        os.execv(sys.executable, sys.orig_argv)

    def _announce(self) -> None:
        with open("/proc/self/status") as file:
            held = sum(int(line.split()[1]) for line in file if line.startswith("RssAnon:")) >> 10
        left_out = "".join(f"; without {name}: {why}" for name, why in sorted(self._orders.without.items()))
        self._streams.say(
            f"rekindle: restarts are warm from now on: process {os.getpid()} holds {self._preload.count} modules in "
            f"{held} MiB{left_out}\n"
        )

    # -- serving --------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        """Make one worker, or tell the launcher why it has to start it cold."""
        message, descriptors, _, _ = socket.recv_fds(self._socket, 1, 8)
        if not message:
            os._exit(0)  # the launcher has gone
        line, request, *streams = descriptors
        wanted = json.loads(_read_all(request))
        os.close(request)
        environment: dict[str, str] = wanted["environment"]
        with socket.socket(fileno=line) as answer:
            if reason := self._refusal(environment, set(wanted["variable"])):
                answer.send(json.dumps({"cold": reason}).encode())
                for stream in streams:
                    os.close(stream)
                return
            self._worker = self._fork(answer)
        if not self._worker:
            for stream in streams:
                os.close(stream)
            return
        self._socket.close()
        set_name(self._name)
        said = self._streams.end()
        become_worker(environment, streams)
        order_modules(self._imported)
        for target, text in said.items():
            os.write(target, text)
        importlib.invalidate_caches()

    def _refusal(self, environment: dict[str, str], variable: set[str]) -> str:
        """Returns the reason why this process can't stand for a cold start; empty if there is none."""
        if not self._learnt:
            return "no start has told yet what the script imports"
        now = {name: value for name, value in environment.items() if name not in variable}
        began = {name: value for name, value in self._environment.items() if name not in variable}
        for name in sorted(now.keys() | began.keys()):
            if now.get(name) != began.get(name):
                return f"{name} has changed since the spare was started"
        start = environment.get("MASTER_PORT"), environment.get("TORCHELASTIC_RESTART_COUNT")
        if start == self._compared:  # for another rank of the same start
            return ""
        reason = self._preload.explain_difference(variable, self._changed)
        self._compared = None if reason else start
        return reason

    def _fork(self, answer: socket.socket) -> bool:
        """Forks a worker whose parent is the launcher. Returns True in the worker, once the launcher has taken it.

        The process in between ends at once, and the kernel gives its child to the launcher, which has asked for that.
        """
        between = fork()
        if between:
            os.waitpid(between, 0)
            return False
        between = os.getpid()
        if worker := fork():
            try:
                answer.send(json.dumps({"pid": worker}).encode())  # from here, so that it is waited for if it is killed
            finally:
                os._exit(0)
        try:
            until = time.monotonic() + _ADOPTED_WITHIN
            while os.getppid() == between and time.monotonic() < until:
                time.sleep(0.0005)
            if os.getppid() != self._orders.launcher:
                os._exit(1)
            os.setsid()
            answer.send(b"r")
            if answer.recv(1) != b"g":
                os._exit(1)  # the launcher has given up on this worker, or has gone
        except BaseException:
            os._exit(1)
        return True


def _freeze() -> None:
    """Put all objects that there are out of the garbage collector's reach, in this process and in its workers.

    Each collection of a worker, and each search of its objects, would otherwise write to all of them, and so copy the
    memory that it shares with this process.
    """
    gc.collect()
    gc.freeze()


class _BecameWorker(BaseException):
    """Leaves the middle of learning in a process that has become a worker."""


class _Streams:
    """Standard output and error of a spare: kept, so that a worker says what imports said, as in a cold start."""

    def __init__(self, place: Path) -> None:
        self._own = {target: os.dup(target) for target in (1, 2)}
        self._kept = {target: _open_unnamed(place) for target in (1, 2)}
        for target, kept in self._kept.items():
            os.dup2(kept, target)

    def say(self, line: str) -> None:
        """Write a line for people to the spare's own standard error."""
        with suppress(OSError):
            os.write(self._own[2], line.encode())

    def restore(self) -> None:
        for target, own in self._own.items():
            os.dup2(own, target)

    def end(self) -> dict[int, bytes]:
        """Returns what imports have written to each stream, and closes all but the streams."""
        said = {target: _read_all(kept) for target, kept in self._kept.items()}
        for descriptor in (*self._own.values(), *self._kept.values()):
            os.close(descriptor)
        return {target: text for target, text in said.items() if text}


def _open_unnamed(directory: Path) -> int:
    """Opens a new file without a name. Without ``tempfile``, which would keep the spare's TMPDIR for the worker."""
    path = directory / f"said-{os.getpid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    path.unlink()
    return descriptor


def _read_all(descriptor: int) -> bytes:
    """Returns a file from its beginning, whatever its position, which other processes share."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


class _Background:
    """Loading that leaves the processor to others: at idle priority, or with rests where that can't be left again.

    A process without privileges may go to idle priority, and only RLIMIT_NICE of 20 lets it come back.
    """

    def __init__(self) -> None:
        self._idle = _may_leave_idle()
        self._own = os.sched_getscheduler(0), os.sched_getparam(0)
        self._used = 0.0

    def __enter__(self) -> None:
        self._used = time.process_time()
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        if self._idle:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    def leave(self) -> None:
        if self._idle:
            os.sched_setscheduler(0, *self._own)

    def rest(self) -> float:
        """Returns the seconds to rest now."""
        used = time.process_time() - self._used
        self._used += used
        return 0.0 if self._idle else used * _REST


def _may_leave_idle() -> bool:
    with open("/proc/self/status") as file:
        effective = next((int(line.split()[1], 16) for line in file if line.startswith("CapEff:")), 0)
    return bool(effective & _CAP_SYS_NICE) or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20
