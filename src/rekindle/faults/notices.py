"""Notices that this process is told to go: by signals, even while the main thread is in C code, files or callables."""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rekindle.errors import UsageError

__all__ = ["Notice", "Notices", "check_notices"]

log = logging.getLogger("rekindle")


def _mark(path: Path) -> tuple[int, int] | None:
    """Returns the identity of a file, which tells it from one that was there before; None when there is none."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns


Notice = signal.Signals | int | str | os.PathLike[str] | Callable[[], bool]
"""A signal; a file that appears, or is written anew, from now on; a callable whose answer becomes true."""

_ASK_EVERY = 1.0
"""Seconds between two checks of the files and callables."""


def check_notices(notices: object) -> None:
    """Raises UsageError unless each of ``notices`` can be one. Some signals can't be taken all the same."""
    found = list(notices) if isinstance(notices, Collection) and not isinstance(notices, (str, bytes)) else [None]
    if not all(_can_be_notice(one) for one in found):
        raise UsageError(
            f"notices is {notices!r}: must be a sequence of signals, paths of files, and callables, such as "
            "[signal.SIGTERM]"
        )
    for number in found:
        if isinstance(number, int) and number not in signal.valid_signals():
            raise UsageError(f"notices is {notices!r}: {number} is no signal of this system")


def _can_be_notice(one: object) -> bool:
    return not isinstance(one, bool) and (isinstance(one, (int, str, os.PathLike)) or callable(one))


class Notices:
    """Calls ``heard`` once, in a thread of its own, with one line about the first notice.

    A signal's Python handler only runs when the main thread comes back from C, which one that waits for a dead rank
    never does. So the byte that the interpreter's own handler writes to a pipe is read instead. Files and callables
    have another thread, for they may hang. Raises UsageError for a signal that can't be taken.
    """

    def __init__(self, notices: Sequence[Notice], heard: Callable[[str, int], None]) -> None:
        self._heard = heard
        self._signals = [int(n) for n in notices if isinstance(n, int)]
        files = [Path(n) for n in notices if isinstance(n, (str, os.PathLike))]
        self._files = {path: _mark(path) for path in files}
        self._questions = [n for n in notices if callable(n)]
        self._before: dict[int, Any] = {}
        """Handlers that signals had before. This one's own is a new function: it tells whose a handler is."""
        self._nothing: Callable[..., None] = lambda *_: None
        self._former = -1
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._closed = threading.Event()
        self._listening = False
        if self._signals and threading.current_thread() is threading.main_thread():
            self._take_signals()
            self._listening = True
            threading.Thread(target=self._listen, name="rekindle-notice", daemon=True).start()
        elif self._signals:
            log.warning("guard() is not in the main thread: signals can't be taken as notices. Use files or callables")
        if self._files or self._questions:
            threading.Thread(target=self._ask, name="rekindle-questions", daemon=True).start()

    def _take_signals(self) -> None:
        try:
            for number in self._signals:
                self._before[number] = signal.signal(number, self._nothing)
        except (OSError, ValueError) as error:
            self._put_back()
            raise UsageError(f"notices: signal {number} can't be taken: {error}") from error
        self._former = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        _taken.add(self)

    def _put_back(self) -> None:
        """Gives signals back. One that others have taken since, and have not given back, is theirs to give back."""
        for number, handler in self._before.items():
            later = next((one for one in _taken if one._before.get(number) is self._nothing), None)
            if later is not None:
                later._before[number] = handler
            else:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _put_wakeup_back(self) -> None:
        """Does the same for the descriptor. Who had it before may have closed it."""
        later = next((one for one in _taken if one._former == self._write), None)
        if later is not None:
            later._former = self._former
            return
        try:
            signal.set_wakeup_fd(self._former)
        except (OSError, ValueError):
            signal.set_wakeup_fd(-1)

    def _listen(self) -> None:
        try:
            while not self._closed.is_set():
                for number in os.read(self._read, 64):
                    if number in self._signals and not self._closed.is_set():
                        self._heard(f"was sent {signal.Signals(number).name}", number)
                    elif self._former >= 0 and number:
                        with suppress(OSError):  # full, or closed since
                            os.write(self._former, bytes([number]))
        finally:
            os.close(self._read)

    def _ask(self) -> None:
        while not self._closed.wait(_ASK_EVERY):
            for path, before in self._files.items():
                if _mark(path) not in (None, before):
                    self._heard(f"found {path}", 0)
                    return
            for question in list(self._questions):
                try:
                    told = question()
                except BaseException:
                    log.exception("a callable given as a notice failed: it is not called any more")
                    self._questions.remove(question)
                else:
                    if told and not self._closed.is_set():
                        self._heard(f"was told to go by {getattr(question, '__name__', question)}", 0)
                        return

    def forked(self) -> None:
        """Put signals back in a forked child: its signals are its own, and must not be taken for the parent's."""
        signal.set_wakeup_fd(-1)
        self._put_back()

    def close(self) -> None:
        """Put signals back as they were."""
        self._closed.set()
        if self._before and threading.current_thread() is threading.main_thread():
            _taken.discard(self)
            self._put_wakeup_back()
            self._put_back()
        with suppress(OSError):
            os.write(self._write, b"\0")  # its thread ends, and closes the other end
        os.close(self._write)
        if not self._listening:
            os.close(self._read)


_taken: weakref.WeakSet[Notices] = weakref.WeakSet()


def _in_child() -> None:
    for notices in list(_taken):
        notices.forked()


os.register_at_fork(after_in_child=_in_child)
