"""Being told to go: signals that are seen even while the main thread is inside of C code, files, and questions."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rekindle.errors import UsageError

__all__ = ["Notice", "Notices"]

log = logging.getLogger("rekindle")


def _mark(path: Path) -> tuple[int, int] | None:
    """What tells a file from one that was there before; None when there is none."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns


Notice = signal.Signals | int | str | os.PathLike[str] | Callable[[], bool]
"""A signal; a file that appears, or is written anew, from now on; a question whose answer becomes true."""

_ASK_EVERY = 1.0
"""Seconds between looks at files and answers."""


class Notices:
    """Calls ``heard`` once, in a thread of its own, with one line about the first notice.

    A signal's Python handler only runs when the main thread comes back from C, which one that waits for a dead rank
    never does. So the byte that the interpreter's own handler writes to a pipe is read instead.
    """

    def __init__(self, notices: Sequence[Notice], heard: Callable[[str, int], None]) -> None:
        self._heard = heard
        self._signals = [int(n) for n in notices if isinstance(n, int)]
        files = [Path(n) for n in notices if isinstance(n, (str, os.PathLike))]
        self._files = {path: _mark(path) for path in files}
        self._questions = [n for n in notices if callable(n)]
        if len(self._signals) + len(self._files) + len(self._questions) != len(notices):
            raise UsageError(f"notices {notices!r}: give signals, files, or callables")
        self._before: dict[int, Any] = {}
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._former = -1
        self._closed = False
        if self._signals and threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._before[number] = signal.signal(number, lambda *_: None)
            self._former = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        elif self._signals:
            log.warning("guard() is not in the main thread: signals can't be taken as notices")
        threading.Thread(target=self._run, name="rekindle-notice", daemon=True).start()

    def _run(self) -> None:
        try:
            self._listen()
        finally:
            os.close(self._read)

    def _listen(self) -> None:
        while not self._closed:
            ask = _ASK_EVERY if self._files or self._questions else None
            if select.select([self._read], [], [], ask)[0]:
                for number in os.read(self._read, 64):
                    if number in self._signals and not self._closed:
                        self._heard(f"was sent {signal.Signals(number).name}", number)
                    elif self._former >= 0:
                        os.write(self._former, bytes([number]))
            what = None if self._closed else self._asked()
            if what is not None:
                self._heard(what, 0)
                return

    def _asked(self) -> str | None:
        for path, before in self._files.items():
            if _mark(path) not in (None, before):
                return f"found {path}"
        for question in self._questions:
            try:
                if question():
                    return f"was told to go by {getattr(question, '__name__', question)}"
            except Exception:
                log.exception("a notice's question failed, and is asked no more")
                self._questions = [q for q in self._questions if q is not question]
        return None

    def close(self) -> None:
        """Put signals back as they were."""
        self._closed = True
        with suppress(BrokenPipeError):  # its thread may have ended already
            os.write(self._write, b"\0")
        if self._before and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._former)
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.close(self._write)
