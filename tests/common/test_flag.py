"""A flag, and what stands on it: an interrupt between any two instructions leaves nothing locked."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rekindle.common.flag import Flag
from rekindle.save.copy import _BatchQueue

SECONDS = 60.0


class Interrupt(BaseException):
    """Raised as by the handler of a signal."""


def in_time(work: Callable[[], Any]) -> Any:
    """Returns what ``work`` does, in a thread of its own: on a lock that was left it would wait for ever."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert found, "it waits for ever"
    return found[0]


def interrupt_at(number: int, work: Callable[[], object]) -> bool:
    """Does ``work``, and raises before its instruction of that ``number``. Returns False if it has fewer.

    In a thread of its own: what is raised at the beginning of an ``except`` stays the thread's current exception.
    """
    left = number

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if Path(frame.f_code.co_filename).name not in ("flag.py", "copy.py", "threading.py"):
            return None  # such as the callback of a weak reference, which swallows what it raises
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise Interrupt
        return trace

    def interrupted() -> bool:
        sys.settrace(trace)
        try:
            work()
            return False
        except Interrupt:
            return True
        finally:
            sys.settrace(None)

    return bool(in_time(interrupted))


def test_whoever_waits_is_woken() -> None:
    flag, woken = Flag(), []
    threads = [threading.Thread(target=lambda: woken.append(flag.wait(SECONDS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not flag.is_set() and not flag.wait(0.001)
    flag.set()
    for thread in threads:
        thread.join(SECONDS)
    assert woken == [True] * 4 and flag.wait()
    flag.clear()
    assert not flag.wait(0)


@pytest.mark.parametrize("method", ["set", "wait"])
def test_an_interrupted_flag_can_be_set_and_waited_for(method: str) -> None:
    number = 1
    while True:
        flag = Flag()
        if not interrupt_at(number, lambda flag=flag: flag.set() if method == "set" else flag.wait(0)):
            break
        in_time(flag.set)
        assert in_time(lambda flag=flag: flag.wait(SECONDS))
        number += 1
    assert number > 10


def test_an_interrupted_copy_is_seen_to_have_failed() -> None:
    """It once waited for ever, as the interrupt came while the end of the copy was being noted."""
    number = 1
    while True:
        queue = _BatchQueue(lambda batch: None, [None, None])  # type: ignore[list-item]
        if not interrupt_at(number, queue.help):
            break
        in_time(lambda queue=queue: queue.fail(ValueError("interrupted")))
        with pytest.raises(ValueError, match="interrupted"):
            in_time_raising(queue.wait)
        number += 1
    assert number > 50


def in_time_raising(work: Callable[[], object]) -> None:
    def caught() -> BaseException | str:
        try:
            work()
        except Exception as error:
            return error
        return "nothing was raised"

    found = in_time(caught)
    if isinstance(found, BaseException):
        raise found
    pytest.fail(found)
