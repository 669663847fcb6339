"""Defects of the original, each test named after one, and numbered as in docs/mindio_ttp.md, which names others too."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.provide.mindio_ttp import controller_ttp, dump, mindx
from rekindle.provide.mindio_ttp import framework_ttp as ttp
from rekindle.provide.mindio_ttp.board import Board
from rekindle.provide.mindio_ttp.callbacks import Callbacks
from rekindle.provide.mindio_ttp.dump import Dump, Result
from rekindle.provide.mindio_ttp.replicas import Group, groups_to_json
from tests.provide.mindio_ttp.test_calls import start
from tests.provide.ranks import run_ranks

BOUND = 60.0
"""Seconds for what takes none on a machine that has nothing else to do."""
COPIES, SHARDS = Group(0, (0, 1), 2), Group(0, (0, 1), 1)
"""Two ranks that hold the same; two ranks that hold a shard each."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Board.make(tmp_path / "dumps", "here")
    return tmp_path / "dumps" / "here"


def member(
    folder: Path,
    rank: int,
    group: Group,
    save: Callable[..., object],
    rename: Callable[..., object],
    limit: float = BOUND,
) -> Dump:
    """Returns a rank's part in a dump. Its training stands still at step 7."""
    called = Callbacks()
    called.register("save_ckpt", save)
    called.register("rename", rename)
    board = Board(folder, rank)
    board.tell(f"groups-{rank}", groups_to_json([group]))
    still = threading.Event()
    still.set()
    return Dump(board, rank, 2, called, 7, lambda step: None, still, ExitStack, time.monotonic() + limit)


STAND = """
import sys, time
from pathlib import Path
from rekindle.provide.mindio_ttp.board import Board
board = Board(Path(sys.argv[1]), 0)
board.tell("state-0", {"step": 7})
board.tell("standing", {})
time.sleep(1000)
"""


@contextmanager
def another_rank(folder: Path) -> Iterator[Callable[[], None]]:
    """Lets a process be rank 0, which stands at step 7 and writes nothing. Yields what kills it."""
    process = subprocess.Popen([sys.executable, "-c", STAND, str(folder)])

    def kill() -> None:
        process.kill()
        process.wait()

    try:
        wait_for(lambda: (folder / "standing.json").exists())
        yield kill
    finally:
        kill()


def wait_for(happens: Callable[[], bool]) -> None:
    until = time.monotonic() + BOUND
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.001)


def train_until(error: BaseException | None, steps: int = 2) -> None:
    """Trains, and fails by ``error``, or by a real SIGINT."""

    @ttp.tft_exception_handler
    def train() -> None:
        for step in range(1, steps + 1):
            ttp.tft_start_updating_os()
            ttp.tft_end_updating_os(step)
        if error is not None:
            raise error
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(BOUND)

    train()


def test_03_a_jump_of_the_clock_makes_ranks_look_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is that since the machine has started: years to and fro change nothing."""
    years = count(1)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(years) * 10 * 365 * 86400)
    start()
    ttp.tft_register_save_ckpt_handler(lambda *any: None)
    with pytest.raises(ValueError, match="a fault"):
        train_until(ValueError("a fault"))
    assert ttp.tft_get_repair_step() == 2 and next(years) > 1


def test_04_milliseconds_are_taken_for_seconds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that lives and says nothing is waited for, for seconds, and does without."""
    monkeypatch.setattr(dump, "_OTHERS", 0.1)
    silent = Board(folder, 0)
    assert member(folder, 1, COPIES, print, print).run(()) == Result(7) and silent.alive(0)


def test_05_who_waits_gives_up_before_who_saves(folder: Path) -> None:
    """One bound is that of all: a part that comes after it gets no name, and the log says why."""
    saves, saved, named = threading.Event(), threading.Event(), []

    def save(*any: Any) -> None:
        saves.wait(BOUND)
        saved.set()

    late = member(folder, 0, Group(0, (0,), 1), save, lambda *words: named.append(words), limit=0.2)
    late.world = 1
    result = late.run(())
    assert result.step == 0 and "had not written their parts in time" in result.error
    saves.set()
    assert saved.wait(BOUND)
    assert not named and late.board.read("rename") is None


def test_06_one_rank_writes_what_all_hold(folder: Path) -> None:
    """Each holder of a shard writes its own, and the name comes after both."""
    told: list[tuple[str, Any]] = []
    info = [{"type": 0, "ranks": [0, 1]}]

    def part(rank: int) -> Dump:
        return member(
            *(folder, rank, SHARDS, lambda step, found, args, ctx: told.append((f"save by {rank}", found))),
            lambda step, args: told.append(("rename", step)),
        )

    parts = [part(rank) for rank in range(2)]
    results: list[Result] = []
    threads = [threading.Thread(target=lambda one=one: results.append(one.run(()))) for one in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    assert results == [Result(7), Result(7)]
    assert sorted(told[:2]) == [("save by 0", info), ("save by 1", info)] and told[2:] == [("rename", 7)]


def test_11_12_the_death_of_the_process_that_leads_takes_the_dump_along(folder: Path) -> None:
    """Rank 0 has got SIGKILL. No process group and no store is there: none is needed."""
    told: list[str] = []
    with another_rank(folder) as kill:
        kill()
        survivor = member(folder, 1, COPIES, lambda *any: told.append("save"), lambda *any: told.append("rename"))
        assert survivor.run(()) == Result(7)
    assert told == ["save", "rename"]


@pytest.mark.parametrize("error", [None, SystemExit(3), torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_14_a_fault_has_to_have_known_words(error: BaseException | None) -> None:
    """Whatever ends the training dumps, and is raised on: SIGINT, too, which the original swallows."""
    start()
    saved: list[int] = []
    ttp.tft_register_save_ckpt_handler(lambda step, *any: saved.append(step))
    with pytest.raises(KeyboardInterrupt if error is None else type(error)):
        train_until(error)
    assert saved == [2] == [ttp.tft_get_repair_step()]


def test_15_a_second_death_in_the_dump_loses_it(folder: Path) -> None:
    """Rank 0 is to write, and gets SIGKILL. Rank 1 holds the same."""
    told: list[Any] = []
    with another_rank(folder) as kill:
        survivor = member(
            *(folder, 1, COPIES, lambda step, info, *any: told.append(info[0]["ranks"])),
            lambda step, args: told.append("rename"),
        )
        results: list[Result] = []
        thread = threading.Thread(target=lambda: results.append(survivor.run(())))
        thread.start()
        wait_for(lambda: survivor.board.read("plan-1") is not None)
        assert survivor.board.read("plan-1")["groups"] == [[0, [0]]]
        kill()
        thread.join(BOUND)
    assert results == [Result(7)] and told == [[1], "rename"]


@pytest.mark.parametrize("silent", [False, True])
def test_16_an_orchestrator_that_does_not_answer_ends_the_job_without_a_dump(
    silent: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if silent:
        monkeypatch.setattr(mindx, "_PATIENCE", 0.1)
    start()
    over, told = threading.Event(), []

    def fail(*any: Any) -> None:
        told.append("asked")
        if silent:
            over.wait(BOUND)
        raise ConnectionError("no orchestrator")

    for action in mindx.ACTIONS:
        controller_ttp.tft_register_mindx_callback(action, fail)
    ttp.tft_register_save_ckpt_handler(lambda *any: told.append("save"))
    with pytest.raises(ValueError, match="a fault"):
        train_until(ValueError("a fault"))
    over.set()
    assert "save" in told and ttp.tft_get_repair_step() == 2
    assert ("has not returned" if silent else "no orchestrator") in caplog.text


@pytest.mark.campaign(seconds=6)
def test_17_each_update_waits_for_all_ranks(tmp_path: Path, memory: Path) -> None:
    """Rank 0 makes all of its updates before rank 1 makes its first."""
    codes = run_ranks(_update, tmp_path, [memory, memory], tmp_path / "done")
    assert codes == [0, 0]


def _update(rank: int, done: Path) -> None:
    ttp.tft_init_processor(rank, 2, False, False)
    ttp.tft_start_processor("127.0.0.1", 8000)
    ttp.tft_set_optimizer_replica(rank, [{"rank_list": [0, 1], "replica_cnt": 2, "replica_shift": 0}])

    @ttp.tft_exception_handler
    def train() -> None:
        if rank == 1:
            wait_for(done.exists)
        for step in range(1, 101):
            ttp.tft_start_updating_os()
            ttp.tft_end_updating_os(step)
        done.touch()

    train()


def test_19_a_port_takes_messages_from_whoever_sends_them() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ttp.tft_init_controller(0, 1, False)
    ttp.tft_start_controller("127.0.0.1", port, False)
    ttp.tft_init_processor(0, 1, False, False)
    ttp.tft_start_processor("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), BOUND)


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os._exit, (9,)


def test_19_a_message_can_be_code(folder: Path) -> None:
    """What ranks tell each other is JSON: a pickle runs nothing, and gives no name to anything."""
    (folder / "state-0.json").write_bytes(pickle.dumps(Evil()))
    result = member(folder, 1, COPIES, print, print).run(())
    assert result.step == 0 and result.error
