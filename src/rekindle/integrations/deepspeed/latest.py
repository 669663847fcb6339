"""Lets the file ``latest`` name the newest checkpoint that storage has whole."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from pathlib import Path

from rekindle.common.os_errors import describe_error
from rekindle.integrations.deepspeed.notes import Note, is_durable
from rekindle.storage.open import open_place

__all__ = ["LatestKeeper"]

log = logging.getLogger("rekindle")

_ARRIVES = 600.0
"""Seconds that a clean end of training waits for storage."""
_LOOK_EVERY = 0.5
"""Seconds between looks at storage, while a checkpoint is on its way there."""


class LatestKeeper:
    """Writes ``latest``, by a thread of rank 0 that waits for the files of all ranks. Thread-safe.

    If the process ends before that, ``latest`` names an older checkpoint until the next start.
    """

    def __init__(self, root: Path, owner: str) -> None:
        self._root, self._place = root, open_place(str(root / "latest"), owner)
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[str, str]] = {}
        """Tag and start of each checkpoint that ``latest`` is to name, by number."""
        self._problem = ""
        self._thread: threading.Thread | None = None
        atexit.register(self.finish)

    def add(self, note: Note) -> None:
        """Lets ``latest`` name a checkpoint as soon as storage has all of it."""
        with self._changed:
            self._waiting[note.number] = (note.tag, note.start)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rekindle-deepspeed-latest", daemon=True)
                self._thread.start()

    def drop(self, tag: str) -> None:
        """Gives up a checkpoint that is saved anew."""
        with self._changed:
            self._waiting = {number: save for number, save in self._waiting.items() if save[0] != tag}

    def give_up(self) -> None:
        """Leaves ``latest`` as it is, to the next start."""
        with self._changed:
            self._waiting = {}
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Waits until nothing is on its way. False if something is after ``timeout`` seconds."""
        until = time.monotonic() + timeout
        with self._changed:
            while self._waiting and time.monotonic() < until:
                self._changed.wait(max(0.0, until - time.monotonic()))
            return not self._waiting

    def finish(self) -> None:
        """Waits, at a clean end, until ``latest`` names the newest checkpoint. After an error a restart may wait."""
        failed = sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None
        if not failed and not self.wait(_ARRIVES):
            with self._changed:
                tags = ", ".join(tag for tag, _ in self._waiting.values())
            log.warning(
                "%s: storage lacks files of %s after %.0f s, so it names an older checkpoint until the next start; see "
                "'rekindle ls --files'",
                self._place.target,
                tags,
                _ARRIVES,
            )
            self.give_up()  # destroy() has waited: the end of the process doesn't do so again

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                waiting = sorted(self._waiting.items(), reverse=True)
            for number, (tag, start) in waiting:
                if is_durable(self._root, tag, number, start) and self._write(number, tag):
                    break
            time.sleep(_LOOK_EVERY)

    def _write(self, number: int, tag: str) -> bool:
        """Writes ``latest``. Readers see the old file or the new one, never a part."""
        with self._changed:
            if number not in self._waiting:  # it is saved anew
                return False
        data = tag.encode()
        try:  # without the lock: storage may hang, and training must not
            self._place.write_stream(iter([memoryview(data)]), len(data))
        except OSError as error:
            problem = describe_error(error)
            if problem != self._problem:
                log.warning("%s: could not be written, and is tried again: %s", self._place.target, problem)
            self._problem = problem
            return False
        self._problem = ""
        with self._changed:
            self._waiting = {other: save for other, save in self._waiting.items() if other > number}
            self._changed.notify_all()
        return True
