"""Two processes at one directory: one publishes, pins or saves anew while the other tidies."""

from __future__ import annotations

from functools import partial
from itertools import count
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
