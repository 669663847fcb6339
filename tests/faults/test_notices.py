"""Notices are heard while the main thread is inside of C code."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from rekindle.faults import notices as notices_module
from rekindle.faults.notices import Notices
from tests.faults.harness import wait_for


class Ear:
    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.event = threading.Event()

    def __call__(self, what: str, number: int) -> None:
        self.heard.append((what, number))
        self.event.set()


def test_a_signal_is_heard_while_the_main_thread_sleeps_in_c() -> None:
    ear, before = Ear(), signal.getsignal(signal.SIGUSR1)
    notices = Notices([signal.SIGUSR1], ear)
    lock = threading.Lock()
    lock.acquire()
    at: list[float] = []

    def shoot() -> None:
        time.sleep(0.1)
        at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGUSR1)
        if ear.event.wait(60):
            at.append(time.monotonic())

    thread = threading.Thread(target=shoot)
    thread.start()
    thread.join()
    notices.close()
    assert ear.heard == [("was sent SIGUSR1", signal.SIGUSR1)]
    assert len(at) == 2
    assert signal.getsignal(signal.SIGUSR1) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_file_and_a_question(tmp_path: Path) -> None:
    ear = Ear()
    notices = Notices([tmp_path / "go"], ear)
    (tmp_path / "go").touch()
    assert ear.event.wait(60) and "go" in ear.heard[0][0]
    notices.close()
    ear = Ear()

    def preempted() -> bool:
        return True

    notices = Notices([preempted], ear)
    assert ear.event.wait(60) and "preempted" in ear.heard[0][0]
    notices.close()


def test_a_question_that_fails_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices_module, "_ASK_EVERY", 0.01)
    asked, rounds = [], []

    def broken() -> bool:
        asked.append(1)
        raise RuntimeError("no")

    def sound() -> bool:
        rounds.append(1)
        return False

    notices = Notices([broken, sound], Ear())
    wait_for(lambda: len(rounds) > 3, what="several rounds of questions")
    notices.close()
    assert len(asked) == 1


def test_two_that_are_closed_in_the_order_of_their_beginning() -> None:
    """The second one goes on hearing when the first has ended, and gives back what was there before both."""
    first, second, before = Ear(), Ear(), signal.getsignal(signal.SIGWINCH)
    below, above = Notices([signal.SIGWINCH, signal.SIGCONT], first), Notices([signal.SIGWINCH], second)
    below.close()
    os.kill(os.getpid(), signal.SIGWINCH)
    assert second.event.wait(60) and not first.heard
    above.close()
    assert signal.getsignal(signal.SIGWINCH) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_descriptor_that_its_owner_has_closed_is_not_put_back() -> None:
    """Nor does a byte for it end what listens."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    ear, before = Ear(), signal.signal(signal.SIGUSR2, lambda *_: None)
    notices = Notices([signal.SIGUSR1], ear)
    os.close(write)
    os.close(read)
    for number in (signal.SIGUSR2, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    assert ear.event.wait(60)
    notices.close()
    signal.signal(signal.SIGUSR2, before)
    assert signal.set_wakeup_fd(-1) == -1
