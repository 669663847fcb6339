"""Ways to use, and to misuse, ``ckpt.guard()``: one process of its own for each rank, and real faults."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from rekindle.faults.hooks import HookCalls, Hooks
from rekindle.memory.job_dir import JobDir
from rekindle.session import session
from tests.faults.cluster import Cell, run, start
from tests.faults.matrix import judge
from tests.fork_server import context

_Work = Callable[["Trainer"], object]


class Trainer:
    """One process without a process group. Notes are what the test gets to see."""

    def __init__(self, root: Path, memory: Path, attempt: int, notes: Path) -> None:
        self.root, self.memory, self.attempt, self._notes = root, memory, attempt, notes

    def note(self, *what: object) -> None:
        with self._notes.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def begin(self, **options: Any) -> rekindle.Checkpointer:
        import torch

        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.seen = rekindle.Values(step=0)
        state = {"model": self.model, "optimizer": self.optimizer, "seen": self.seen}
        ckpt = rekindle.Checkpointer(self.root, state, **{"memory": self.memory, "snapshot_every": 10**9} | options)
        self.step = ckpt.restore()
        self.note("restored", self.step, self.seen.step, self.model.weight.sum().item())
        return ckpt

    def train(self, ckpt: rekindle.Checkpointer, steps: int, pause: float = 0.01) -> None:
        import torch

        for _ in range(steps):
            time.sleep(pause)
            self.model(torch.randn(4, 8)).sum().backward()
            self.optimizer.step()
            self.step += 1
            self.seen.step = self.step
            ckpt.step(self.step)
        self.note("trained", self.step, self.seen.step, self.model.weight.sum().item())


def _process(work: _Work, root: Path, memory: Path, attempt: int, notes: Path) -> None:
    os.dup2(os.open(notes.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    logging.basicConfig(level=logging.INFO, force=True, format="%(message)s")
    try:
        work(Trainer(root, memory, attempt, notes))
    except Exception:
        logging.exception("the trainer failed")
        os._exit(1)
    os._exit(0)


@pytest.fixture
def play(root: Path, memory: Path, tmp_path: Path) -> Callable[..., tuple[list[int | None], list[list[Any]], str]]:
    """Runs a trainer, several times if asked: exit codes, notes, log."""

    def play(work: _Work, starts: int = 1) -> tuple[list[int | None], list[list[Any]], str]:
        codes, notes = [], tmp_path / "notes"
        for attempt in range(starts):
            process = context.Process(target=_process, args=(work, root, memory, attempt, notes))
            process.start()
            process.join(120)
            if process.is_alive():
                process.kill()
                raise AssertionError(notes.with_suffix(".log").read_text())
            codes.append(process.exitcode)
        return (
            codes,
            [json.loads(line) for line in notes.read_text().splitlines()],
            notes.with_suffix(".log").read_text(),
        )

    return play


Play = Callable[..., tuple[list[int | None], list[list[Any]], str]]


# -- which step it is -----------------------------------------------------------------------------------------------


def _two_blocks(trainer: Trainer) -> None:
    ckpt = trainer.begin()
    if trainer.attempt == 0:
        guard = ckpt.guard()
        with guard:
            trainer.train(ckpt, 5)
        with guard:
            raise RuntimeError("before the second block's first step")


@pytest.mark.campaign(seconds=9)
def test_a_second_block_knows_what_step_it_is(play: Play) -> None:
    codes, notes, log = play(_two_blocks, 2)
    assert codes == [1, 0], log
    trained, restored = notes[1], notes[2]
    assert restored == ["restored", *trained[1:]] and restored[1] == 5


def _interrupted_between_update_and_step(trainer: Trainer) -> None:
    ckpt = trainer.begin(snapshot_every=1)
    with ckpt.guard(on_stop=lambda fault: trainer.note(fault.what)):
        trainer.train(ckpt, 3)
        trainer.model(trainer.model.weight).sum().backward()
        trainer.optimizer.step()
        raise KeyboardInterrupt


def test_an_interrupt_before_the_step_is_told_names_the_step_that_the_next_start_goes_on_from(play: Play) -> None:
    codes, notes, log = play(_interrupted_between_update_and_step)
    assert codes == [1], log
    assert "was past step 3, between the beginning of an update and its ckpt.step()" in log
    assert "step 3 secured in memory, " in log
    assert notes[-1] == ["rank 0 raised KeyboardInterrupt"]


@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        ("kill", "before-step"),
        pytest.param("exception", "update-second", marks=pytest.mark.campaign(seconds=8)),
        pytest.param("loop", "before-step", marks=pytest.mark.campaign(seconds=8)),
    ],
)
def test_a_fault_in_the_last_step_when_the_others_are_through(
    fault: str, moment: str, root: Path, memory: Path, unbroken_cell: Callable[[Path, str, int], list[str]]
) -> None:
    """Those that have ended well have left their last step in memory: with the other's small state it is whole."""
    out = run(Cell(root, memory, "bare", fault, moment, at=14, pause=0.01))
    assert out.reached == 13 and judge(out, unbroken_cell(memory, "bare", 2)) == []


def _changed(trainer: Trainer) -> None:
    import torch

    ckpt = trainer.begin(snapshot_every=1)
    if trainer.attempt == 0:
        with ckpt.guard():
            trainer.train(ckpt, 5)
            with torch.no_grad():
                trainer.model.weight.add_(1.0)  # nobody has been told
            raise RuntimeError("a fault")


def test_a_state_that_was_changed_behind_our_back_is_not_secured(play: Play) -> None:
    codes, notes, log = play(_changed, 2)
    assert codes == [1, 0] and notes[-1][1:3] in ([5, 5], [4, 4]), log
    if notes[-1][1] == 5:  # it was in memory before the change
        assert notes[-1] == ["restored", *notes[-2][1:]]


def _changed_unsaved(trainer: Trainer) -> None:
    import torch

    ckpt = trainer.begin()
    if trainer.attempt == 0:
        with ckpt.guard():
            trainer.train(ckpt, 5)
            with torch.no_grad():
                trainer.model.weight.add_(1.0)
            raise RuntimeError("a fault")


def test_nor_one_that_no_snapshot_was_taken_of(play: Play) -> None:
    codes, notes, log = play(_changed_unsaved, 2)
    assert codes == [1, 0] and notes[-1][1] == 0
    assert "model.weight has been changed since the end of step 5" in log


def _told_late(trainer: Trainer) -> None:
    ckpt = trainer.begin()

    def save_more(step: int) -> None:
        time.sleep(1.0)
        trainer.note("saved more", step)

    with ckpt.guard(gasp_deadline=60.0, on_gasp=save_more) as guard:
        trainer.train(ckpt, 5)
        long_ago = time.monotonic() - 1000.0
        fault = rekindle.Fault("signal", 7, guard._generation, 5, "rank 7 was killed by SIGKILL", noticed=long_ago)
        guard._hear({"fault": fault.to_json()})
        threading.Event().wait()


def test_a_rank_that_is_told_late_of_a_fault_elsewhere_has_all_its_time_to_secure_the_step(play: Play) -> None:
    codes, notes, log = play(_told_late)
    assert codes == [75] and "step 5 secured in memory" in log and notes[-1] == ["saved more", 5], log


# -- what is no fault -----------------------------------------------------------------------------------------------


def _slow_storage(trainer: Trainer) -> None:
    ckpt = trainer.begin(drain_limit=1000)
    with ckpt.guard(watchdog="fast") as guard:
        assert guard.connected(30)
        trainer.train(ckpt, 5)
        ckpt.save(5, wait="durable")
        trainer.train(ckpt, 1)
        ckpt.close()


def test_waiting_for_storage_is_no_hang(play: Play, job: JobDir) -> None:
    began = time.monotonic()
    codes, _, log = play(_slow_storage)
    assert codes == [0], log
    assert time.monotonic() - began > 4, "storage was not slow enough to show anything"


def _slow_end(trainer: Trainer) -> None:
    def wait(job: JobDir) -> None:
        with job.locked():  # so that the agent can't end
            time.sleep(3.0)

    session.wait_for_agent = wait  # type: ignore[attr-defined]
    ckpt = trainer.begin()
    with ckpt.guard(watchdog="fast") as guard:
        assert guard.connected(30)
        trainer.train(ckpt, 5)
        ckpt.save(5, wait="durable")
        ckpt.close()


def test_waiting_for_the_agent_to_end_is_no_hang(play: Play, job: JobDir) -> None:
    codes, _, log = play(_slow_end)
    assert codes == [0], log


def _fork(trainer: Trainer) -> None:
    ckpt = trainer.begin()
    with ckpt.guard():
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        trainer.train(ckpt, 5)
        os.kill(child, signal.SIGTERM)
        trainer.note("child", os.waitpid(child, 0)[1])
        trainer.train(ckpt, 50)
        if os.fork() == 0:
            raise SystemExit(3)  # through our own guard
        os.wait()
        trainer.note("goes on")


def test_a_forked_child_has_signals_and_an_end_of_its_own(play: Play, job: JobDir) -> None:
    codes, notes, log = play(_fork)
    assert codes == [0], log
    assert ["child", signal.SIGTERM] in notes and notes[-1] == ["goes on"] and not job.paths.fault.exists()


def _unsupported(trainer: Trainer) -> None:
    ckpt = trainer.begin()
    with ckpt.guard():
        trainer.train(ckpt, 2)
        trainer.seen.__dict__["odd"] = object()
        trainer.train(ckpt, 2)
        del trainer.seen.__dict__["odd"]
        trainer.train(ckpt, 2)


def test_what_can_not_be_put_aside_does_not_stop_training(play: Play) -> None:
    codes, notes, log = play(_unsupported)
    assert codes == [0] and notes[-1][1] == 6
    assert log.count("can't be secured if a rank fails") == 1 and log.count("can be secured again") == 1


def _again(trainer: Trainer) -> None:
    ckpt = trainer.begin()
    for number in range(2):
        try:
            with ckpt.guard() as guard:
                assert guard.connected(30)
                trainer.train(ckpt, 150 if number else 5)
                if number == 0:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            trainer.note("caught")
    ckpt.close()


def test_guard_again_after_what_was_caught(play: Play) -> None:
    codes, notes, log = play(_again)
    assert codes == [0] and notes[-1][:2] == ["trained", 155], log


# -- what must not be in the way ------------------------------------------------------------------------------------


def _long_words(trainer: Trainer) -> None:
    ckpt = trainer.begin()
    with ckpt.guard() as guard:
        assert guard.connected(30)
        trainer.train(ckpt, 5)
        raise RuntimeError("x" * 200_000 + "\nsecond line")


def test_a_very_long_exception_is_told_in_short(play: Play, job: JobDir) -> None:
    codes, _, log = play(_long_words)
    assert codes == [1]
    fault = json.loads(job.paths.fault.read_bytes())
    assert fault["cause"] == "exception" and fault["rank"] == 0 and len(fault["what"]) < 1000, log


def _hooks(trainer: Trainer) -> None:
    ckpt = trainer.begin()

    def slowly(name: str) -> Callable[[object], None]:
        def hook(_: object) -> None:
            trainer.note(name)
            time.sleep(1.5)
            raise SystemExit(5)

        return hook

    if trainer.attempt == 0:
        hooks = {name: slowly(name) for name in ("on_stop", "on_clean", "on_gasp", "on_exit")}
        with ckpt.guard(**hooks) as guard:
            assert guard.connected(30)
            trainer.train(ckpt, 5)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)


@pytest.mark.campaign(seconds=7)
def test_hooks_may_take_their_time_and_fail(play: Play) -> None:
    codes, notes, log = play(_hooks, 2)
    assert codes == [128 + signal.SIGTERM, 0], log
    assert [note[0] for note in notes[2:]] == ["on_stop", "on_clean", "on_gasp", "on_exit", "restored"]
    assert notes[-1][1] == 5


def _hanging_hooks(trainer: Trainer) -> None:
    ckpt = trainer.begin()

    def hang(_: object) -> None:
        threading.Event().wait()

    if trainer.attempt == 0:
        hooks = dict.fromkeys(("on_stop", "on_clean", "on_gasp", "on_exit"), hang)
        with ckpt.guard(gasp_deadline=12.0, **hooks):
            trainer.train(ckpt, 5)
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()


@pytest.mark.campaign(seconds=12)
def test_hooks_that_hang_are_left_behind(play: Play) -> None:
    codes, notes, log = play(_hanging_hooks, 2)
    assert codes == [128 + signal.SIGTERM, 0], log
    assert notes[-1][:2] == ["restored", 5], log
    for name in ("on_stop", "on_clean", "on_gasp"):
        assert re.search(rf"{name} has not returned within [\d.]+ s and is left behind", log), log


def _curious_hooks(trainer: Trainer) -> None:
    ckpt = trainer.begin(snapshot_every=3)

    def clean(step: int, *, fault: rekindle.Fault) -> bool:
        trainer.note("on_clean", step, fault.cause)
        return False

    if trainer.attempt == 0:
        with ckpt.guard(on_clean=clean, on_gasp=lambda step: trainer.note("on_gasp", step)):
            trainer.train(ckpt, 5)
            raise RuntimeError("a fault")


def test_a_state_that_can_not_be_read_leaves_the_newest_snapshot(play: Play) -> None:
    codes, notes, log = play(_curious_hooks, 2)
    assert codes == [1, 0], log
    assert [note for note in notes if note[0].startswith("on_")] == [["on_clean", 5, "exception"]], log
    assert notes[-1][:2] == ["restored", 3] and "on_clean says that step 5's state can't be read" in log


@pytest.mark.parametrize(
    ("hook", "told"),
    [
        (lambda step: step, 5),
        (lambda step, again=0: (step, again), (5, 0)),
        (lambda *steps: steps, (5,)),
        (lambda step, fault: (step, fault.cause), (5, "loss")),
        (lambda step, fault=None: (step, fault.cause), (5, "loss")),
        (int, 5),
    ],
)
def test_the_fault_is_told_to_those_who_ask_for_it(hook: Callable[..., object], told: object) -> None:
    answers = []
    hooks = Hooks(on_clean=lambda step, fault: 1 / 0, on_gasp=hook)
    calls = HookCalls(hooks, rekindle.Fault("loss", 0, 1, 5, "what"), time.monotonic() + 600, [])
    answers.append(calls._call_with_step("on_gasp", 5))
    assert calls.clean(5) and answers == [told]


class _Ambiguous:
    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")


@pytest.mark.parametrize(
    ("answer", "clean"),
    [
        (None, True),
        (True, True),
        (1, True),
        (_Ambiguous(), True),
        (False, False),
        (0, False),
        (np.bool_(False), False),
        (np.bool_(True), True),
    ],
)
def test_an_answer_that_counts_as_false_keeps_the_state_from_being_read(answer: object, clean: bool) -> None:
    fault = rekindle.Fault("loss", 0, 1, 5, "what")
    calls = HookCalls(Hooks(on_clean=lambda step: answer), fault, time.monotonic() + 600, [])
    assert calls.clean(5) is clean


def _stuck_hook(trainer: Trainer) -> None:
    ckpt = trainer.begin()
    with ckpt.guard(gasp_deadline=2.0, on_exit=lambda _: time.sleep(60)):
        trainer.train(ckpt, 5)
        raise RuntimeError("a fault")


def test_the_deadline_holds_for_the_one_who_raises(play: Play) -> None:
    began = time.monotonic()
    codes, _, log = play(_stuck_hook)
    assert codes == [1] and re.search(r"step 5 secured in memory, [01]\.", log)
    assert time.monotonic() - began < 50, "the hook takes a minute"


def _question(trainer: Trainer) -> None:
    ckpt = trainer.begin()
    long_name = "x" * 5000

    def never() -> bool:
        time.sleep(600)
        return False

    with ckpt.guard(notices=(signal.SIGTERM, long_name, never), watchdog=False):
        trainer.train(ckpt, 5)
        time.sleep(1.5)  # the question has been asked
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)


def test_a_question_that_is_never_answered_does_not_keep_a_signal_waiting(play: Play) -> None:
    codes, _, log = play(_question)
    assert codes == [128 + signal.SIGTERM], log


def _no_such_notice(trainer: Trainer) -> None:
    ckpt = trainer.begin()
    mine = signal.signal(signal.SIGTERM, lambda *_: None)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(rekindle.UsageError, match="signal 9 can't be taken"):
        ckpt.guard(notices=(signal.SIGTERM, signal.SIGKILL)).__enter__()
    trainer.note(signal.getsignal(signal.SIGTERM) is before, str(mine))


def test_a_signal_that_nobody_can_take(play: Play) -> None:
    codes, notes, log = play(_no_such_notice)
    assert codes == [0] and notes[-1][0] is True, log


def test_a_damaged_plan_of_one_rank_leaves_the_others_alone(root: Path, memory: Path, job: JobDir) -> None:
    cell = Cell(root, memory, "ddp", "kill", "update-first")
    assert 0 not in start(cell, 0, time.monotonic() + 60)
    job.paths.local_state_plan(0).write_bytes(b"garbage")
    assert start(cell, 1, time.monotonic() + 60) == [0, 0]


def _killed_twice(trainer: Trainer) -> None:
    ckpt = trainer.begin(snapshot_every=1)
    with ckpt.guard() as guard:
        assert guard.connected(30)
        if trainer.attempt == 0:
            trainer.train(ckpt, 5)
        if trainer.attempt < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.train(ckpt, 100)


def test_a_fault_of_an_earlier_start_is_not_told_again(play: Play) -> None:
    """The second start dies before its first snapshot, so the third has its number; one agent has lived through all."""
    codes, notes, log = play(_killed_twice, 3)
    assert codes == [-9, -9, 0] and notes[-1][1] >= 104, log
