"""A start claims its root, or is told who goes on: with the memory of a node, of another one, and of none."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

import rekindle
from rekindle.format.claim import Claim, Past, Starts
from rekindle.format.lineage import Incarnation
from rekindle.memory.job_dir import JobDir
from rekindle.memory.starts import read_starts, write_starts
from rekindle.session import claiming
from rekindle.session.claiming import Stake, claim_again, stake_claim
from rekindle.session.group import SingleProcess
from rekindle.storage.claims import claim_root, hold_claim, newest_claim
from rekindle.storage.posix import PosixStore
from tests.faults.harness import wait_for
from tests.storage.starts import claimed, start
from tests.test_checkpointer import Training


class Parted(Exception):
    """The end of a start that leaves its memory as it is."""


@pytest.fixture
def store(root: Path) -> PosixStore:
    return PosixStore(root)


@pytest.fixture
def node(memory: Path) -> Callable[[str], JobDir]:
    def make(name: str) -> JobDir:
        job = JobDir(memory / name / "job")
        (memory / name).mkdir(mode=0o700, exist_ok=True)
        job.create()
        return job

    return make


def begin(store: PosixStore, job: JobDir, number: int, *others: JobDir, used: bool | None = True) -> Stake:
    """A start on the node of ``job``, to which ``others`` tell what they remember."""
    remembered = [read_starts(one) for one in (job, *others)]
    nodes = [f"host{index} boot" for index in range(len(remembered))]
    incarnation = Incarnation(1, f"{number:016x}")
    return stake_claim(SingleProcess(), store, job, incarnation, nodes, remembered, used=used)


def train(root: Path, memory: Path, to: int) -> rekindle.Checkpointer:
    """One more start, which leaves a durable step behind."""
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, memory=memory)
    done = ckpt.restore()
    for step in range(done + 1, to + 1):
        training.update()
        ckpt.save(step, wait="durable", timeout=60, pin=False)
    return ckpt


def end(ckpt: rekindle.Checkpointer) -> None:
    with pytest.raises(Parted), ckpt:
        raise Parted


# -- jobs ------------------------------------------------------------------------------------------------------------


def test_nodes_that_the_job_has_left_behind_are_refused_until_a_person_decides(root: Path, memory: Path) -> None:
    here, elsewhere = memory / "here", memory / "elsewhere"
    end(train(root, here, 2))
    train(root, elsewhere, 3).close(timeout=60)
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, memory=here)
    refusal = "the job goes on elsewhere, by a start of generation 2, .* 'rekindle stop --discard"
    with pytest.raises(rekindle.BusyError, match=refusal):
        ckpt.restore()
    assert ckpt.restore(step=3) == 3 and ckpt.restore() == 3
    training.update()
    ckpt.save(4, wait="durable", timeout=60)
    ckpt.close(timeout=60)
    newest = newest_claim(PosixStore(root))
    assert newest is not None and (newest.number, newest.generation) == (3, 3)


def test_a_start_that_was_passed_over_writes_nothing_more(root: Path, memory: Path) -> None:
    late = train(root, memory / "here", 2)
    end(train(root, memory / "elsewhere", 2))
    with pytest.raises(rekindle.NotDurableError, match="the job goes on elsewhere, by a start of generation 2"):
        late.save(3, wait="durable", timeout=3.0)
    end(late)
    assert [entry.stamp.step for entry in PosixStore(root).published()][-1] == 2


def test_without_memory_too(root: Path, memory: Path) -> None:
    """Then trainers write to storage themselves."""
    (memory / "none").write_text("no directory")
    late = train(root, memory / "none", 2)
    end(train(root, memory / "elsewhere", 2))
    with pytest.raises(rekindle.NotDurableError, match="the job goes on elsewhere"):
        late.save(3, wait="durable", timeout=60.0)
    end(late)
    assert [entry.stamp.step for entry in PosixStore(root).published()][-1] == 2


def test_a_start_whose_memory_was_removed_keeps_its_claim(root: Path, memory: Path) -> None:
    late, store = train(root, memory, 2), PosixStore(root)
    job = late._session.job_dir
    record = read_starts(job)
    assert record is not None
    while job.path.exists():  # its agent goes on putting files there meanwhile
        shutil.rmtree(job.path, ignore_errors=True)
    steps = count(3)

    def saves_into_memory() -> bool:
        late.save(next(steps))
        return any(job.snapshots.shard_ids())

    wait_for(saves_into_memory, what="memory that is back")
    assert read_starts(job) == record
    claimed(store, start(9))
    last = next(steps)
    late.save(last)
    wait_for(lambda: "nothing of this start is written there any more" in job.notes.drain_error())
    end(late)
    assert last not in [entry.stamp.step for entry in store.published()]


# -- the meeting -----------------------------------------------------------------------------------------------------


def test_a_start_is_remembered_before_it_claims(
    store: PosixStore, node: Callable[[str], JobDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes may be killed as soon as the claim is made."""
    job = node("a")
    assert begin(store, job, 1).starts.own.number == 1

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SingleProcess, "gather", die)
    with pytest.raises(KeyboardInterrupt):
        begin(store, job, 2)
    monkeypatch.undo()
    newest = newest_claim(store)
    assert newest is not None and (newest.start, newest.number) == (f"{2:016x}", 2)
    left = read_starts(job)
    assert left is not None and not left.settled
    hold_claim(store, left)
    stake = begin(store, job, 3)
    assert stake.refusal is None and stake.starts.own.number == 3
    assert read_starts(job) == stake.starts and not stake.starts.past


def test_while_ranks_meet_agents_write_what_is_left_and_claim_nothing(
    store: PosixStore, node: Callable[[str], JobDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a side that waits for the other one would be first."""
    job = node("a")
    former = begin(store, job, 1).starts
    met = Starts(Claim(f"{2:016x}", 2), former.remembered, settled=False)
    hold_claim(store, met)
    assert newest_claim(store) == former.own
    hold_claim(store, begin(store, node("b"), 3).starts)
    with pytest.raises(FileExistsError):
        hold_claim(store, met)


def test_a_start_that_only_reads_ends_no_other(store: PosixStore, node: Callable[[str], JobDir]) -> None:
    """As an evaluation on another host does, once or again."""
    trains, reads = begin(store, node("a"), 1).starts, node("b")
    for number in (2, 3):
        stake = begin(store, reads, number)
        assert stake.refusal is None and stake.starts.own.generation > trains.own.generation
        hold_claim(store, trains)
    hold_claim(store, stake.starts)  # it writes, too
    with pytest.raises(FileExistsError, match="the job goes on elsewhere"):
        hold_claim(store, trains)
    assert begin(store, reads, 4).starts.own.number == 3
    assert begin(store, node("a"), 5).refusal is not None


def test_a_new_start_is_refused_at_its_first_commit_once_the_former_one_has_gone_on(
    store: PosixStore, node: Callable[[str], JobDir]
) -> None:
    begin(store, node("a"), 1)
    new = begin(store, node("b"), 2).starts
    begin(store, node("a"), 3)
    with pytest.raises(FileExistsError, match="the job goes on elsewhere"):
        hold_claim(store, new)


def test_a_refused_start_leaves_what_its_node_remembers(store: PosixStore, node: Callable[[str], JobDir]) -> None:
    one, other, new = node("a"), node("b"), node("c")
    begin(store, one, 1)
    write_starts(other, Starts(Claim(f"{1:016x}", 1, 1)))
    begin(store, one, 2)
    before = read_starts(other)
    assert begin(store, other, 3, new).refusal is not None and read_starts(other) == before
    assert begin(store, new, 4, other).refusal is not None and read_starts(new) is None
    assert begin(store, other, 5, one).refusal is None, "one of them was there"
    assert begin(store, new, 6).refusal is None, "it remembers nothing"


def test_a_root_that_was_put_back_is_refused_with_what_to_do(store: PosixStore, node: Callable[[str], JobDir]) -> None:
    here = node("a")
    begin(store, here, 1)
    former = read_starts(here)
    assert former is not None
    write_starts(here, replace(former, own=replace(former.own, at="2026-11-02")))
    store.take_away("claims/claim-000000000001.json")
    claim_root(store, Starts(Claim(f"{9:016x}", 2, at="2026-11-01", hosts=["there"])))
    refusal = begin(store, here, 2).refusal
    assert refusal is not None and "at 2026-11-01 on there, which began before the last start on the nodes" in refusal
    assert "goes on elsewhere" not in refusal and "See that no other start of the job runs; then" in refusal
    assert "'rekindle stop --discard" in refusal and "restore(step=N)" in refusal


def test_the_smaller_side_waits_and_then_goes_on_or_is_refused(
    store: PosixStore, node: Callable[[str], JobDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [node(name) for name in "abc"]
    begin(store, jobs[0], 1, *jobs[1:])
    former = read_starts(jobs[0])
    assert former is not None and former.own.nodes == 3
    for job in jobs:
        write_starts(job, former)
    monkeypatch.setattr(claiming, "_LOOK_EVERY", 0.01)
    waiting = threading.Event()
    monkeypatch.setattr(claiming.log, "warning", lambda *_: waiting.set())

    def claim() -> None:
        assert waiting.wait(60)
        claim_root(store, Starts(Claim(f"{2:016x}", 2, nodes=2), former.remembered))

    larger = threading.Thread(target=claim)
    larger.start()
    assert begin(store, jobs[0], 3).refusal is not None
    larger.join(60)
    monkeypatch.setattr(claiming, "_PRECEDENCE", 0.05)
    three = Starts(Claim(f"{4:016x}", 3, nodes=3), (Past(f"{2:016x}"),))
    claim_root(store, three)
    write_starts(jobs[0], three)
    assert begin(store, jobs[0], 5).refusal is None, "nobody else went on"


def test_the_smaller_side_waits_no_longer_than_its_own_ranks_do(
    store: PosixStore, node: Callable[[str], JobDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in a collective of the user's process group, whose timeout may be short."""
    monkeypatch.setattr(claiming, "_PRECEDENCE", 1e9)
    monkeypatch.setattr(claiming, "_LOOK_EVERY", 0.01)
    monkeypatch.setattr(SingleProcess, "seconds", 0.2)
    former = Starts(Claim(f"{1:016x}", 1, nodes=3))
    claim_root(store, former)
    job = node("a")
    write_starts(job, former)
    assert begin(store, job, 2).starts.own.number == 2


def test_a_root_that_shows_nothing_is_claimed_by_the_first_commit(
    store: PosixStore, node: Callable[[str], JobDir]
) -> None:
    stake = begin(store, node("a"), 1, used=False)
    assert stake.refusal is None and not store.root.exists()
    hold_claim(store, stake.starts)
    assert begin(store, node("a"), 2, used=False).starts.own.number == 2, "from then on it is known"


def test_storage_that_is_away_at_the_meeting_is_claimed_later(store: PosixStore, node: Callable[[str], JobDir]) -> None:
    begin(store, node("a"), 1)
    away = begin(store, node("a"), 2, used=None)
    assert away.refusal is None and away.starts.own.number == 0
    new = begin(store, node("b"), 3, used=None)
    with pytest.raises(FileExistsError):
        hold_claim(store, new.starts)
    hold_claim(store, away.starts)
    assert begin(store, node("a"), 4).starts.own.number == 3
    assert claim_again(store, away.starts, used=True, on_purpose=False).own.number == 0
    assert claim_again(store, new.starts, used=True, on_purpose=False).own.number == 4
    assert claim_again(store, away.starts, used=True, on_purpose=True).own.number == 5


def test_a_person_has_decided_though_storage_is_away(store: PosixStore, node: Callable[[str], JobDir]) -> None:
    here = node("a")
    begin(store, here, 1)
    hold_claim(store, begin(store, node("b"), 2).starts)
    refused = begin(store, here, 3)
    assert refused.refusal is not None
    away = store.root.rename(store.root.with_name("away"))
    store.root.write_text("no directory")
    chosen = claim_again(store, refused.starts, used=True, on_purpose=True)
    store.root.unlink()
    away.rename(store.root)
    hold_claim(store, chosen)
    newest = newest_claim(store)
    assert newest is not None and (newest.start, newest.number) == (chosen.own.start, 3)


def test_slurm_has_the_last_word(
    store: PosixStore, node: Callable[[str], JobDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    one, other = node("a"), node("b")
    begin(store, one, 1)
    former = read_starts(one)
    assert former is not None and former.own.launch == "slurm 7.0"
    write_starts(other, former)
    begin(store, one, 2)
    assert begin(store, other, 3).refusal is not None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert begin(store, other, 4).refusal is None


@pytest.mark.parametrize("text", ["", "{", "{}", '{"own": 1, "past": []}', '{"own": {}, "past": [{}]}'])
def test_a_damaged_record_is_none(node: Callable[[str], JobDir], text: str) -> None:
    job = node("a")
    job.paths.starts.write_text(text)
    assert read_starts(job) is None
    write_starts(job, Starts(Claim(f"{1:016x}", 1), (Past(f"{2:016x}", "slurm 7.0", "2026"),)))
    assert read_starts(job) == Starts(Claim(f"{1:016x}", 1), (Past(f"{2:016x}", "slurm 7.0", "2026"),))


def test_full_memory_takes_the_record_of_the_next_start(small_tmpfs: Callable[[int], Path]) -> None:
    """By the one before, the node would be refused as left behind."""
    job = JobDir(small_tmpfs(1 << 20) / "rekindle-0" / "job")
    job.path.parent.mkdir(mode=0o700)
    job.create()
    write_starts(job, Starts(Claim(f"{1:016x}", 1, hosts=["a", "b"]), (Past(f"{0:016x}"),)))
    with pytest.raises(OSError, match="No space left"), open(job.path / "filler", "wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    write_starts(job, Starts(Claim(f"{2:016x}", 2)))
    assert read_starts(job) == Starts(Claim(f"{2:016x}", 2))
