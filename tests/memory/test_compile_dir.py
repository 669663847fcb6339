"""The directory of compile caches: nobody else's, in use as long as somebody says so, and free of what is in pieces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rekindle.cli.main import main
from rekindle.errors import MemoryStoreError
from rekindle.format import compile_index
from rekindle.memory import compile_dir
from rekindle.memory.compile_dir import CompileDir
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.listing import jobs_in_memory

CHAIN = "torch-1"
is_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")


@pytest.fixture
def directory(memory: Path, root: Path) -> CompileDir:
    return CompileDir.of(root, memory_base())


@pytest.fixture
def library() -> bytes:
    """A real one."""
    import _ctypes

    return Path(_ctypes.__file__).read_bytes()


def put(directory: CompileDir, path: str, data: bytes = b"x") -> Path:
    directory.put(CHAIN, path, data)
    return directory.path / CHAIN / path


def test_it_lies_beside_the_job_and_is_no_job(directory, root):
    os.close(directory.use(CHAIN))
    job = JobDir.of(root, memory_base())
    job.create()
    assert CompileDir.beside(job).path == directory.path
    assert [found.path for found in jobs_in_memory(memory_base())] == [job.path]
    assert job.remove()
    assert directory.path.exists(), "the job's own memory goes without it"


@pytest.mark.parametrize("below", ["", CHAIN])
@pytest.mark.parametrize("harm", ["open", "link", "file", pytest.param("foreign", marks=is_root)])
def test_a_directory_that_is_not_ours_alone_is_refused(directory, tmp_path, harm, below):
    os.close(directory.use(CHAIN))
    place = directory.path / below
    if harm == "open":
        place.chmod(0o750)
    elif harm == "foreign":
        os.chown(place, 4321, -1)
    else:
        shutil.rmtree(place)
        elsewhere = tmp_path / "elsewhere"
        (elsewhere / "inductor").mkdir(parents=True)
        elsewhere.chmod(0o700)
        (elsewhere / "inductor" / "torn.so").touch()
        place.symlink_to(elsewhere) if harm == "link" else place.touch()
    with pytest.raises(MemoryStoreError, match=str(place)):
        directory.use(CHAIN)
    assert harm in ("open", "foreign") or (tmp_path / "elsewhere" / "inductor" / "torn.so").exists()
    if not below:
        assert directory.toolchain() is None


def is_removed(directory: CompileDir) -> bool:
    CompileDir.remove_abandoned(memory_base())
    return not directory.path.exists()


def test_it_stays_while_somebody_uses_it(directory):
    first, second = directory.use(CHAIN), directory.use(CHAIN)
    os.close(first)
    assert not is_removed(directory)
    os.close(second)
    assert is_removed(directory)


def test_it_stays_while_its_job_has_memory(directory, root):
    os.close(directory.use(CHAIN))
    job = JobDir.of(root, memory_base())
    job.create()
    assert not is_removed(directory)
    assert job.remove()
    assert is_removed(directory)


def test_a_strangers_memory_store_is_left_alone(directory):
    os.close(directory.use(CHAIN))
    memory_base().chmod(0o777)
    with pytest.raises(MemoryStoreError, match="is open to others"):
        CompileDir.remove_abandoned(memory_base())
    assert directory.path.exists()


def test_a_link_is_left_alone(directory, tmp_path):
    os.close(directory.use(CHAIN))
    (memory_base() / "other.compile").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    assert is_removed(directory)
    assert (tmp_path / "file").exists()


@pytest.mark.parametrize("how", ["root", "stale"])
def test_stop_removes_what_a_killed_launcher_left(directory, root, tmp_path, how):
    other, used = (CompileDir.of(tmp_path / name, memory_base()) for name in ("other", "used"))
    for one in (directory, other):
        os.close(one.use(CHAIN))
    descriptor = used.use(CHAIN)
    JobDir.of(tmp_path / "other", memory_base()).create()  # it has snapshots to lose
    CliRunner().invoke(main, ["stop", str(root) if how == "root" else "--stale"])
    assert not directory.path.exists()
    assert used.path.exists() and (how == "stale" or other.path.exists())
    os.close(descriptor)


def test_a_user_that_dies_lets_go(directory):
    code = "import sys; from pathlib import Path; from rekindle.memory.compile_dir import CompileDir\n"
    code += f"CompileDir(Path({str(directory.path)!r})).use({CHAIN!r}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        user.stdout.readline()
        assert not is_removed(directory)
        user.kill()
        user.wait()
    assert is_removed(directory)


def test_another_toolchains_files_go_with_its_last_user(directory):
    first = directory.use(CHAIN)
    put(directory, "inductor/a")
    second = directory.use("torch-2")
    assert directory.toolchain() == CHAIN
    os.close(first)
    os.close(second)
    os.close(directory.use("torch-2"))
    assert directory.toolchain() == "torch-2"


def test_what_may_be_of_use_elsewhere(directory):
    os.close(directory.use(CHAIN))
    put(directory, "inductor/ab/kernel.py")
    put(directory, "triton/hash/kernel.cubin")
    for path in ("inductor/locks/key.lock", "inductor/x.tmp", "inductor/h.gch", "triton/.k.tmp"):
        put(directory, path)
    (directory.path / CHAIN / "jax").mkdir()
    (directory.path / CHAIN / "jax" / "link").symlink_to("/etc/passwd")
    os.mkfifo(directory.path / CHAIN / "jax" / "pipe")
    put(directory, "unknown/file")
    assert sorted(directory.files(CHAIN)) == ["inductor/ab/kernel.py", "triton/hash/kernel.cubin"]


def test_a_file_that_changes_is_not_read(directory):
    os.close(directory.use(CHAIN))
    path = put(directory, "inductor/a", b"first")
    stamp = directory.files(CHAIN)["inductor/a"]
    assert directory.read(CHAIN, "inductor/a", stamp) == b"first"
    path.write_bytes(b"second")
    assert directory.read(CHAIN, "inductor/a", stamp) is None
    path.unlink()
    assert directory.read(CHAIN, "inductor/a", stamp) is None


def test_a_library_in_pieces_is_removed_by_the_first_user(directory, library):
    first = directory.use(CHAIN)
    whole = put(directory, "inductor/whole.so", library)
    torn = [put(directory, f"inductor/torn{cut}.so", library[:cut]) for cut in (0, 3, 64, 4096, len(library) - 1)]
    torn.append(put(directory, "inductor/zeros.o", bytes(len(library))))
    python = put(directory, "inductor/source.py", b"")
    stamps = directory.files(CHAIN)
    assert directory.read(CHAIN, "inductor/whole.so", stamps["inductor/whole.so"]) == library
    assert directory.read(CHAIN, "inductor/torn4096.so", stamps["inductor/torn4096.so"]) is None
    second = directory.use(CHAIN)
    assert all(path.exists() for path in torn), "the first user may be writing them"
    os.close(first)
    os.close(second)
    os.close(directory.use(CHAIN))
    assert whole.exists() and python.exists() and not any(path.exists() for path in torn)


def test_too_much_is_removed_by_the_first_user(directory, monkeypatch):
    os.close(directory.use(CHAIN))
    path = put(directory, "inductor/a", bytes(1000))
    os.close(directory.use(CHAIN))
    assert path.exists()
    monkeypatch.setattr(compile_dir, "MAX_BYTES", 999)
    os.close(directory.use(CHAIN))
    assert not path.exists()


def test_a_file_that_is_too_large_is_not_carried(directory, monkeypatch):
    os.close(directory.use(CHAIN))
    put(directory, "inductor/a", bytes(1000))
    assert directory.files(CHAIN)
    monkeypatch.setattr(compile_dir, "MAX_ENTRY", 999)
    assert compile_index.MAX_ENTRY > 999
    assert not directory.files(CHAIN)
