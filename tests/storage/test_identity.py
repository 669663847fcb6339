"""A root that was deleted, told from one that is not mounted: by real mounts of all kinds."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.memory.job_dir import JobDir
from rekindle.memory.notes import RootIdentity
from rekindle.storage.checks import root_identity
from rekindle.storage.identity import identify_root, shows_deletion
from rekindle.storage.posix import PosixStore


def umount(path: Path) -> None:
    subprocess.run(["umount", "-l", str(path)], check=True)


def mount(*command: str | Path) -> None:
    subprocess.run(["mount", *map(str, command)], check=True)


def written(root: Path) -> RootIdentity:
    root.mkdir(parents=True, exist_ok=True)
    (root / "checkpoint").write_text("of a run")
    return identify_root(root)


@pytest.mark.parametrize("how", ["root", "parents", "root made again", "parents made again", "contents", "moved away"])
def test_a_root_that_is_no_more_was_deleted(how: str, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "a" / "17"
    then = written(root)
    if how == "contents":
        (root / "checkpoint").unlink()
    elif how == "moved away":
        root.rename(root.with_name("old"))
    else:
        shutil.rmtree(root.parents[1] if how.startswith("parents") else root)
    if how.endswith("again"):
        root.mkdir(parents=True)
    assert shows_deletion(then, identify_root(root))


@pytest.fixture(params=["bind", "tmpfs", "overlay"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, mounted: Callable[..., Path]) -> tuple[Path, list[str | Path]]:
    """A mounted file system, and how to mount it again. A bind mount has the device of what lies below it."""
    for name in ("source", "upper", "work"):
        (tmp_path / name).mkdir()
    how: dict[str, list[str | Path]] = {
        "bind": ["--bind", tmp_path / "source"],
        "tmpfs": ["-t", "tmpfs", "tmpfs"],
        "overlay": ["-t", "overlay", "overlay", "-o"],
    }
    if request.param == "overlay":
        tmpfs = mounted("layers", "-t", "tmpfs", "tmpfs")  # an overlay's upper layer can't be on another overlay
        for name in ("source", "upper", "work"):
            (tmpfs / name).mkdir()
        how["overlay"].append(f"lowerdir={tmpfs / 'source'},upperdir={tmpfs / 'upper'},workdir={tmpfs / 'work'}")
    command = how[request.param]
    return mounted("disk", *map(str, command)), command


@pytest.mark.parametrize("inside", ["", "runs/17"])
def test_a_root_on_a_disk_that_is_not_mounted_was_not_deleted(inside: str, disk: tuple[Path, list[str | Path]]) -> None:
    place, _ = disk
    root = place / inside
    then = written(root)
    umount(place)
    assert not shows_deletion(then, identify_root(root)), "with the mount point there, and empty"
    root.mkdir(parents=True, exist_ok=True)
    assert not shows_deletion(then, identify_root(root)), "something has been made below the mount point"
    shutil.rmtree(place)
    assert not shows_deletion(then, identify_root(root)), "the mount point is gone, too"
    place.mkdir()
    mount("-t", "tmpfs", "tmpfs", place)
    assert not shows_deletion(then, identify_root(root)), (
        "another one is mounted in its place, with the same device and inode"
    )


def test_a_root_that_was_deleted_from_a_mounted_disk(disk: tuple[Path, list[str | Path]]) -> None:
    place, _ = disk
    root = place / "runs" / "17"
    then = written(root)
    shutil.rmtree(root.parent)
    assert shows_deletion(then, identify_root(root))


def test_a_root_that_is_the_mount_point_and_was_emptied(disk: tuple[Path, list[str | Path]]) -> None:
    place, _ = disk
    then = written(place)
    (place / "checkpoint").unlink()
    assert shows_deletion(then, identify_root(place))


def test_a_disk_that_was_mounted_again_without_the_root(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    place = mounted("disk", "-o", "loop", str(image))
    root = place / "runs" / "17"
    then = written(root)
    subprocess.run(["umount", str(place)], check=True)
    mount("-o", "loop", image, place)
    assert (root / "checkpoint").exists() and then == identify_root(root)
    shutil.rmtree(root)
    assert shows_deletion(then, identify_root(root))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_root_that_something_is_mounted_over_was_not_deleted(tmp_path: Path) -> None:
    root = tmp_path / "disk" / "run"
    (tmp_path / "disk").mkdir()
    then = written(root)
    mount("-t", "tmpfs", "tmpfs", tmp_path / "disk")
    try:
        assert not shows_deletion(then, identify_root(root))
    finally:
        umount(tmp_path / "disk")


def note(job: JobDir, store: PosixStore, step: int) -> None:
    job.notes.write_durable(step, root_identity(store, step))


@pytest.mark.parametrize("damage", [b"", b"[", b"{}", b"[[1, 2, 3]]", b'[["1", 2, 3, 4]]', b"[true]", b"7"])
def test_a_note_that_is_damaged_or_missing_tells_of_no_deletion(damage: bytes, root: Path, memory: Path) -> None:
    job = JobDir(memory / "job")
    job.path.mkdir()
    (root / "step-0000000001").mkdir(parents=True)
    (root / "step-0000000001" / "checkpoint.json").write_text("{}")
    store = PosixStore(root)
    note(job, store, 1)
    shutil.rmtree(root)
    assert store.was_deleted(job.notes.root_identity())
    (job.path / "root.json").write_bytes(damage)
    assert not store.was_deleted(job.notes.root_identity())


def test_what_was_not_seen_is_not_noted_and_an_older_note_goes(root: Path, memory: Path) -> None:
    job = JobDir(memory / "job")
    job.path.mkdir()
    (root / "step-0000000001").mkdir(parents=True)
    (root / "step-0000000001" / "checkpoint.json").write_text("{}")
    note(job, PosixStore(root), 1)
    assert job.notes.root_identity() == identify_root(root)
    note(job, PosixStore(root), 2)
    assert (job.notes.durable(), job.notes.root_identity()) == (2, None)
    note(job, PosixStore(root), 1)
    job.notes.forget_durable()
    assert (job.notes.durable(), job.notes.root_identity()) == (None, None)
