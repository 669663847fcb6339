"""Packs of compile caches in a directory: whole or not there, nobody else's, and bounded."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.storage import packs
from rekindle.storage.packs import Packs

CHAIN = "torch-1"
is_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")


@pytest.fixture
def root(root: Path) -> Path:
    root.mkdir()
    return root


def contents(store: Packs) -> dict[str, bytes | None]:
    return {entry.path: data for pack in store.list() for entry, data in store.read(pack)}


def age(root: Path, seconds: float) -> None:
    """Make all that is there older."""
    for path in (root / "compile").rglob("*"):
        if path.is_file():
            info = path.stat()
            os.utime(path, (info.st_atime - seconds, info.st_mtime - seconds))


def test_what_was_written_is_read(root):
    store = Packs(root, CHAIN)
    assert store.list() == []
    store.write({"inductor/a": b"first", "triton/b/c": b""})
    store.write({"inductor/d": b"second"})
    assert contents(Packs(root, CHAIN)) == {"inductor/a": b"first", "triton/b/c": b"", "inductor/d": b"second"}
    assert (root / "compile").stat().st_mode & 0o777 == 0o700
    assert Packs(root, "torch-2").list() == []


def test_the_newest_pack_comes_first(root):
    store = Packs(root, CHAIN)
    store.write({"inductor/a": b"old"})
    age(root, 10)
    store.write({"inductor/a": b"new"})
    assert [next(data for _, data in store.read(pack)) for pack in store.list()] == [b"new", b"old"]


def test_a_root_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        Packs(tmp_path / "unmounted", CHAIN).write({"inductor/a": b"x"})
    assert not (tmp_path / "unmounted").exists()


@pytest.mark.parametrize("after", ["mkdir", "create", "write", "fsync", "rename"])
def test_a_writer_that_dies_leaves_nothing_that_is_read(root, after):
    """After each kind of call, the first and every later one."""
    for times in range(1, 4):
        code = f"""
import os, signal
from pathlib import Path
from rekindle.storage import disk
from rekindle.storage.packs import Packs
left, plain = [{times}], disk.{after}
def dying(*arguments):
    result = plain(*arguments)
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
disk.{after} = dying
Packs(Path({str(root)!r}), {CHAIN!r}).write({{"inductor/a": b"x" * 100_000}})
"""
        done = subprocess.run([sys.executable, "-c", code], check=False)
        found = contents(Packs(root, CHAIN))
        assert found in ({}, {"inductor/a": b"x" * 100_000})
        assert found or done.returncode == -signal.SIGKILL
        Packs(root, CHAIN).write({"inductor/a": b"x" * 100_000})
        assert contents(Packs(root, CHAIN)) == {"inductor/a": b"x" * 100_000}
        shutil.rmtree(root / "compile")


def test_two_writers_at_once_do_each_other_no_harm(root):
    code = "import sys; from pathlib import Path; from rekindle.storage.packs import Packs\n"
    code += "store = Packs(Path(sys.argv[1]), sys.argv[2]); sys.stdin.read()\n"
    code += "for n in range(20):\n    store.write({f'inductor/{n}': bytes([n]) * 1000}); store.make_room()\n"
    writers = [
        subprocess.Popen([sys.executable, "-c", code, root, CHAIN], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for writer in writers:
        writer.stdin.close()
    assert [writer.stderr.read() for writer in writers] == [b""] * 3
    assert [writer.wait() for writer in writers] == [0] * 3
    assert contents(Packs(root, CHAIN)) == {f"inductor/{n}": bytes([n]) * 1000 for n in range(20)}
    assert not [path for path in (root / "compile").rglob(".*")]


@pytest.mark.parametrize("harm", ["flip", "cut", "grow", "empty"])
def test_damage_is_noticed(root, harm):
    store = Packs(root, CHAIN)
    store.write({"inductor/a": b"first", "inductor/b": b"second"})
    for ending, sound in ((".pack", {"inductor/b": b"second"}), (".json", {})):
        (path,) = (root / "compile" / CHAIN).glob(f"*{ending}")
        whole = path.read_bytes()
        harmed = {"flip": bytes([whole[0] ^ 1]) + whole[1:], "cut": whole[:-1], "grow": whole + b"x", "empty": b""}
        path.write_bytes(harmed[harm])
        again = Packs(root, CHAIN)
        found = {name: data for name, data in contents(again).items() if data is not None}
        assert found == (sound if harm == "flip" else {})
        assert bool(again.damaged) == (ending == ".json")
        path.write_bytes(whole)
    assert len(contents(Packs(root, CHAIN))) == 2


@pytest.mark.parametrize("place", ["compile", f"compile/{CHAIN}"])
@pytest.mark.parametrize("harm", ["open", pytest.param("foreign", marks=is_root)])
def test_a_folder_that_is_not_ours_alone_is_refused(root, place, harm):
    Packs(root, CHAIN).write({"inductor/a": b"x"})
    os.chown(root / place, 4321, -1) if harm == "foreign" else (root / place).chmod(0o770)
    why = "belongs to user 4321" if harm == "foreign" else "is open to others"
    for use in (Packs.list, lambda store: store.write({"inductor/b": b"x"})):
        with pytest.raises(PermissionError, match=why):
            use(Packs(root, CHAIN))


@pytest.mark.parametrize("harm", ["open", pytest.param("foreign", marks=is_root), "link"])
def test_a_file_that_is_not_ours_alone_is_refused(root, tmp_path, harm):
    store = Packs(root, CHAIN)
    store.write({"inductor/a": b"x"})
    (path,) = (root / "compile" / CHAIN).glob("*.pack")
    if harm == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert store.list() == []
    else:
        os.chown(path, 4321, -1) if harm == "foreign" else path.chmod(0o666)
        with pytest.raises(PermissionError):
            contents(store)


def test_a_link_in_place_of_the_folder_is_refused(root, tmp_path):
    store = Packs(root, CHAIN)
    store.write({"inductor/a": b"x"})
    (root / "compile").rename(tmp_path / "elsewhere")
    (root / "compile").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        store.list()


def test_the_oldest_go_when_there_is_too_much(root, monkeypatch):
    for number in range(4):
        Packs(root, f"torch-{number % 2}").write({f"inductor/{number}": bytes(1000)})
        age(root, 10)
    monkeypatch.setattr(packs, "MAX_BYTES", 2500)  # indexes count too
    Packs(root, CHAIN).make_room()
    assert [path for n in range(2) for path in contents(Packs(root, f"torch-{n}"))] == ["inductor/2", "inductor/3"]
    monkeypatch.setattr(packs, "_MOST_PACKS", 1)
    Packs(root, CHAIN).make_room()
    assert contents(Packs(root, "torch-0")) == {}
    assert list(contents(Packs(root, "torch-1"))) == ["inductor/3"]


def test_what_dead_writers_left_goes_with_the_oldest(root, monkeypatch):
    store = Packs(root, CHAIN)
    store.write({"inductor/a": b"x"})
    folder = root / "compile" / CHAIN
    (folder / "0123.pack").write_bytes(b"x")
    (folder / ".0123.json.abcd.tmp").write_bytes(b"x")
    age(root, 10)
    store.write({"inductor/b": b"x"})
    store.make_room()
    assert len(list(folder.iterdir())) == 6, "their writers may be at it"
    monkeypatch.setattr(packs, "_MOST_PACKS", 1)
    store.make_room()
    assert len(list(folder.iterdir())) == 2
    assert list(contents(store)) == ["inductor/b"]


def test_a_full_disk_leaves_nothing_behind(small_tmpfs):
    place = small_tmpfs(1 << 20)
    with pytest.raises(OSError, match="No space left"):
        Packs(place, CHAIN).write({"inductor/a": bytes(2 << 20)})
    assert not [path for path in place.rglob("*") if path.is_file()]
    Packs(place, CHAIN).write({"inductor/a": b"x"})
    assert contents(Packs(place, CHAIN)) == {"inductor/a": b"x"}
