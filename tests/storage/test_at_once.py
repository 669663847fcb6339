"""Two processes at one directory: one publishes, pins or saves anew while the other tidies."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import combinations_with_replacement, count
from pathlib import Path

import pytest

from rekindle.format.lineage import ShardId
from rekindle.format.names import step_dir
from rekindle.storage import disk
from rekindle.storage.posix import PosixStore
from tests.interleave import before_call
from tests.storage.saved import ANEW, FIRST, assert_sound, save, steps, tidy, write


@pytest.fixture
def store(root: Path) -> PosixStore:
    return PosixStore(root)


def publish(store: PosixStore, stamp: ShardId, done: list[bool]) -> None:
    done.append(store.publish(stamp))


@pytest.mark.parametrize("kind", ["an overtaken step", "a step that an older start has, too"])
@pytest.mark.parametrize("tidies_first", [False, True])
def test_whoever_publishes_while_another_tidies_shows_only_what_is_whole(tmp_path, monkeypatch, kind, tidies_first):
    """At each moment between two changes that one of the two makes, the other does all of its work."""
    for number in count():
        store = PosixStore(tmp_path / f"run-{number}")
        save(store, 1, 3)
        late = write(store, 2) if kind == "an overtaken step" else write(store, 1, incarnation=ANEW)
        done: list[bool] = []
        works = [partial(tidy, store), partial(publish, store, late, done)]
        first, second = works if tidies_first else reversed(works)
        with monkeypatch.context() as patch:
            met = before_call(number, disk, disk.__all__, second, patch)
            first()
        assert_sound(store)
        if late.incarnation == ANEW and done == [True]:
            assert store.durable(late), "published, and newer than all that was surplus"
        tidy(store)
        assert_sound(store)
        assert len(steps(store)) == 1
        if not met():
            break
    assert number > 5


def test_a_manifest_does_not_come_to_a_directory_that_a_rank_has_made_anew(store, root):
    save(store, 3)
    write(store, 1, 0, 2, ANEW)
    last = write(store, 1, 1, 2, ANEW)

    def meanwhile() -> None:
        store.clean_up()
        write(store, 1, 0, 2, ANEW)

    assert not store.publish(last, meanwhile)
    assert steps(store) == [3]
    write(store, 1, 1, 2, ANEW)
    assert store.publish(last) and store.durable(last)
    assert_sound(store)


@pytest.mark.parametrize("withdraws_first", [False, True])
def test_a_part_that_is_withdrawn_while_the_last_one_comes_leaves_no_hole(tmp_path, monkeypatch, withdraws_first):
    """At each moment between two changes that one of the two makes, the other does all of its work."""
    early, seen = ShardId(1, 0, 2, FIRST), set()
    for number in count():
        store = PosixStore(tmp_path / f"run-{number}")
        for step in (1, 2, 3):
            write(store, step, 0, 2)
        done: list[bool] = []
        gone: list[int] = []

        def complete(store=store, done=done) -> None:
            with suppress(FileNotFoundError):  # an agent tries again
                publish(store, write(store, 1, 1, 2), done)

        works = [lambda store=store, gone=gone: gone.extend(store.withdraw(early, [0], 2)), complete]
        first, second = works if withdraws_first else reversed(works)
        with monkeypatch.context() as patch:
            met = before_call(number, disk, disk.__all__, second, patch)
            first()
        assert_sound(store)
        assert steps(store) == [1] * (done == [True]) and not (gone and done == [True])
        assert gone or store.publish(early), "all parts are there"
        assert_sound(store)
        seen.add(bool(gone))
        if not met():
            break
    assert seen == {False, True} and number > 3


def test_a_live_step_gets_its_name_back_that_a_killed_remover_had_moved_aside(store, root):
    save(store, 1, 2)
    (root / step_dir(2)).rename(root / f"{step_dir(2)}.{'d' * 16}.retired")
    assert not store.durable(ShardId(2, 0, 1, FIRST))
    store.clean_up()
    assert store.durable(ShardId(2, 0, 1, FIRST)) and steps(store) == [1, 2]
    assert {path.name for path in root.iterdir()} == {step_dir(1), step_dir(2)}


def test_what_is_pinned_when_retention_has_just_chosen_it_stays(store, monkeypatch):
    save(store, 1, 2, 3)
    with monkeypatch.context() as patch:
        met = before_call(0, disk, ["rename"], lambda: store.pin(store.find(2).stamp), patch)
        assert store.prune(1, None) == [1]
    assert met() and steps(store) == [2, 3]
    assert_sound(store)


def test_a_pin_is_of_the_start_that_was_asked_for_though_a_later_one_takes_the_place(store, monkeypatch):
    save(store, 1, 2)
    with monkeypatch.context() as patch:
        met = before_call(0, disk, ["create"], lambda: save(store, 1, incarnation=ANEW), patch)
        store.pin(ShardId(1, 0, 1, FIRST))
    assert met() and (1, FIRST, True) in [(p.stamp.step, p.stamp.incarnation, p.pinned) for p in store.published()]


@pytest.mark.parametrize("prunes_first", [False, True])
def test_a_pin_and_a_removal_at_the_same_time_tell_the_truth(tmp_path, monkeypatch, prunes_first):
    """At each moment between two changes that one of the two makes, the other does all of its work."""
    for number in count():
        store = PosixStore(tmp_path / f"run-{number}")
        save(store, 1, 2)
        told: list[bool] = []
        gone: list[int] = []
        works = [partial(pin, store, told), lambda store=store, gone=gone: gone.extend(store.prune(1, None))]
        first, second = reversed(works) if prunes_first else works
        with monkeypatch.context() as patch:
            met = before_call(number, disk, disk.__all__, second, patch)
            first()
        if met():
            assert pinned(store) == [1] * told[0] and gone == [1] * (not told[0]), number
            assert_sound(store)
            tidy(store)
            assert pinned(store) == [1] * told[0] and steps(store) == [1] * told[0] + [2], number
            assert_sound(store)
        else:
            break
    assert number > 2


def test_a_pin_that_was_reported_holds_though_who_removes_the_step_is_killed(tmp_path, monkeypatch):
    """The pin comes before one of the changes that the removal makes, and the kill before the same or a later one."""
    held = 0
    for came, died in combinations_with_replacement(range(9), 2):
        store = PosixStore(tmp_path / f"run-{came}-{died}")
        save(store, 1, 2)
        told: list[bool] = []
        calls, others = count(), []

        def replaced(real, came=came, died=died, store=store, told=told, calls=calls, others=others):
            def call(*args):
                number = -1 if others else next(calls)
                if number == came:
                    others.append(number)
                    pin(store, told)
                    others.clear()
                if number >= died:
                    raise KeyboardInterrupt
                return real(*args)

            return call

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            for name in disk.__all__:
                patch.setattr(disk, name, replaced(getattr(disk, name)))
            store.prune(1, None)
        store.clean_up()
        if told == [True]:
            assert pinned(store) == [1], (came, died)
            held += 1
        assert_sound(store)
        assert steps(store) in ([1, 2], [2])
    assert held > 5


def pin(store: PosixStore, told: list[bool]) -> None:
    """Pins step 1, or gives it up at once where it is just being removed."""
    told.append(False)
    with suppress(FileNotFoundError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosixStore, "poll", 0.0)
        store.pin(ShardId(1, 0, 1, FIRST))
        told[0] = True


def pinned(store: PosixStore) -> list[int]:
    return [entry.stamp.step for entry in store.published() if entry.pinned]
