"""A process that has no thread or no descriptor left secures its state all the same: that may be the very fault."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time

import pytest

from rekindle.faults.spares import SpareDescriptors
from tests.faults.test_guard import Play, Trainer, play

__all__ = ["play"]

_HOOKS = ("on_stop", "on_gasp", "on_exit")


def _start_no_more() -> None:
    """Let this process start no thread from here on, as one that has reached a limit of its container."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse  # type: ignore[method-assign]


def _out_of_threads(trainer: Trainer, *, signalled: bool) -> None:
    ckpt = trainer.begin()
    if trainer.attempt == 0:
        hooks = {name: lambda _, name=name: trainer.note(name) for name in _HOOKS}
        with ckpt.guard(watchdog=False, **hooks) as guard:
            assert guard.connected(60)
            trainer.train(ckpt, 5)
            _start_no_more()
            if signalled:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            threading.Thread(target=print).start()


def _raises_without_threads(trainer: Trainer) -> None:
    _out_of_threads(trainer, signalled=False)


def _is_told_without_threads(trainer: Trainer) -> None:
    _out_of_threads(trainer, signalled=True)


@pytest.mark.parametrize(
    ("work", "code"), [(_raises_without_threads, 1), (_is_told_without_threads, 128 + signal.SIGTERM)]
)
def test_a_process_that_can_start_no_thread_is_secured(play: Play, work: object, code: int) -> None:
    codes, notes, log = play(work, 2)
    assert codes == [code, 0], log
    assert [note[0] for note in notes[2:]] == [*_HOOKS, "restored"], log
    assert notes[-1][1] == 5, log


def _hangs_without_threads(trainer: Trainer) -> None:
    ckpt = trainer.begin()
    with ckpt.guard(watchdog=False, gasp_deadline=3.0, on_exit=lambda _: threading.Event().wait()):
        trainer.train(ckpt, 5)
        _start_no_more()
        raise RuntimeError("a fault")


def test_the_deadline_needs_no_new_thread(play: Play) -> None:
    codes, _, log = play(_hangs_without_threads)
    assert codes == [1] and "step 5 secured" in log


def _out_of_descriptors(trainer: Trainer) -> None:
    ckpt = trainer.begin()
    if trainer.attempt == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        with ckpt.guard(watchdog=False) as guard:
            assert guard.connected(60)
            trainer.train(ckpt, 5)
            taken = []
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))


def test_a_process_that_can_open_nothing_is_secured(play: Play) -> None:
    """As when a DataLoader passes tensors by descriptors, and they are kept."""
    codes, notes, log = play(_out_of_descriptors, 2)
    assert codes == [1, 0] and notes[-1][:2] == ["restored", 5], log
    assert "Too many open files" in log


def test_spare_descriptors_are_given_up_once() -> None:
    spares = SpareDescriptors()
    held = list(spares._held)
    assert len(held) == 16 and all(os.get_inheritable(one) is False for one in held)
    spares.give_up()
    other = os.open(os.devnull, os.O_RDONLY)
    assert other in held, "the number is another file's now"
    spares.give_up()
    os.close(other)


def test_a_process_that_has_few_descriptors_left_holds_what_it_gets() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken, opened = [], len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], opened + 200), before[1]))
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        os.close(taken.pop())
        spares = SpareDescriptors()
        assert len(spares._held) == 1
        spares.give_up()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in taken:
            os.close(one)


def _has_nothing(trainer: Trainer) -> None:
    ckpt = trainer.begin()
    if trainer.attempt == 0:
        with ckpt.guard(watchdog=False, on_clean=lambda step: False):
            trainer.train(ckpt, 5)
            raise RuntimeError("a fault")


def test_a_checkpoint_is_not_promised_where_there_may_be_none(play: Play) -> None:
    codes, notes, log = play(_has_nothing, 2)
    assert codes == [1, 0] and notes[-1][:2] == ["restored", 0], log
    assert "goes on from the newest checkpoint on storage, or anew if there is none" in log
