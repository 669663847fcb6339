"""Paths as a careless program or a hostile neighbour leaves them: links, pipes, rights, names."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.cli.main import main
from rekindle.common.timeouts import in_background
from rekindle.files import finding, flushing, saving
from rekindle.memory.files_dir import FilesDir
from rekindle.storage.path_place import PathPlace


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_flush_waits_for_the_file_that_a_link_leads_to(drainer: FileDrainer, root: Path) -> None:
    root.mkdir()
    (root / "step").write_bytes(b"old")
    (root / "latest").symlink_to("step")
    rekindle.save(b"new", root / "step")
    with pytest.raises(rekindle.NotDurableError, match="step"):
        rekindle.flush(root / "latest", timeout=0)
    assert drainer.tick()
    rekindle.flush(root / "latest", timeout=0)


def test_preload_brings_the_file_that_a_link_leads_to(
    store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir()
    (root / "step").write_bytes(b"data")
    (root / "latest").symlink_to("step")
    rekindle.files.preload(root / "latest")
    monkeypatch.setattr(PathPlace, "open", lambda self: pytest.fail("storage was read"))
    assert rekindle.load(root / "latest", raw=True) == rekindle.load(root / "step", raw=True) == b"data"


@pytest.mark.parametrize("written", ["{}", "file://{}"])
def test_a_load_from_memory_does_not_wait_for_storage_that_hangs(
    written: str, drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rekindle.save(b"data", root / "x")
    hangs = threading.Event()
    for module in (saving, finding, flushing):
        monkeypatch.setattr(module, "_LOOK", 0.2, raising=False)
    monkeypatch.setattr(os.path, "islink", lambda path: hangs.wait(120) and False)
    try:
        assert in_background(lambda: rekindle.load(written.format(root / "x")), "test-load").result(60) == b"data"
    finally:
        hangs.set()


@pytest.mark.parametrize("trap", ["link", "hard link", "pipe"])
def test_what_stands_at_the_temporary_name_is_not_written_to(
    trap: str, drainer: FileDrainer, store: FilesDir, root: Path
) -> None:
    """Whoever may write into the directory sees the name, and knows that the next upload has it again."""
    root.mkdir()
    victim = root.with_name("victim")
    victim.write_bytes(b"mine")
    rekindle.save(b"data", root / "x")
    temporary = PathPlace(root / "x", store.id())._temporary
    if trap == "link":
        temporary.symlink_to(victim)
    elif trap == "hard link":
        os.link(victim, temporary)
    else:
        os.mkfifo(temporary)
    assert drainer.tick()
    assert (root / "x").read_bytes() == b"data" and not (root / "x").is_symlink()
    assert victim.read_bytes() == b"mine" and os.listdir(root) == ["x"]


@pytest.mark.parametrize(("mask", "rights"), [(0o077, 0o600), (0o002, 0o664), (0o022, 0o644)])
@pytest.mark.parametrize("how", ["memory", "placeholder", "storage"])
def test_a_new_file_has_the_rights_that_its_program_gives_files(
    mask: int, rights: int, how: str, umask: None, drainer: FileDrainer, root: Path
) -> None:
    """Not those of the program that happened to start the agent."""
    os.umask(mask)
    if how == "storage":
        rekindle.files.configure(limit=1)
    assert rekindle.save(b"data", root / "x", placeholder=how == "placeholder") == how.replace("placeholder", "memory")
    os.umask(0o027)
    assert how == "storage" or drainer.tick()
    assert (root / "x").read_bytes() == b"data" and stat.S_IMODE((root / "x").stat().st_mode) == rights


def test_a_file_that_this_user_may_not_write_is_not_replaced() -> None:
    """As ``torch.save`` does not: its owner protects it."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o777)
        (folder / "x").write_bytes(b"protected")
        (folder / "x").chmod(0o444)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(rekindle.UsageError, match="no right to write"):
                PathPlace(folder / "x").check()
            PathPlace(folder / "y").check()
        finally:
            os.seteuid(user)
    finally:
        shutil.rmtree(folder)


def test_a_working_directory_that_is_gone_is_named(
    drainer: FileDrainer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for call in (lambda: rekindle.save(b"data", "x"), lambda: rekindle.load("x"), lambda: rekindle.flush("x")):
        with pytest.raises(rekindle.UsageError, match="working directory"):
            call()
    assert rekindle.save(b"data", root / "x") == "memory"


def test_bytes_in_the_order_of_another_language(drainer: FileDrainer, root: Path) -> None:
    view = memoryview(numpy.asfortranarray(numpy.arange(12, dtype=numpy.int32).reshape(3, 4)))
    rekindle.save(view, root / "x")
    assert rekindle.load(root / "x") == view.tobytes()


def test_names_that_are_no_text_are_listed(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    name = os.fsdecode(b"caf\xe9.pt")
    rekindle.save(b"data", root / name)
    for options in (["ls", "--files"], ["ls", "--files", "--json"], ["status", "--files"]):
        done = CliRunner().invoke(main, options)
        assert done.exit_code in (0, 1) and not isinstance(done.exception, UnicodeError), options
    assert drainer.tick() and os.listdir(os.fsencode(root)) == [b"caf\xe9.pt"]
    done = CliRunner().invoke(main, ["flush", str(root / name)])
    assert done.exit_code == 0, done.output
