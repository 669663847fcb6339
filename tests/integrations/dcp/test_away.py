"""Storage that is away at a restart, another job on the same root, a forked child: nobody's checkpoints are lost."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from rekindle.errors import NotDurableError, NotFoundError
from rekindle.format.names import MANIFEST, step_dir
from rekindle.integrations.dcp import RekindleReader, RekindleWriter
from rekindle.memory.job_dir import JobDir, memory_base
from tests.conftest import Disk
from tests.faults.harness import wait_for
from tests.integrations.dcp.ranks import attempt, ranks
from tests.stored import steps_on
from tests.unreadable import unreadable

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

MIB = 1 << 20


def save(root: Path, step: int, mib: int, **more: Any) -> RekindleWriter:
    writer = RekindleWriter(root, **more)
    dcp.save({"x": torch.full((mib * MIB // 4,), float(step))}, storage_writer=writer, checkpoint_id=step)
    return writer


def load(root: Path, mib: int, memory: Path, **more: Any) -> float:
    found = {"x": torch.zeros(mib * MIB // 4)}
    dcp.load(found, storage_reader=RekindleReader(root, memory=memory), **more)
    return float(found["x"][0])


def failure(error: CheckpointException) -> BaseException:
    """What the only rank has failed with."""
    ((failed, _),) = error.failures.values()
    return failed


def outgrow(rank: int, root: Path, memory: Path) -> None:
    """Memory has step 4 last; steps 7 and 8 find no room there and go straight to storage. Then the rank is killed."""
    save(root, 4, 1, memory=memory)
    for step in (7, 8):
        save(root, step, 8, memory=memory)
    agent = JobDir.of(root, memory_base(memory)).agent()
    if agent is not None:
        os.kill(agent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def outgrown(disk: Disk, small_tmpfs: Callable[[int], Path]) -> Path:
    """The memory store of a job that has been killed, and the disk of its root has been unmounted."""
    memory = small_tmpfs(6 * MIB)
    _, codes = attempt(1, outgrow, disk.root, memory)
    assert codes == [-signal.SIGKILL] and steps_on(disk.root) == [4, 7, 8]
    disk.unmount()
    return memory


def load_or_why(rank: int, root: Path, memory: Path, mib: int, **more: Any) -> float | str:
    try:
        return load(root, mib, memory, **more)
    except CheckpointException as error:
        assert isinstance(failure(error), NotFoundError)
        return str(failure(error))


def save_or_why(rank: int, root: Path, memory: Path) -> str:
    try:
        save(root, 9, 1, memory=memory)
    except CheckpointException as error:
        assert isinstance(failure(error), NotFoundError)
        return str(failure(error))
    finally:
        RekindleWriter(root, memory=memory).close()  # leaves the next start what it needs to know
    return "an older checkpoint was gone on from"


def test_what_storage_has_is_not_left_behind_while_it_is_away(disk: Disk, outgrown: Path) -> None:
    root = disk.root
    why = f"step 8 was on storage, and {root} shows nothing of it now: see that it is mounted"
    for _ in range(2):
        for refused in (ranks(1, load_or_why, root, outgrown, 1), ranks(1, save_or_why, root, outgrown)):
            assert refused[0].startswith(why) and "load it by checkpoint_id=4" in refused[0]
    assert not root.exists(), "nothing was written below the mount point"
    disk.mount()
    assert load(root, 8, outgrown) == 8.0
    save(root, 9, 1, memory=outgrown).close()
    assert steps_on(root) == [4, 7, 8, 9]


def go_on(rank: int, root: Path, memory: Path) -> None:
    assert load(root, 1, memory, checkpoint_id=4) == 4.0
    save(root, 5, 1, memory=memory).close()


def test_going_on_from_what_is_in_memory_on_purpose(disk: Disk, outgrown: Path) -> None:
    ranks(1, go_on, disk.root, outgrown)
    assert steps_on(disk.root)[-1] == 5
    assert ranks(1, load_or_why, disk.root, outgrown, 1) == [5.0], "the old note is forgotten"


def settle_in_memory(rank: int, root: Path, memory: Path) -> None:
    """Steps 1 to 3 are in memory, and on storage. Then the rank is killed, and its agent."""
    for step in (1, 2, 3):
        writer = save(root, step, 1, memory=memory)
    writer._session.wait_durable(writer._session._newest, 30.0)
    job = JobDir.of(root, memory_base(memory))
    wait_for(lambda: job.notes.durable() == 3)
    if agent := job.agent():
        os.kill(agent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def save_four(rank: int, root: Path, memory: Path, keep: int | None, named: bool) -> str:
    """A new start that goes on from step 3: by name, or as the newest there is."""
    assert load(root, 1, memory, **({"checkpoint_id": 3} if named else {})) == 3.0
    try:
        save(root, 4, 1, memory=memory, keep=keep).close(60.0 if named else 2.0)
    except CheckpointException as error:
        return str(failure(error))
    except NotDurableError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("keep", [None, 2])
def test_a_root_that_is_not_mounted_is_begun_anew_only_on_purpose(disk: Disk, memory: Path, keep: int | None) -> None:
    root = disk.root
    _, codes = attempt(1, settle_in_memory, root, memory)
    assert codes == [-signal.SIGKILL] and steps_on(root) == [1, 2, 3]
    disk.unmount()
    (why,) = ranks(1, save_four, root, memory, keep, False)
    assert "step 3 was" in why and "see that it is mounted" in why and not root.exists()
    assert ranks(1, save_four, root, memory, keep, True) == ["saved"]
    assert steps_on(root)[-1] == 4


def begin_anew(rank: int, root: Path, memory: Path) -> str:
    """What a load of the newest is told. Then save without one, as a first start does."""
    why = str(load_or_why(rank, root, memory, 1))
    writer = RekindleWriter(root, memory=memory)
    dcp.save({"x": torch.full((4,), 7.0)}, storage_writer=writer)
    writer.close()
    return why


def test_a_root_that_was_deleted_is_begun_anew(root: Path, memory: Path) -> None:
    _, codes = attempt(1, settle_in_memory, root, memory)
    assert codes == [-signal.SIGKILL] and steps_on(root) == [1, 2, 3]
    shutil.rmtree(root)
    (why,) = ranks(1, begin_anew, root, memory)
    assert f"the checkpoints in {root} were deleted; memory still has steps" in why
    assert steps_on(root) == [1]


def begin_anew_until_killed(rank: int, root: Path, memory: Path) -> None:
    save(root, 5, 1, memory=memory)
    if agent := JobDir.of(root, memory_base(memory)).agent():
        os.kill(agent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def go_on_from(rank: int, root: Path, memory: Path, step: int) -> float:
    assert load(root, 1, memory, checkpoint_id=step) == step
    save(root, 6, 1, memory=memory).close()
    return load(root, 1, memory)


@pytest.mark.parametrize("chosen", [3, 5])
def test_a_run_that_is_back_is_not_superseded_unasked(root: Path, memory: Path, chosen: int) -> None:
    """Its checkpoints were moved away, so that the job began anew, and then moved back."""
    attempt(1, settle_in_memory, root, memory)
    moved = root.rename(root.with_name("moved"))
    attempt(1, begin_anew_until_killed, root, memory)
    shutil.rmtree(root, ignore_errors=True)
    moved.rename(root)
    for (refused,) in (ranks(1, load_or_why, root, memory, 1), ranks(1, save_or_why, root, memory)):
        assert "say which of the two runs counts" in refused
        assert "load it by checkpoint_id=3" in refused and "load it by checkpoint_id=5" in refused
    assert ranks(1, go_on_from, root, memory, chosen) == [6.0]


def test_a_root_that_is_emptied_before_each_save_costs_no_wait(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As code does that has one directory for its newest checkpoint, and torch's own tests of sharding."""
    monkeypatch.setattr("rekindle.integrations.dcp.session._PATIENCE", 20.0)
    job = JobDir.of(root, memory_base(memory))
    for step in range(1, 5):
        if step % 2 == 0:
            wait_for(lambda last=step - 1: (job.notes.durable() or 0) >= last)  # else it may be under way there
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(exist_ok=True)  # the agent may be writing there
        save(root, step, 1, memory=memory)
        assert load(root, 1, memory) == step
    RekindleWriter(root, memory=memory).close()
    assert 4 in steps_on(root)


def save_beside(rank: int, root: Path, memory: Path) -> None:
    save(root, 20, 8, memory=memory)


def test_another_job_on_the_same_root_is_told_of_where_nothing_else_shows_it(
    root: Path, small_tmpfs: Callable[[int], Path]
) -> None:
    ours, theirs = small_tmpfs(6 * MIB), small_tmpfs(6 * MIB)
    save(root, 1, 8, memory=ours)  # too large for either memory
    ranks(1, save_beside, root, theirs)
    with pytest.raises(CheckpointException) as caught:
        save(root, 21, 8, memory=ours)
    assert isinstance(failure(caught.value), FileExistsError)
    assert "another start of this job, generation 2, writes there" in str(failure(caught.value))
    assert steps_on(root) == [1, 20]


def test_nobody_goes_on_behind_what_cant_be_read(memory: Path, root: Path) -> None:
    for step in (1, 2, 3):
        save(root, step, 1, memory=memory).close()
    elsewhere = memory / "elsewhere"
    with unreadable(root / step_dir(3) / MANIFEST):
        for ask in (lambda: load(root, 1, elsewhere), lambda: save(root, 4, 1, memory=elsewhere)):
            with pytest.raises(CheckpointException) as caught:
                ask()
            assert "step 3 is on storage, and can't be read" in str(failure(caught.value))
        assert load(root, 1, elsewhere, checkpoint_id=2) == 2.0
    with unreadable(root / step_dir(1) / MANIFEST):
        assert load(root, 1, elsewhere) == 3.0


def refused_in_a_child(writer: RekindleWriter, root: Path) -> set[str]:
    """How saves fail with the parent's writer, and with one of its own."""
    found = set()
    for one in (writer, RekindleWriter(root)):
        try:
            dcp.save({"x": torch.zeros(4)}, storage_writer=one, no_dist=True)
        except CheckpointException as error:
            found.add(type(failure(error)).__name__)
        one.close()
    return found


def fork(rank: int, root: Path) -> list[int]:
    writer = save(root, 1, 1)
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if refused_in_a_child(writer, root) == {"UsageError", "BusyError"} else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    save(root, 3, 1)
    writer.close()
    return steps_on(root)


def test_a_forked_child_takes_nothing_from_its_parent(memory: Path, root: Path) -> None:
    assert ranks(1, fork, root) == [[1, 3]]
