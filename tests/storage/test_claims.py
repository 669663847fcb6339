"""Claims: of the starts that went on from one, one goes on, in whatever order they look and claim."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.format.claim import Claim, Past, Starts, describe_conflict, is_minority, may_follow
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import claim_name
from rekindle.storage import claims, disk
from rekindle.storage.claims import claim_root, hold_claim, newest_claim
from rekindle.storage.commit import Committer
from rekindle.storage.posix import PosixStore
from rekindle.storage.roots import describe_root
from rekindle.testing import make_shard
from tests.storage.starts import WAIT, claimed, meet_at, parted, start


@pytest.fixture
def store(root: Path) -> PosixStore:
    return PosixStore(root)


def refused(store: PosixStore, starts: Starts) -> bool:
    """True if it may not claim, and nothing that it saves gets there."""
    _, rival = claim_root(store, starts)
    if rival is not None:
        with pytest.raises(FileExistsError, match=f"the job goes on elsewhere.* on {rival.hosts[0]}"):
            hold_claim(store, starts)
    return rival is not None


# -- the rule --------------------------------------------------------------------------------------------------------


def test_a_restart_claims_after_the_start_that_its_nodes_remember(store: PosixStore) -> None:
    first = claimed(store, start(1))
    second = claimed(store, start(2, first))
    assert (first.own.number, second.own.number, second.own.generation) == (1, 2, 2)
    hold_claim(store, second)
    assert claim_root(store, second) == (second.own, None), "its answer may have been lost"
    assert newest_claim(store) == second.own


def test_a_link_that_leads_nowhere_is_no_other_start_that_claims_the_root(store: PosixStore) -> None:
    store.root.mkdir()
    (store.root / "claims").symlink_to("unmounted")
    with pytest.raises(OSError, match="/claims: is a link that leads nowhere"):
        hold_claim(store, start(1))


def test_nodes_that_were_left_behind_are_refused(store: PosixStore) -> None:
    former = claimed(store, start(1, nodes=2))
    claimed(store, start(2, former))
    assert refused(store, start(3, former))
    assert refused(store, start(4, former, start(3, former))), "again and again"


def test_nodes_that_remember_nothing_go_on_and_pass_the_former_start_over(store: PosixStore) -> None:
    former = claimed(store, start(1))
    claimed(store, start(2))
    with pytest.raises(FileExistsError, match="of generation 2, at today on host2"):
        hold_claim(store, former)
    assert refused(store, start(3, former)), "its launcher may go on for ever"


def test_one_node_that_remembers_is_enough(store: PosixStore) -> None:
    former = claimed(store, start(1))
    newer = claimed(store, start(2, former))
    claimed(store, start(3, former, newer))


def test_a_start_whose_claim_was_not_needed_is_no_break(store: PosixStore) -> None:
    """Storage was away at the starts between."""
    former = claimed(store, start(1))
    between = start(2, former)
    claimed(store, start(3, start(4, between)))


def test_a_scheduler_that_launches_the_job_anew_has_decided(store: PosixStore) -> None:
    former = claimed(store, start(1, launch="slurm 7.0"))
    claimed(store, start(2, former, launch="slurm 7.0"))
    assert refused(store, start(3, former, launch="slurm 7.0")), "both are what it launched"
    claimed(store, start(4, former, launch="slurm 7.1"))
    left = start(5, former, launch="slurm 7.0")
    assert refused(store, left)


@pytest.mark.parametrize(
    ("present", "nodes", "waits"), [(1, 2, False), (1, 3, True), (2, 4, False), (1, 4, True), (0, 4, False)]
)
def test_a_smaller_side_lets_the_larger_one_go_first(present: int, nodes: int, waits: bool) -> None:
    former, own = start(1, nodes=nodes).own, start(2).own
    assert is_minority(former, own, present) == waits
    assert not is_minority(former, replace(own, launch="slurm 8.0"), present)


def test_the_generation_is_above_that_of_a_start_in_its_way(store: PosixStore) -> None:
    """A person may say that it goes on all the same, and its checkpoints must count as the later ones."""
    former = claimed(store, start(1))
    claimed(store, start(2, former, generation=5))
    own, rival = claim_root(store, start(3, former))
    assert rival is not None and own.generation == 6


@pytest.mark.parametrize("seed", range(20))
def test_a_job_of_parts_has_one_line_of_claims(seed: int) -> None:
    """Any starts on any nodes, of which some have lost their memory: each claim follows one that its nodes remember."""
    chance = random.Random(seed)
    memories: dict[int, tuple[Past, ...]] = {node: () for node in range(4)}
    newest: Claim | None = None
    for number in range(1, 300):
        nodes = chance.sample(range(4), chance.randint(1, 4))
        past = tuple(dict.fromkeys(one for node in nodes for one in memories[node]))
        own = start(number).own
        if not may_follow(newest, own, past):
            assert newest is not None and past and newest.start not in {one.start for one in past}
            continue
        assert newest is None or not past or newest.start in {one.start for one in past}
        newest = replace(own, number=number)
        for node in nodes:
            memories[node] = (Past(own.start),)
        if chance.random() < 0.1:
            memories[chance.randrange(4)] = ()


# -- in all orders ---------------------------------------------------------------------------------------------------


MANY = [pytest.param(range(at, at + 1000), marks=pytest.mark.campaign(6)) for at in range(0, 10_000, 1000)]


@pytest.mark.timeout(900)  # takes turns for seconds, and may have a part of a core
@pytest.mark.parametrize("seeds", [range(40), *MANY], ids=lambda seeds: f"{seeds.start}-{seeds.stop}")
def test_of_two_sides_of_a_start_one_claims_it(tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        try:
            parted(tmp_path / str(seed), seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("seed", range(10))
def test_of_two_sides_that_make_their_claim_with_their_first_commit_one_writes(root: Path, seed: int) -> None:
    """Storage was away when they began. The ranks of one side are several, and make the same claim."""
    former = claimed(PosixStore(root), start(1))
    one, other = start(2, former), start(3, former)
    found = meet_at(root, random.Random(seed), [one, one, other, other], hold_claim)
    refusals = [isinstance(error, FileExistsError) for error in found]
    assert refusals in ([False, False, True, True], [True, True, False, False]), found


@pytest.mark.parametrize("seed", range(10))
def test_of_two_new_starts_the_later_one_writes(root: Path, seed: int) -> None:
    outcomes = meet_at(root, random.Random(seed), [start(1), start(2)], claim_root)
    assert {own.number for own, _ in outcomes} == {1, 2}
    first, second = sorted((Starts(own) for own, _ in outcomes), key=lambda one: one.own.number)
    hold_claim(PosixStore(root), second)
    with pytest.raises(FileExistsError):
        hold_claim(PosixStore(root), first)


# -- commits ---------------------------------------------------------------------------------------------------------


def shard(step: int, starts: Starts) -> tuple[Any, bytes]:
    stamp = ShardId(step, 0, 1, Incarnation(starts.own.generation, starts.own.start))
    return make_shard(stamp, {"x": b"%d" % step})


def write(committer: Committer, step: int, starts: Starts) -> ShardId:
    receipt, data = shard(step, starts)
    committer.begin(receipt.stamp)
    committer.write(receipt, memoryview(data))
    stamp: ShardId = receipt.stamp
    return stamp


def steps(store: PosixStore) -> list[int]:
    return [entry.stamp.step for entry in store.published()]


def test_the_first_commit_claims_a_root_that_nobody_has_used(store: PosixStore) -> None:
    first = start(1)
    own, rival = claim_root(store, first, make=False)
    assert rival is None and not own.number and not store.root.exists(), "it may be a mount that is missing"
    committer = Committer(store, None, lambda: first)
    stamp = write(committer, 1, first)
    assert newest_claim(store) == replace(first.own, number=1)
    assert committer.commit(stamp, [stamp])


def test_a_start_that_was_passed_over_publishes_and_prunes_nothing(store: PosixStore, caplog: Any) -> None:
    first = claimed(store, start(1))
    committer = Committer(store, None, lambda: first)
    for step in (1, 2):
        stamp = write(committer, step, first)
        assert committer.commit(stamp, [stamp])
    late = write(committer, 3, first)
    claimed(store, start(2))
    for refuse in (lambda: committer.commit(late, [late]), lambda: write(committer, 4, first)):
        with pytest.raises(FileExistsError, match="the job goes on elsewhere"):
            refuse()
    assert committer.tidy(stamp, 1, None) == [] and "surplus checkpoints stay" in caplog.text
    assert steps(store) == [1, 2]


def test_a_claim_that_comes_between_the_last_look_and_the_manifest(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is whole. The later start, which has not seen it, supersedes it."""
    first = claimed(store, start(1))
    committer = Committer(store, None, lambda: first)
    stamp = write(committer, 1, first)
    assert committer.commit(stamp, [stamp])
    late, second, create = write(committer, 2, first), start(2), disk.create

    def late_create(path: Path) -> int:
        if ".partial." in path.name:
            claimed(store, second)
        return create(path)

    monkeypatch.setattr(disk, "create", late_create)
    assert committer.commit(late, [late]) and steps(store) == [1, 2]
    after = Incarnation(2, second.own.start, first.own.start, 1)
    receipt, data = make_shard(ShardId(3, 0, 1, after), {"x": b"3"})
    other = Committer(store, None, lambda: second)
    other.begin(receipt.stamp)
    other.write(receipt, memoryview(data))
    assert other.commit(receipt.stamp, [receipt.stamp])
    other.tidy(receipt.stamp, 9, None)
    assert steps(store) == [1, 3]


# -- the files -------------------------------------------------------------------------------------------------------


def test_a_root_that_has_only_claims_is_empty(store: PosixStore) -> None:
    claimed(store, start(1))
    store.clean_up()
    assert store.published() == [] and store.damaged() == [] and store.prune(1, None) == []
    assert describe_root(store.root) == "a job has begun there, and has saved nothing yet"
    assert store.extras("claims") == [claim_name(1)]


def test_the_newest_claims_stay(store: PosixStore) -> None:
    last = start(0)
    for number in range(1, 21):
        last = claimed(store, start(number, last))
    assert store.extras("claims") == [claim_name(number) for number in range(13, 21)]
    hold_claim(store, last)


def test_a_damaged_claim_is_that_of_somebody_unknown(store: PosixStore) -> None:
    former = claimed(store, start(1))
    (store.root / claim_name(1)).write_bytes(b"{}")
    _, rival = claim_root(store, start(2, former))
    assert rival is not None
    with pytest.raises(FileExistsError, match="a start whose claim, number 1, can't be read"):
        hold_claim(store, former)
    claimed(store, start(3))


def test_a_claim_that_its_start_did_not_finish_is_passed_over(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill leaves it where no file has two names, or a power cut."""
    monkeypatch.setattr(claims, "_FINISHED_WITHIN", 0.03)
    former = claimed(store, start(1))
    whole = replace(start(9).own, number=2).encode()
    for part in (b"", b"{", whole[: len(whole) // 2], whole[:-1]):
        left = store.root / claim_name(2)
        left.write_bytes(part)
        hold_claim(store, former, make=False)
        assert newest_claim(store) == former.own
        hold_claim(store, former)
        assert newest_claim(store) == replace(former.own, number=3), "commits after this one need not wait again"
        again = claimed(store, start(4, former))
        assert again.own.number == 4
        for number in (3, 4):
            store.take_away(claim_name(number))
    store.take_away(claim_name(1))
    assert newest_claim(store) is None
    assert claim_root(store, start(5), make=False)[0].number == 3, "the root is known to be in use"


def test_a_claim_that_is_being_written_counts_once_it_is_whole(store: PosixStore, monkeypatch: Any) -> None:
    monkeypatch.setattr(claims, "_FINISHED_WITHIN", WAIT)
    former = claimed(store, start(1))
    rival = replace(start(2).own, number=2)
    path = store.root / claim_name(2)
    path.write_bytes(b"")
    writer = threading.Timer(0.2, lambda: path.write_bytes(rival.encode()))
    writer.start()
    try:
        with pytest.raises(FileExistsError, match=r"the job goes on elsewhere, by a start of .* on host2"):
            hold_claim(store, former)
    finally:
        writer.join(WAIT)
    assert newest_claim(store) == rival


def test_of_a_slow_writer_and_one_that_passed_it_over_one_writes(store: PosixStore, monkeypatch: Any) -> None:
    """The slow one takes its claim for made, and finds the later one at its first commit."""
    monkeypatch.setattr(claims, "_FINISHED_WITHIN", 0.05)
    former = claimed(store, start(1))
    slow = start(2, former)
    path = store.root / claim_name(2)
    path.write_bytes(b"")
    quick = claimed(store, start(3, former))
    path.write_bytes(replace(slow.own, number=2).encode())
    assert refused(store, slow)
    hold_claim(store, quick)


def test_what_killed_starts_leave_of_claims_goes_once_their_numbers_are_taken(store: PosixStore) -> None:
    first = claimed(store, start(1))
    left = [store.root / "claims" / f".{Path(claim_name(number)).name}.{number:016x}.tmp" for number in (1, 2, 3)]
    other = store.root / "claims" / ".claim-notes.tmp"
    for path in (*left, other):
        path.write_bytes(b"")
    store.clean_up()
    assert [path.exists() for path in left] == [False, True, True], "a writer of the next claim may live"
    claimed(store, start(2, first))
    store.clean_up()
    assert [path.exists() for path in left] == [False, False, True] and other.exists()


def test_a_root_that_was_put_back_is_not_said_to_be_in_use(store: PosixStore) -> None:
    """A run was deleted, another one has begun in its place, and a backup brings the first one back."""

    def at(day: int, one: Starts) -> Starts:
        return replace(one, own=replace(one.own, at=f"2026-11-{day:02}T00:00:00+00:00"))

    lost = claimed(store, at(1, start(1, generation=7)))
    backup = (store.root / claim_name(1)).read_bytes()
    store.take_away(claim_name(1))
    now = claimed(store, at(2, start(2)))
    (store.root / claim_name(1)).write_bytes(backup)
    words = r"number 1, is of a start of generation 7, at 2026-11-01.* put back to an earlier state, as from a backup"
    with pytest.raises(FileExistsError, match=words):
        hold_claim(store, now)
    _, rival = claim_root(store, at(3, start(3, now)))
    assert rival == lost.own
    assert "the job goes on elsewhere" in describe_conflict(claimed(store, at(4, start(4))).own, now.remembered)


def test_other_files_beside_them_are_no_claims(store: PosixStore) -> None:
    claimed(store, start(1))
    for name in (".claim-000000000002.json.0.tmp", "claim-3.json", "claim-000000000004.json.bak", "README"):
        (store.root / "claims" / name).write_text("")
    assert claim_root(store, start(5))[0].number == 2


def test_claims_that_went_with_the_root_are_made_again(store: PosixStore) -> None:
    former = claimed(store, start(1))
    now = claimed(store, start(2, former))
    for name in store.extras("claims"):
        store.take_away(name)
    (store.root / "claims").rmdir()
    store.root.rmdir()
    hold_claim(store, now)
    assert store.extras("claims") == [claim_name(2)]
    claimed(store, start(3))
    with pytest.raises(FileExistsError):
        hold_claim(store, now)


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file system on which no file has two names."""

    def refuse(path: Path, to: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(disk, "link", refuse)
    yield


def test_without_hard_links(root: Path, no_links: None) -> None:
    parted(root, 1)
    assert sorted(os.listdir(root / "claims")) == [Path(claim_name(n)).name for n in (1, 2)]


def test_without_hard_links_and_room_no_half_claim_is_left(small_tmpfs: Callable[[int], Path], no_links: None) -> None:
    """Nobody could read it, so it would be in everybody's way."""
    root = small_tmpfs(1 << 20)
    former = claimed(PosixStore(root), start(1))
    with pytest.raises(OSError, match="No space left"), open(root / "filler", "wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    os.truncate(root / "filler", (root / "filler").stat().st_size - 4096)  # room for one file, and it takes two
    with pytest.raises(OSError, match="No space left"):
        claim_root(PosixStore(root), start(2, former))
    (root / "filler").unlink()
    claimed(PosixStore(root), start(3, former))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("start", "x"), ("number", -1), ("after", None), ("generation", 1 << 63), ("nodes", 0), ("world", True)],
        *[("hosts", ["a"] * 9), ("hosts", [1]), ("at", 3), ("launch", "x" * 300)],
    ],
)
def test_a_malformed_claim_is_refused(store: PosixStore, field: str, value: Any) -> None:
    claim = claimed(store, start(1)).own
    (store.root / claim_name(1)).write_bytes(replace(claim, **{field: value}).encode())
    found = newest_claim(store)
    assert found == Claim("", 0, 1)
