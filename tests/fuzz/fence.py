"""What no input may bring about: a crash, minutes of work, gigabytes of memory, a file outside, code that runs."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import sys
import sysconfig
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rekindle.errors import RekindleError

__all__ = ["Breach", "fenced", "preparing", "refused", "signature"]

SECONDS = 10
"""Of the processor's time, for one input of some kilobytes."""
ROOM = 3 << 30
"""Bytes of address space that one input may ask for, in one go or in many."""
GROWTH = 1 << 30
"""Bytes of memory that one input may really take."""

_CODE = (*sys.path, sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"))
_SYSTEM = ("/proc/", "/sys/", "/dev/null", "/dev/urandom", "/etc/localtime", "/usr/share/zoneinfo")
_READABLE = (*{os.path.realpath(path) for path in _CODE if path}, *_SYSTEM)
_WRITES = {
    "os.rename": 2,
    "os.remove": 1,
    "os.mkdir": 1,
    "os.rmdir": 1,
    "os.truncate": 1,
    "os.symlink": 2,
    "os.link": 2,
}
_WRITES |= {"os.chmod": 1}
_NEVER = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class"}
_place: str | None = None
_code = False
_outside: list[str] = []


_others: set[threading.Thread] = set()
"""Threads that were there before, as one that drains for an earlier test, and those that they start."""


class Breach(BaseException):
    """Something that no input may bring about. Not an Exception, so that nothing in between takes it for one."""


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _place is None or threading.current_thread() in _others:
        return
    if event == "open" and isinstance(args[0], (str, bytes)):
        writes = bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        _see(event, args[0], writes, not (args[2] or 0) & os.O_NOFOLLOW)
    elif event in _WRITES:
        count = _WRITES[event]
        for path, fd in zip(args[:count], args[-count:], strict=True):
            if isinstance(path, (str, bytes)):
                inside = os.readlink(f"/proc/self/fd/{fd}") if type(fd) is int and fd >= 0 else ""
                _see(event, os.path.join(inside, os.fsdecode(path)), True, False)
    elif event == "os.kill":
        raise ProcessLookupError(3, "nobody is ended by a test of bad input")
    elif event in _NEVER and not (_code and event == "pickle.find_class"):
        _outside.append(f"{event} {args!r:.200}")


def _start(thread: threading.Thread, start: Callable[[threading.Thread], None] = threading.Thread.start) -> None:
    if threading.current_thread() in _others:
        _others.add(thread)
    start(thread)


def _see(event: str, name: str | bytes, writes: bool, follows: bool) -> None:
    assert _place is not None
    try:
        parent, last = os.path.split(os.path.abspath(os.fsdecode(name)))
        path = os.path.join(os.path.realpath(parent), last)
        if follows:
            path = os.path.realpath(path)
    except ValueError:  # no name that a file can have
        return
    if path in (_place.rstrip("/"), "/dev/null"):
        return
    if not writes and _place.startswith(path.rstrip("/") + "/"):  # a directory above, to sync the names in it
        return
    if path.startswith(_place) and not path.startswith(f"{_place}outside{os.sep}"):
        return
    if writes or not path.startswith(_READABLE):
        _outside.append(f"{event} {path}{' to write' if writes else ''}")


@contextmanager
def fenced(place: Path, code: bool = False) -> Iterator[None]:
    """Raises Breach at whatever an input does beyond ``place``, or beyond measure. ``code``: pickles were asked for."""
    global _place, _code
    if not _installed:
        tempfile.gettempdir()  # tries out directories when it is first asked
        sys.addaudithook(_hook)
        threading.Thread.start = _start  # type: ignore[method-assign]
        _installed.append(True)
    _others.clear()
    _others.update(thread for thread in threading.enumerate() if thread is not threading.current_thread())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGPROF, _too_slow)
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    _outside.clear()
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    _place, _code = os.path.realpath(place) + os.sep, code
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _place = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        logging.disable(level)
    if _outside:
        raise Breach(f"beyond its place: {_outside[0]}")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown * 1024 > GROWTH:
        raise Breach("took more than 1 GiB of memory")


@contextmanager
def preparing() -> Iterator[None]:
    """What happens in here is the test's own doing."""
    global _place
    place, _place = _place, None
    try:
        yield
    finally:
        _place = place


_installed: list[bool] = []


def _too_slow(*_: object) -> None:
    raise Breach(f"took more than {SECONDS} s of the processor's time")


def refused(call: Callable[[], object]) -> bool:
    """Whether ``call`` refuses by name. Anything but a named error goes on to whoever watches."""
    try:
        call()
    except (RekindleError, OSError):
        return True
    return False


def signature(error: BaseException) -> str:
    """What tells one finding from another: the error, and where it came up in the product."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}rekindle{os.sep}" in f.filename]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "-"
    what = type(error).__name__
    if isinstance(error, Breach):
        what += f": {re.sub(r'/[^ ]*/tmp[^/ ]*', '', str(error))}"
    return f"{what:.80} in {where}"
