"""What a start finds out of its root: that nothing can be written there, or that nodes have different ones."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.session import root_check
from tests.conftest import Disk, have_own_mounts
from tests.integrations.dcp.ranks import ranks


def start(root: Path, memory: Path) -> rekindle.Checkpointer:
    return rekindle.Checkpointer(root, {"values": rekindle.Values(weights=torch.zeros(10))}, memory=memory)


@pytest.fixture(params=["a file in its place", "a file above it", "a read-only disk"])
def refused(request: pytest.FixtureRequest, tmp_path: Path, mounted: Callable[..., Path]) -> tuple[Path, str]:
    """A root that can't be written to, and what to do about it."""
    if request.param == "a read-only disk":
        return mounted("disk", "-t", "tmpfs", "-o", "ro,size=8m", "tmpfs") / "run", "mount it writable again"
    (tmp_path / "run").write_text("in the way")
    below = tmp_path / "run" if "in its" in request.param else tmp_path / "run" / "17"
    return below, "there is a file where a directory should be"


def test_a_root_that_cant_be_written_is_an_error_at_once(refused: tuple[Path, str], memory: Path) -> None:
    root, advice = refused
    with pytest.raises(rekindle.UsageError, match=advice):
        start(root, memory)
    job = JobDir.of(root, memory_base(memory))
    assert job.trainers() == {} and job.agent() is None, "nothing is left behind"


def _without_rights(rank: int, root: Path, memory: Path) -> str:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        start(root, memory)
    except rekindle.UsageError as error:
        return str(error)
    return "started"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_root_that_is_somebody_elses_is_an_error_at_once(tmp_path: Path, memory: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    memory.chmod(0o777)
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(path.stat().st_mode | 0o055)
    assert "give this user the right" in ranks(1, _without_rights, tmp_path / "theirs" / "run", memory)[0]
    (tmp_path / "read").mkdir(mode=0o755)
    assert "give this user the right" in ranks(1, _without_rights, tmp_path / "read" / "run", memory)[0]


def test_a_restart_with_something_in_memory_only_warns(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = start(root, memory)
    ckpt.restore()
    ckpt.save(1, wait="memory")
    del ckpt
    gc.collect()
    while root.exists():
        root.rename(root.with_name("away"))
    root.write_text("in the way")
    ckpt = start(root, memory)
    assert f"saves stay in memory until storage takes them: {root}" in caplog.text
    assert ckpt.restore() == 1
    root.unlink()
    ckpt.save(2, wait="durable", timeout=60)
    ckpt.close(timeout=60)


@pytest.mark.parametrize("what", ["no directory", "a link that leads nowhere"])
def test_what_is_no_directory_where_claims_belong_is_an_error_at_once(what: str, root: Path, memory: Path) -> None:
    """Each commit would fail."""
    root.mkdir()
    if "link" in what:
        (root / "claims").symlink_to(root / "unmounted")
    else:
        (root / "claims").write_text("mine")
    with pytest.raises(rekindle.UsageError, match=rf"/claims: is {what}, .*: give what is there another name"):
        start(root, memory)
    job = JobDir.of(root, memory_base(memory))
    assert job.trainers() == {} and job.agent() is None, "nothing is left behind"
    assert (root / "claims").is_symlink() or (root / "claims").read_text() == "mine"


def test_a_file_where_claims_belong_costs_a_restart_nothing(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = start(root, memory)
    ckpt.restore()
    root.mkdir()
    (root / "claims").write_text("mine")
    ckpt.save(1, wait="memory")
    del ckpt
    gc.collect()
    ckpt = start(root, memory)
    assert f"saves stay in memory until storage takes them: {root}/claims: is no directory" in caplog.text
    assert ckpt.restore() == 1
    (root / "claims").unlink()
    ckpt.save(2, wait="durable", timeout=60)
    ckpt.close(timeout=60)


# -- several nodes ---------------------------------------------------------------------------------------------------


def _node(rank: int, disk: Disk, memories: list[Path], blind: bool) -> str:
    """Each rank is a node: it has a memory of its own, and mounts."""
    if blind and rank == 1:
        have_own_mounts()
        disk.unmount()
    root_check._VISIBLE_WITHIN = 1.0
    try:
        ckpt = start(disk.root, memories[rank])
    except rekindle.UsageError as error:
        return str(error)
    began = ckpt.restore()
    ckpt.save(began + 1, wait="durable", timeout=60)
    ckpt.close(timeout=60)
    return f"went on from {began}"


def test_nodes_that_have_different_roots_are_told_at_the_start(disk: Disk, small_tmpfs: Callable[[int], Path]) -> None:
    memories = [small_tmpfs(8 << 20), small_tmpfs(8 << 20)]
    for told in ranks(2, _node, disk, memories, True):
        assert "(rank 1) does not see what node" in told and "mount the same file system there" in told
    assert not list(disk.root.iterdir()), "the probe is gone"
    assert ranks(2, _node, disk, memories, False) == ["went on from 0"] * 2
    assert [path.name for path in disk.root.glob("step-*")] == ["step-0000000001"]
