"""Holds up the thread that makes memory, as a machine does that is slow or large."""

from __future__ import annotations

import threading

from rekindle.memory import pages


class Gate:
    """Stands before each piece of memory that the background thread is about to make."""

    def __init__(self) -> None:
        self.open, self.asked = threading.Event(), threading.Event()
        self._make_one = pages._Making.make_one

    def make_one(self, making: pages._Making) -> bool:
        if threading.current_thread().name == "rekindle-memory":
            self.asked.set()
            assert self.open.wait(60.0)
        return self._make_one(making)
