"""Tests a store against the promises of ``rekindle.storage.store.Store``.

```python
class TestMine(StoreContract):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path): self.root = f"{tmp_path}/an odd näme"
    def everything(self): ...
    def damage(self, step): ...
    def hidden(self, step): ...
```
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from threading import Barrier
from unittest import SkipTest

from rekindle.common.failpoints import POINTS
from rekindle.errors import CorruptError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.metric import Metric
from rekindle.format.names import step_dir
from rekindle.format.reader import ShardReader, Sink, read_blocks
from rekindle.storage.catalog import StoredCopy, find_copies
from rekindle.storage.open import open_store
from rekindle.storage.store import Store
from rekindle.storage.throttle import Budget
from rekindle.storage.verify import verify
from rekindle.testing.shards import make_shard

__all__ = ["StoreContract"]

FIRST = Incarnation(1, "11" * 8)
SECOND = Incarnation(2, "22" * 8, FIRST.id, 4)
RIVAL = Incarnation(2, "33" * 8, FIRST.id, 4)
_KILLED = -9
_WRITERS = 4
_MEETING = 60.0
"""Seconds in which all of these must have begun."""
_CLOCK = 3600.0
"""Seconds by which ``saved_at`` may differ from this clock: the length of a test and the error of a clock."""

_SAVE = "import sys; from rekindle.testing.contract import save_and_tidy; save_and_tidy(*sys.argv[1:])"


def _data(stamp: ShardId, nbytes: int) -> dict[str, bytes]:
    return {"a": random.Random(f"{stamp.step} {stamp.rank}").randbytes(nbytes), "none": b""}


def _write(store: Store, stamp: ShardId, nbytes: int = 5000, budget: Budget | None = None) -> int:
    receipt, shard = make_shard(stamp, _data(stamp, nbytes))
    counted: list[int] = []
    store.write_shard(receipt, memoryview(shard), counted.append, budget)
    return sum(counted)


def _save(
    store: Store, *steps: int, incarnation: Incarnation = FIRST, nbytes: int = 5000, pinned: bool = False
) -> None:
    for step in steps:
        _write(store, ShardId(step, 0, 1, incarnation, pinned=pinned), nbytes)
        assert store.publish(ShardId(step, 0, 1, incarnation))


def _refused(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except OSError:
        return True
    return False


def save_and_tidy(root: str, step: str, nbytes: str, pinned: str = "") -> None:
    """Saves, prunes and cleans up as a drain does, in a process that is to be killed meanwhile."""
    store = open_store(root)
    _save(store, int(step), nbytes=int(nbytes), pinned=bool(pinned))
    store.prune(1, None)
    store.clean_up()


class _Gather(Sink):
    """A sink that collects blocks by number, half of them in place and half by copies."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        self.blocks = [bytearray(stop - start) for start, stop in sizes]

    def place(self, block: int) -> memoryview | None:
        return memoryview(self.blocks[block]) if block % 2 else None

    def take(self, block: int, at: int, data: memoryview) -> None:
        self.blocks[block][at : at + len(data)] = data

    def lock(self, buffer: object) -> object:
        return None


class StoreContract:
    """The tests of a store. Each test needs a ``root`` of its own: a path or URL under which there is nothing yet."""

    root: str

    big = 40 << 20
    """Bytes of a shard that is sent in several parts by a store that sends parts."""

    points = POINTS["drain"]
    """Failpoints at which a process dies. A store need not reach all of them."""

    def open(self) -> Store:
        """Opens the store of ``root``."""
        return open_store(self.root)

    def everything(self) -> set[str]:
        """Returns the names of all files or objects below the root."""
        raise NotImplementedError

    def damage(self, step: int) -> None:
        """Changes a byte of the step's manifest."""
        raise NotImplementedError

    def hidden(self, step: int) -> AbstractContextManager[object]:
        """Returns a context in which the step's manifest exists and every attempt to read it fails."""
        raise SkipTest("this store has no way to keep one manifest from being read")

    # -- what the tests have in common --------------------------------------------------------------------------

    def steps(self) -> list[int]:
        return [entry.stamp.step for entry in self.open().published()]

    def copy(self, step: int) -> StoredCopy:
        return next(copy for copy in find_copies(None, self.open()) if copy.step == step)

    def assert_sound(self) -> None:
        for copy in find_copies(None, self.open()):
            assert verify(copy) == []

    # -- visibility ---------------------------------------------------------------------------------------------

    def test_an_empty_root_has_nothing_and_is_no_error(self) -> None:
        store = self.open()
        stamp = ShardId(1, 0, 1, FIRST)
        assert store.published() == [] and store.damaged() == [] and store.find(1) is None
        assert not store.durable(stamp) and not store.has_shard(stamp) and not store.publish(stamp)
        store.clean_up()
        store.discard(stamp)
        assert store.prune(1, None) == [] and self.everything() == set()

    def test_a_checkpoint_is_visible_when_all_of_it_is_there(self) -> None:
        store = self.open()
        stamps = [ShardId(3, rank, 2, FIRST) for rank in range(2)]
        _write(store, stamps[0])
        assert store.has_shard(stamps[0]) and not store.has_shard(stamps[1])
        assert not store.publish(stamps[0]) and store.published() == [] and not store.durable(stamps[0])
        _write(store, stamps[1])
        assert store.published() == []
        assert store.publish(stamps[1]) and store.publish(stamps[0]) and store.durable(stamps[0])
        (found,) = store.published()
        assert found.stamp.checkpoint == stamps[0].checkpoint and found.stamp.world == 2
        self.assert_sound()

    def test_listed_are_steps_in_their_order(self) -> None:
        _save(self.open(), 12, 3, 9999999999, 100)
        assert self.steps() == [3, 12, 100, 9999999999]
        assert self.open().find(100) is not None and self.open().find(4) is None
        assert self.open().find(100, SECOND) is None
        assert all(abs(time.time() - (one.saved_at or 0)) < _CLOCK for one in self.open().published())

    def test_damaged_bytes_are_not_stored_and_can_be_sent_again(self) -> None:
        store, stamp = self.open(), ShardId(1, 0, 1, FIRST)
        receipt, shard = make_shard(stamp, _data(stamp, 5000))
        wrong = bytearray(shard)
        wrong[-1] ^= 1
        try:
            store.write_shard(receipt, memoryview(wrong), lambda nbytes: None)
            raise AssertionError("was stored")
        except CorruptError:
            pass
        assert not store.has_shard(stamp) and not store.publish(stamp)
        _save(store, 1)
        self.assert_sound()

    def test_another_file_beside_them_is_no_checkpoint(self) -> None:
        store = self.open()
        _save(store, 1)
        before = self.everything()
        store.check_writable()
        assert not store.has("hang-1-step-1/report.txt")
        store.write_extra("hang-1-step-1/report.txt", b"a report")
        store.write_extra("probe", b"")
        assert store.has("hang-1-step-1/report.txt") and store.has("probe")
        store.write_extra("hang-1-step-1/empty", b"")
        assert store.extras("hang-1-step-1") == ["hang-1-step-1/empty", "hang-1-step-1/report.txt"]
        assert store.extras("hang-1") == []
        assert store.read_extra("hang-1-step-1/report.txt", 5) == b"a rep"
        assert store.read_extra("hang-1-step-1/report.txt", 1 << 20) == b"a report"
        assert store.read_extra("hang-1-step-1/empty", 1) == b""
        with suppress(FileNotFoundError):
            store.read_extra("hang-1-step-1/nothing", 1)
            raise AssertionError("is not there")
        store.take_away("probe")
        store.take_away("probe")
        assert not store.has("probe")
        store.clean_up()
        assert self.everything() - before and self.steps() == [1] and store.damaged() == []

    def test_of_many_writers_of_a_new_file_one_succeeds(self) -> None:
        store, together = self.open(), Barrier(_WRITERS)

        def create(number: int) -> bool:
            together.wait(_MEETING)
            try:
                store.write_extra("claims/first", b"%d" % number * 9, exclusive=True)
            except FileExistsError:
                return False
            return True

        with ThreadPoolExecutor(_WRITERS) as pool:
            made = list(pool.map(create, range(_WRITERS)))
        assert sum(made) == 1
        assert store.extras("claims") == ["claims/first"]
        assert store.read_extra("claims/first", 100) == b"%d" % made.index(True) * 9

    # -- bytes --------------------------------------------------------------------------------------------------

    def test_a_large_shard_comes_back_as_it_was(self) -> None:
        store, stamp = self.open(), ShardId(1, 0, 1, FIRST)
        sent = _write(store, stamp, self.big, Budget(1 << 40))
        assert store.publish(stamp)
        with self.copy(1).files.shard(0, 1) as shard:
            assert sent == shard.receipt.file_bytes
            sink, reader = _Gather(shard.receipt.layout.blocks), ShardReader(shard)
            assert reader.header_is_sound()
            assert read_blocks(reader, sink, range(len(sink.blocks))) == []
            reader.close()
        assert b"".join(sink.blocks) == _data(stamp, self.big)["a"]

    def test_only_what_is_asked_for_is_read_and_by_many_at_once(self) -> None:
        store, stamp = self.open(), ShardId(1, 0, 1, FIRST)
        _save(store, 1, nbytes=self.big)
        body = _data(stamp, self.big)["a"]

        def read(number: int) -> None:
            with self.copy(1).files.shard(0, 1) as shard:
                start, stop = shard.receipt.layout.blocks[number]
                sink, reader = _Gather(shard.receipt.layout.blocks), ShardReader(shard)
                assert read_blocks(reader, sink, [number]) == []
                reader.close()
                assert sink.blocks[number] == body[start:stop]
                assert reader.nbytes < stop - start + (4 << 20)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(read, [0, 1, 2, 2, 1, 0]))

    # -- several at once ----------------------------------------------------------------------------------------

    def test_ranks_may_publish_one_checkpoint_at_the_same_time(self) -> None:
        stamps = [ShardId(2, rank, 6, FIRST) for rank in range(6)]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(partial(_write, self.open()), stamps))
            assert all(pool.map(lambda stamp: self.open().publish(stamp), stamps))
        assert self.steps() == [2]
        self.assert_sound()

    def test_nobody_is_told_of_a_success_that_another_job_has_undone(self) -> None:
        _save(self.open(), 5, 6)  # superseded by both starts below
        for step in (5, 6, 7, 8):
            starts = [SECOND, RIVAL]
            stamps = [ShardId(step, 0, 1, incarnation) for incarnation in starts]
            both = Barrier(2)
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(partial(_write, self.open()), stamps))
                told = list(pool.map(partial(self.publish_together, both), stamps))
            there = {entry.stamp.checkpoint for entry in self.open().published()}
            won = {stamp.checkpoint for stamp, done in zip(stamps, told, strict=True) if done}
            assert won and won <= there
        self.assert_sound()

    def publish_together(self, both: Barrier, stamp: ShardId) -> bool:
        store = self.open()
        both.wait(30)
        try:
            return store.publish(stamp)
        except FileExistsError as error:
            assert f"step {stamp.step}" in str(error)
            return False

    def test_a_later_start_takes_the_place_of_what_it_has_left_behind(self) -> None:
        _save(self.open(), 4, 5)
        _save(self.open(), 5, incarnation=SECOND)
        found = self.open().find(5)
        assert found is not None and found.stamp.incarnation == SECOND
        self.assert_sound()
        self.open().prune(9, None)
        self.open().clean_up()
        assert self.steps() == [4, 5] and not any(FIRST.id in name and "05." in name for name in self.everything())

    def test_an_earlier_start_does_not_replace_its_successors_step(self) -> None:
        _save(self.open(), 5, incarnation=SECOND)
        late = ShardId(5, 0, 1, FIRST)
        _write(self.open(), late)
        try:
            self.open().publish(late)
        except FileExistsError as error:
            assert "generation 2" in str(error)
        found = self.open().find(5)
        assert found is not None and found.stamp.incarnation == SECOND and not self.open().durable(late)

    # -- removal ------------------------------------------------------------------------------------------------

    def test_what_is_surplus_is_removed_with_all_that_belongs_to_it(self) -> None:
        store = self.open()
        _save(store, 1)
        one = len(self.everything())
        _save(store, 2, 3, 5, 6, 7)
        assert sorted(store.prune(2, 5)) == [1, 2, 3] and self.steps() == [5, 6, 7]
        assert len(self.everything()) == 3 * one and store.prune(2, 5) == []
        self.assert_sound()

    def pinned(self) -> list[int]:
        return [entry.stamp.step for entry in self.open().published() if entry.pinned]

    def test_what_is_pinned_stays_until_it_is_unpinned(self) -> None:
        store = self.open()
        _save(store, 1, 2, 3, 4)
        before = self.everything()
        for step in (1, 1, 3):
            store.pin(ShardId(step, 0, 1, FIRST))
        assert self.pinned() == [1, 3] and [entry.stamp.step for entry in store.surplus(1, None)] == [2]
        assert self.open().prune(1, None) == [2] and self.steps() == [1, 3, 4]
        self.open().clean_up()
        self.assert_sound()
        for step in (1, 3, 3, 4):
            store.unpin(ShardId(step, 0, 1, FIRST))
        assert self.pinned() == [] and self.everything() < before
        assert self.open().prune(1, None) == [1, 3] and self.steps() == [4]
        assert not any(f"{step:010d}" in name for step in (1, 2, 3) for name in self.everything())

    def test_what_is_not_there_cant_be_pinned(self) -> None:
        store = self.open()
        _save(store, 4)
        for stamp in (ShardId(5, 0, 1, FIRST), ShardId(4, 0, 1, SECOND)):
            assert _refused(partial(store.pin, stamp))
            assert _refused(partial(store.note_metric, stamp, Metric("loss", 0.5, "min")))
            store.unpin(stamp)
        assert self.pinned() == [] and self.steps() == [4]

    def test_a_part_that_says_so_makes_its_checkpoint_a_pinned_one(self) -> None:
        store = self.open()
        _write(store, ShardId(1, 0, 2, FIRST))
        _write(store, ShardId(1, 1, 2, FIRST, pinned=True))
        assert store.publish(ShardId(1, 0, 2, FIRST))
        _save(store, 2, 3)
        assert self.pinned() == [1] and self.open().prune(1, None) == [2] and self.steps() == [1, 3]
        self.assert_sound()

    def test_who_dies_in_the_middle_leaves_none_that_lacks_its_pin(self) -> None:
        for step, point in enumerate(("drain.manifest", "drain.published"), 1):
            command = [sys.executable, "-c", _SAVE, self.root, str(step), "5000", "pinned"]
            subprocess.run(command, env=_environment(point), timeout=120, check=False)
            assert self.pinned() == self.steps() == list(range(1, step + 1)), point

    def test_the_best_one_by_its_metric_stays(self) -> None:
        store, loss = self.open(), partial(Metric, "loss", mode="min")
        _write(store, ShardId(1, 0, 1, FIRST, metric=loss(value=0.25)))
        assert store.publish(ShardId(1, 0, 1, FIRST))
        _save(store, 2, 3)
        store.note_metric(ShardId(2, 0, 1, FIRST), loss(value=0.125))
        assert [entry.stamp.metric for entry in self.open().published()] == [loss(value=0.25), loss(value=0.125), None]
        assert self.open().prune(1, None) == [1] and store.prune(1, None, keep_best=False) == [2]

    def test_what_is_pinned_and_abandoned_stays(self) -> None:
        store = self.open()
        _save(store, 4, 8)
        store.pin(ShardId(8, 0, 1, FIRST))
        _save(store, 5, 6, incarnation=SECOND)
        store.clean_up()
        assert store.prune(1, None) == [4, 5] and self.steps() == [6, 8] and self.pinned() == [8]
        self.assert_sound()

    def test_abandoned_steps_go_when_their_successor_is_durable(self) -> None:
        store = self.open()
        _save(store, 3, 4, 8, 9)
        _save(store, 5, incarnation=SECOND)
        assert sorted(store.prune(9, None)) == [8, 9] and self.steps() == [3, 4, 5]

    def test_half_of_a_checkpoint_goes_when_a_newer_one_is_durable(self) -> None:
        store = self.open()
        _write(store, ShardId(1, 0, 2, FIRST))
        _write(store, ShardId(7, 0, 2, FIRST))
        _save(store, 4)
        store.clean_up()
        assert not store.has_shard(ShardId(1, 0, 2, FIRST)) and store.has_shard(ShardId(7, 0, 2, FIRST))
        store.discard(ShardId(7, 0, 2, FIRST))
        assert not store.has_shard(ShardId(7, 0, 2, FIRST)) and self.steps() == [4]
        self.assert_sound()

    def test_what_is_durable_is_not_discarded(self) -> None:
        store = self.open()
        _save(store, 4)
        store.discard(ShardId(4, 0, 1, FIRST))
        self.assert_sound()
        assert self.steps() == [4]

    def test_a_damaged_manifest_is_told_of_and_can_be_written_anew(self) -> None:
        store = self.open()
        _save(store, 4, 5)
        self.damage(5)
        assert self.steps() == [4] and [step for step, _ in self.open().damaged()] == [5]
        before = {name for name in self.everything() if name.endswith(".safetensors")}
        _save(self.open(), 5, incarnation=replace(SECOND, parent_step=4))
        self.open().clean_up()
        assert self.steps() == [4, 5]
        self.assert_sound()
        kept = {name for name in self.everything() if name.endswith(".safetensors")}
        assert len(kept) == len(before) + 1  # a person may want the damaged one's shards

    # -- what can't be read -------------------------------------------------------------------------------------

    def test_what_cant_be_read_is_passed_over_and_stays(self) -> None:
        _save(self.open(), 1, 2, 3)
        with self.hidden(1):
            contents = self.open().contents()
            assert [entry.stamp.step for entry in contents.published] == [2, 3]
            assert [step for step, _ in contents.damaged] == [step for step, _ in contents.unread] == [1]
            assert step_dir(1) in contents.unread[0][1]
            _save(self.open(), 4)
            self.open().clean_up()
            assert self.open().prune(2, None) == [2] and self.steps() == [3, 4]
        assert self.steps() == [1, 3, 4] and self.open().contents().unread == []
        self.assert_sound()

    def test_nothing_older_goes_while_a_newer_one_cant_be_read(self) -> None:
        _save(self.open(), 1, 2, 3, 4, 5)
        _save(self.open(), 3, incarnation=replace(SECOND, parent_step=2))
        with self.hidden(3):  # it supersedes 4 and 5, so that 2 is the newest but one
            assert self.open().prune(2, None) == []
        assert sorted(self.open().prune(2, None))[-2:] == [4, 5] and self.steps()[-2:] == [2, 3]

    def test_what_an_unread_start_is_writing_stays(self) -> None:
        _save(self.open(), 1, 2, 5)
        second = replace(SECOND, parent_step=2)
        _save(self.open(), 3, incarnation=second)
        for incarnation in (FIRST, second):
            _write(self.open(), ShardId(4, 0, 2, incarnation))
        with self.hidden(3):
            self.open().clean_up()
            assert not self.open().has_shard(ShardId(4, 0, 2, FIRST))
        assert self.open().has_shard(ShardId(4, 0, 2, second))

    def test_where_none_can_be_read_that_is_an_error(self) -> None:
        _save(self.open(), 1)
        with self.hidden(1):
            assert all(map(_refused, (self.open().published, self.open().damaged, self.open().clean_up)))
        assert self.steps() == [1]

    def test_what_cant_be_read_is_not_replaced(self) -> None:
        _save(self.open(), 1, 2)
        later = ShardId(2, 0, 1, replace(SECOND, parent_step=1))
        with self.hidden(2):
            before = self.everything()
            assert _refused(lambda: (_write(self.open(), later), self.open().publish(later)))
            assert self.everything() >= before
        assert self.open().durable(ShardId(2, 0, 1, FIRST))
        _write(self.open(), later)
        assert self.open().publish(later) and self.open().durable(later)

    # -- death --------------------------------------------------------------------------------------------------

    def test_who_dies_in_the_middle_leaves_nothing_half(self) -> None:
        """At every point of a drain: nothing half is visible, and the next one completes and tidies up."""
        tried = []
        for number, point in enumerate(self.points):
            store, step = self.open(), 10 * (number + 1)
            _save(store, step)
            store.prune(1, None)
            arguments = self.root, str(step + 1), str(self.big // 2)
            command = [sys.executable, "-c", _SAVE, *arguments]
            died = subprocess.run(command, env=_environment(point), timeout=120, check=False).returncode
            assert died in (0, _KILLED)
            tried += [point] * (died == _KILLED)
            assert set(self.steps()) in ({step}, {step + 1}, {step, step + 1}), point
            self.assert_sound()
            save_and_tidy(*arguments)
            assert self.steps() == [step + 1], point
            self.assert_sound()
            assert not any(f"{step:010d}" in name for name in self.everything()), point
        assert tried


def _environment(point: str) -> dict[str, str]:
    return {**os.environ, "REKINDLE_FAILPOINT": point}
