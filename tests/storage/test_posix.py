"""Checkpoints in a directory: what is durable, what goes, and what a killed writer leaves."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors import safe_open

from rekindle.cli.main import main
from rekindle.common import failpoints
from rekindle.common.failpoints import POINTS
from rekindle.errors import CorruptError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import MANIFEST, MANIFEST_KIND, receipt_name, shard_name, step_dir
from rekindle.format.receipt import parse_document
from rekindle.storage import disk
from rekindle.storage.catalog import STORAGE, find_copies
from rekindle.storage.posix import PosixStore
from rekindle.storage.verdicts import VERDICTS
from tests.conftest import make_shard
from tests.fork_server import context
from tests.storage.saved import FIRST, SECOND, assert_sound, content, files, save, steps, write


@pytest.fixture
def store(root: Path) -> PosixStore:
    return PosixStore(root)


# -- becoming durable ------------------------------------------------------------------------------------------------


def test_an_empty_or_missing_root_has_no_checkpoints(store, root):
    assert store.published() == [] and store.find(1) is None
    root.mkdir()
    assert store.published() == []
    store.clean_up()
    assert store.prune(1, None) == []


def test_a_root_that_can_not_be_listed_is_an_error(store, root):
    root.write_text("not a directory")
    with pytest.raises(OSError):
        store.published()


def test_a_published_checkpoint_is_the_documented_files(store, root):
    save(store, 12)
    expected = {shard_name(0, 1), receipt_name(0, 1), MANIFEST}
    assert files(root) == {f"{step_dir(12)}/{name}" for name in expected}
    with safe_open(root / step_dir(12) / shard_name(0, 1), framework="numpy") as file:
        assert file.get_tensor("v.x").tobytes() == content(12)["x"]
    assert_sound(store)


def test_the_manifest_names_every_shard_with_its_receipts_checksum(store, root):
    for rank in (1, 0):
        stamp = write(store, 3, rank, 2)
    assert store.publish(stamp)
    path = root / step_dir(3) / MANIFEST
    manifest = parse_document(path.read_bytes(), MANIFEST_KIND, path)
    assert json.loads(path.read_bytes()) == manifest
    assert [entry["file"] for entry in manifest["shards"]] == [shard_name(0, 2), shard_name(1, 2)]
    for entry in manifest["shards"]:
        assert entry["bytes"] == (root / step_dir(3) / entry["file"]).stat().st_size


def test_what_is_not_published_is_not_listed(store):
    save(store, 1)
    stamp = write(store, 2)
    assert steps(store) == [1]
    assert store.find(2) is None and not store.durable(stamp)
    assert store.has_shard(stamp)


def test_a_step_is_published_only_when_every_rank_is_there(store):
    stamp = write(store, 5, 0, 3)
    assert not store.publish(stamp)
    write(store, 5, 2, 3)
    assert not store.publish(stamp) and not store.durable(stamp)
    assert steps(store) == []
    write(store, 5, 1, 3)
    assert store.publish(stamp) and store.durable(stamp)
    assert steps(store) == [5]
    assert_sound(store)


def test_every_rank_may_publish(store, root):
    stamps = [write(store, 5, rank, 2) for rank in (0, 1)]
    assert all(store.publish(stamp) for stamp in stamps)
    assert steps(store) == [5] and len(list(root.iterdir())) == 1


def test_a_step_of_another_incarnation_does_not_complete_this_one(store):
    """Half the ranks wrote step 5; after the restart the other half did."""
    old = write(store, 5, 0, 2, FIRST)
    new = write(store, 5, 1, 2, SECOND)
    assert not store.publish(old) and not store.publish(new)
    write(store, 5, 0, 2, SECOND)
    assert store.publish(new)
    assert [p.stamp.incarnation for p in store.published()] == [SECOND]
    assert_sound(store)


def test_finding_a_step(store):
    save(store, 1, 5)
    save(store, 5, incarnation=SECOND)
    assert store.find(1).stamp.incarnation == FIRST
    assert store.find(5).stamp.incarnation == SECOND
    assert store.find(5, FIRST).stamp.incarnation == FIRST
    assert store.find(1, SECOND) is None and store.find(2) is None


def test_foreign_files_are_no_checkpoints_and_stay(store, root):
    save(store, 1, 2, 3)
    (root / "notes.txt").write_text("mine")
    (root / "step-12").mkdir()
    (root / "step-0000000099").mkdir()
    (root / "step-0000000099" / "mine.bin").write_text("mine")
    (root / step_dir(1) / "mine.bin").write_text("mine")
    store.prune(1, None)
    store.clean_up()
    assert steps(store) == [3]
    assert {"notes.txt", "step-0000000099/mine.bin", f"{step_dir(1)}/mine.bin"} <= files(root)


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "directory"])
def test_what_has_a_steps_name_makes_room_for_the_step_and_is_named(store, root, kind, caplog):
    root.mkdir()
    place = root / step_dir(2)
    if kind == "file":
        place.write_text("mine")
    elif kind == "directory":
        place.mkdir()
        (place / "mine.txt").write_text("mine")
    else:
        (root / "elsewhere").mkdir()
        place.symlink_to("elsewhere" if kind == "link" else "nowhere")
    save(store, 1, 2)
    store.clean_up()
    assert steps(store) == [1, 2]
    moved = [path for path in root.glob("*.retired*") if "link" not in kind]
    assert len(moved) == (0 if "link" in kind else 1), sorted(root.iterdir())
    assert [r.getMessage() for r in caplog.records] == [
        f"{place} is no checkpoint, and step 2 takes its name: it is {aside} now" for aside in moved
    ]
    assert all("mine" in (a.read_text() if a.is_file() else (a / "mine.txt").read_text()) for a in moved)


@pytest.mark.parametrize("name", [VERDICTS, f"{step_dir(2)}.{FIRST.id}.partial/.{shard_name(0, 1)}.tmp"])
def test_nothing_is_written_to_where_a_link_leads(store, root, memory, name):
    save(store, 1)
    mine = root.with_name("mine.txt")
    mine.write_text("mine")
    link = root / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(mine)
    if name == VERDICTS:
        assert CliRunner().invoke(main, ["verify", str(root)]).exit_code == 0
    else:
        with pytest.raises(OSError, match="symbolic link"):
            save(store, 2)
    assert mine.read_text() == "mine" and link.is_symlink() and steps(store) == [1]


def test_a_file_with_the_name_of_another_step_is_in_nobodys_way(store, root):
    root.mkdir()
    (root / step_dir(99)).write_text("mine")
    save(store, 1, 2, 3)
    store.prune(1, None)
    store.clean_up()
    assert steps(store) == [3] and (root / step_dir(99)).read_text() == "mine"


def test_a_directory_with_the_name_of_a_shard_is_left_alone(store, root):
    save(store, 1, 2)
    mine = root / step_dir(1) / shard_name(7, 9)
    mine.mkdir()
    (mine / "mine.txt").write_text("mine")
    assert store.prune(1, None) == [1]
    store.clean_up()
    assert steps(store) == [2] and files(root / step_dir(1)) == {f"{mine.name}/mine.txt"}


# -- a damaged source ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "name"), [(8, "header"), (4096, "'v.x'"), (-1, "'v.y'")])
def test_a_damaged_source_is_never_published_and_leaves_no_file(store, root, at, name):
    receipt, data = make_shard(ShardId(7, 0, 1, FIRST), content(7))
    damaged = bytearray(data)
    damaged[at] ^= 1
    with pytest.raises(CorruptError) as caught:
        store.write_shard(receipt, memoryview(damaged), lambda nbytes: None)
    assert name in str(caught.value) and "step 7" in str(caught.value)
    assert files(root) == set()
    assert not store.has_shard(receipt.stamp) and not store.publish(receipt.stamp)
    store.write_shard(receipt, memoryview(data), lambda nbytes: None)
    assert store.publish(receipt.stamp)
    assert_sound(store)


def test_progress_counts_the_file(store):
    receipt, data = make_shard(ShardId(7, 0, 1, FIRST), content(7))
    counted: list[int] = []
    store.write_shard(receipt, memoryview(data), counted.append)
    assert sum(counted) == receipt.file_bytes


def test_a_full_storage_is_an_error_and_leaves_no_file_behind(small_tmpfs):
    store = PosixStore(small_tmpfs(1 << 20) / "run")
    save(store, 1)
    receipt, data = make_shard(ShardId(2, 0, 1, FIRST), {"x": b"x" * (2 << 20)})
    with pytest.raises(OSError, match="No space left"):
        store.write_shard(receipt, memoryview(data), lambda nbytes: None)
    assert steps(store) == [1]
    assert all(name.startswith(step_dir(1) + "/") for name in files(store.root))
    assert_sound(store)


# -- retention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
def test_the_newest_steps_are_kept(store, root, keep, left):
    save(store, 1, 2, 3, 4, 5)
    assert store.prune(keep, None) == [step for step in range(1, 6) if step not in left]
    assert steps(store) == left
    assert {path.name for path in root.iterdir()} == {step_dir(step) for step in left}
    assert_sound(store)


def test_the_last_checkpoint_is_never_removed(store):
    save(store, 1)
    assert store.prune(0, None) == [] and steps(store) == [1]


def test_milestones_are_kept(store):
    save(store, *range(5, 46, 5))
    assert store.prune(2, 20) == [5, 10, 15, 25, 30, 35]
    assert steps(store) == [20, 40, 45]


def test_unfinished_steps_do_not_count_for_retention(store):
    save(store, 1, 2)
    write(store, 3)
    assert store.prune(2, None) == [] and steps(store) == [1, 2]


def test_abandoned_steps_stay_until_their_successor_is_durable(store, root):
    save(store, 3, 4, 5, 6)
    write(store, 5, incarnation=SECOND)  # begun, not durable
    assert store.prune(9, None) == []
    store.clean_up()
    assert steps(store) == [3, 4, 5, 6]
    save(store, 5, incarnation=SECOND)
    assert sorted(store.prune(9, None)) == [5, 6]
    assert [(p.stamp.step, p.stamp.incarnation.generation) for p in store.published()] == [(3, 1), (4, 1), (5, 2)]
    store.clean_up()
    assert {path.name for path in root.iterdir()} == {step_dir(step) for step in (3, 4, 5)}
    assert_sound(store)


def test_abandoned_milestones_go_too(store):
    save(store, 4, 10)
    save(store, 5, incarnation=SECOND)
    assert store.prune(9, 10) == [10]


def test_abandoned_steps_do_not_fill_the_places_of_live_ones(store):
    save(store, 4, 8, 9)
    save(store, 5, incarnation=SECOND)
    store.prune(2, None)
    assert [(p.stamp.step, p.stamp.incarnation.generation) for p in store.published()] == [(4, 1), (5, 2)]


def test_what_has_its_manifest_is_not_discarded_though_it_could_not_be_named(store, root, monkeypatch):
    """Another node may have found it, and told that it is durable."""
    stamp = write(store, 5)

    def refuse(path: Path, to: Path) -> None:
        if to == root / step_dir(5):
            raise PermissionError(errno.EACCES, "refused", str(to))
        os.rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "rename", refuse)
        with pytest.raises(PermissionError):
            store.publish(stamp)
        store.discard(stamp)
    assert steps(store) == [5]
    store.clean_up()
    assert store.durable(stamp)
    assert_sound(store)


# -- the same step twice ---------------------------------------------------------------------------------------------


def test_an_older_incarnations_step_is_moved_aside_and_removed_only_afterwards(store, root):
    save(store, 4, 5)
    save(store, 5, incarnation=SECOND)
    aside = root / f"{step_dir(5)}.{FIRST.id}.retired"
    assert aside.is_dir() and (aside / MANIFEST).exists()
    assert store.find(5).files.path == root / step_dir(5) and store.find(5).stamp.incarnation == SECOND
    assert {p.files.path.suffix for p in store.published()} == {"", ".retired"}
    assert_sound(store)
    store.prune(2, None)
    store.clean_up()
    assert not aside.exists()
    assert {path.name for path in root.iterdir()} == {step_dir(4), step_dir(5)}


def test_what_was_moved_aside_before_is_in_nobodys_way(store, root):
    save(store, 4, 5)
    aside = root / f"{step_dir(5)}.{FIRST.id}.retired"
    aside.mkdir()
    (aside / MANIFEST).write_bytes(b"of another publisher")
    save(store, 5, incarnation=SECOND)
    assert store.find(5).stamp.incarnation == SECOND and store.find(5).files.path == root / step_dir(5)
    assert len(store.published()) == 3


def test_a_drain_that_was_overtaken_does_not_replace_its_successors_step(store, root):
    late = write(store, 5, incarnation=FIRST)
    save(store, 5, incarnation=SECOND)
    store.publish(late)
    assert (root / step_dir(5)).is_dir()
    assert store.find(5).stamp.incarnation == SECOND and store.find(5).files.path == root / step_dir(5)
    store.clean_up()
    store.prune(9, None)
    store.clean_up()
    assert {path.name for path in root.iterdir()} == {step_dir(5)}
    assert_sound(store)


def test_publishing_again_changes_nothing(store, root):
    save(store, 1)
    before = {name: (root / name).stat().st_mtime_ns for name in files(root)}
    assert store.publish(ShardId(1, 0, 1, FIRST))
    assert {name: (root / name).stat().st_mtime_ns for name in files(root)} == before


# -- after a kill ----------------------------------------------------------------------------------------------------


def save_and_clean_up(root: Path, failpoint: str) -> None:
    failpoints.arm(failpoint)
    store = PosixStore(root)
    save(store, 3, 4, 5)
    save(store, 5, 6, incarnation=SECOND)
    store.prune(2, None)
    store.clean_up()


@pytest.mark.parametrize("point", [p for p in POINTS["drain"]])
@pytest.mark.parametrize("step", [3, 5])
def test_whatever_a_killed_writer_leaves_is_settled_by_the_next(store, root, point, step):
    writer = context.Process(target=save_and_clean_up, args=(root, f"{point}@{step}"))
    writer.start()
    writer.join(60)
    reached = not (point == "drain.aside" and step == 3)
    assert writer.exitcode == (-signal.SIGKILL if reached else 0)
    assert_sound(store)
    before = steps(store)
    assert before or step == 3, "a durable step is gone"
    store.clean_up()
    assert_sound(store)
    assert set(before) <= set(steps(store))
    assert all(p.files.path.suffix != ".partial" for p in store.published())

    third = Incarnation(3, "c" * 16, SECOND.id, 6)
    save(store, 7, 8, incarnation=third)
    store.prune(2, None)
    store.clean_up()
    assert steps(store) == [7, 8]
    assert {path.name for path in root.iterdir()} == {step_dir(7), step_dir(8)}
    assert not [name for name in files(root) if ".tmp" in name]
    assert_sound(store)


def test_a_durable_step_that_never_got_its_name_gets_it(store, root):
    save(store, 1)
    (root / step_dir(1)).rename(store._partial(ShardId(1, 0, 1, FIRST)))
    assert steps(store) == [1] and not store.durable(ShardId(1, 0, 1, FIRST))
    store.clean_up()
    assert store.durable(ShardId(1, 0, 1, FIRST))
    assert [path.name for path in root.iterdir()] == [step_dir(1)]


def test_settling_leaves_an_unfinished_newer_step_alone(store):
    save(store, 1)
    stamp = write(store, 2, 0, 2)
    store.clean_up()
    assert store.has_shard(stamp)
    write(store, 2, 1, 2)
    assert store.publish(stamp)


def test_settling_removes_unfinished_steps_that_were_overtaken(store, root):
    write(store, 1)
    save(store, 2)
    store.clean_up()
    assert [path.name for path in root.iterdir()] == [step_dir(2)]


def test_settling_removes_a_step_whose_removal_was_cut_short(store, root):
    save(store, 1, 2)
    (root / step_dir(1) / MANIFEST).unlink()
    assert steps(store) == [2]
    store.clean_up()
    assert [path.name for path in root.iterdir()] == [step_dir(2)]


def test_a_killed_writers_leftovers_are_written_over(store, root):
    stamp = ShardId(2, 0, 1, FIRST)
    directory = store._partial(stamp)
    directory.mkdir(parents=True)
    (directory / f".{shard_name(0, 1)}.tmp").write_bytes(b"half" * 100_000)
    save(store, 2)
    assert files(root) == {f"{step_dir(2)}/{name}" for name in (shard_name(0, 1), receipt_name(0, 1), MANIFEST)}
    assert_sound(store)


# -- listing both stores ---------------------------------------------------------------------------------------------


def test_a_survey_lists_the_newest_first(store):
    save(store, 3, 5)
    save(store, 5, incarnation=SECOND)
    copies = find_copies(None, store)
    assert [(c.step, c.incarnation.generation) for c in copies] == [(5, 2), (5, 1), (3, 1)]
    assert all(c.place == STORAGE and c.ranks == {0} for c in copies)
