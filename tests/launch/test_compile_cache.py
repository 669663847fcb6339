"""Compile caches of a job: what a start finds, what it says of what it doesn't, and that it starts all the same."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import rekindle
from rekindle.launch import compile_cache, toolchain
from rekindle.launch.toolchain import toolchain_name
from rekindle.memory.compile_dir import CompileDir
from rekindle.memory.job_dir import memory_base
from rekindle.storage.packs import Packs
from tests.launch.launcher import WARM, Launcher

SCRIPT = Path(__file__).with_name("compiled.py")
VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "JAX_COMPILATION_CACHE_DIR": "jax",
    "MS_COMPILER_CACHE_PATH": "mindspore",
}
ENTRIES = {"inductor/a": b"first", "triton/b/c": b"second"}
is_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
has_compiler = pytest.mark.skipif(
    not shutil.which("g++") and not shutil.which("clang++"), reason="torch.compile on the CPU needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is set, and none stays set."""
    for name in (*VARIABLES, "MS_COMPILER_CACHE_ENABLE"):
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)


@pytest.fixture
def root(root: Path) -> Path:
    root.mkdir()
    return root


class Loaded(NamedTuple):
    entries: int
    lines: list[tuple[str, str]]
    """Level and text of what was logged."""
    directory: Path


@pytest.fixture
def load(root: Path, memory: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Loaded]]:
    """Loads the caches as a process would that has just started."""
    made = []

    def load(timeout: float = 60.0) -> Loaded:
        for name in (*VARIABLES, "MS_COMPILER_CACHE_ENABLE"):
            os.environ.pop(name, None)
        caplog.clear()
        cache = rekindle.CompileCache(root)
        made.append(cache)
        with caplog.at_level(logging.INFO, "rekindle"):
            entries = cache.load(timeout)
        lines = [(record.levelname, record.getMessage()) for record in caplog.records]
        return Loaded(entries, lines, CompileDir.of(root, memory_base()).path / toolchain_name())

    yield load
    for cache in made:
        cache._release()


def held(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# -- what a start finds ----------------------------------------------------------------------------------------------


def test_a_fresh_node_has_what_storage_has(load, root):
    Packs(root, toolchain_name()).write(ENTRIES)
    found = load()
    assert found.entries == 2
    assert held(found.directory) == ENTRIES
    assert [(level, "2 entries (0.0 MB) came from storage" in text) for level, text in found.lines] == [("INFO", True)]
    assert {name: os.environ[name] for name in VARIABLES} == {
        name: str(found.directory / folder) for name, folder in VARIABLES.items()
    }
    assert os.environ["MS_COMPILER_CACHE_ENABLE"] == "1"
    assert found.directory.stat().st_mode & 0o777 == 0o700


def test_a_restart_on_the_same_node_fetches_what_is_new_only(load, root):
    store = Packs(root, toolchain_name())
    store.write(ENTRIES)
    load()
    assert load()[:2] == (0, [])
    (load().directory / "inductor" / "a").write_bytes(b"this node's own")
    store.write({"inductor/d": b"third"})
    again = load()
    assert again.entries == 1
    assert held(again.directory) == {"inductor/a": b"this node's own", "triton/b/c": b"second", "inductor/d": b"third"}


def test_a_first_start_has_nothing_and_says_nothing(load):
    found = load()
    assert found[:2] == (0, [])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(found.directory / "inductor")


def test_ranks_of_a_node_fetch_once(root, memory):
    Packs(root, toolchain_name()).write({f"inductor/{n}": bytes(1000) for n in range(50)})
    code = "import rekindle, sys; sys.stdin.readline(); "
    code += f"print(rekindle.CompileCache({str(root)!r}).load(), flush=True); sys.stdin.read()"
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)
    ]
    for rank in ranks:
        rank.stdin.write(b"\n")
        rank.stdin.flush()
    assert sorted(int(rank.stdout.readline()) for rank in ranks) == [0, 0, 0, 50]
    for rank in ranks:
        rank.communicate(timeout=60)
    assert not CompileDir.of(root, memory_base()).path.exists(), "the last one removes it"


def test_the_newest_of_several_versions_counts(load, root):
    store = Packs(root, toolchain_name())
    store.write({"cuda/index": b"old"})
    for path in (root / "compile").rglob("*.*"):
        os.utime(path, (1, 1))
    store.write({"cuda/index": b"new"})
    assert held(load().directory) == {"cuda/index": b"new"}


def test_an_older_version_stands_in_for_a_damaged_one(load, root):
    store = Packs(root, toolchain_name())
    store.write({"cuda/index": b"old"})
    for path in (root / "compile").rglob("*.*"):
        os.utime(path, (1, 1))
    store.write({"cuda/index": b"new"})
    (newest,) = (path for path in (root / "compile").rglob("*.pack") if path.read_bytes() == b"new")
    newest.write_bytes(b"NEW")
    assert held(load().directory) == {"cuda/index": b"old"}


# -- what it says of what it doesn't ---------------------------------------------------------------------------------


def the_line(found: Loaded) -> str:
    ((level, line),) = found.lines
    assert level == "WARNING" and line.endswith(": kernels without an entry are compiled anew")
    return line


def test_a_corrupt_entry_is_left_out_in_one_line(load, root):
    store = Packs(root, toolchain_name())
    store.write({"inductor/a": b"first", "inductor/b": b"second"})
    (pack,) = (root / "compile").rglob("*.pack")
    pack.write_bytes(b"X" + pack.read_bytes()[1:])
    found = load()
    assert held(found.directory) == {"inductor/b": b"second"}
    assert "1 damaged entries or packs are left out and removed" in the_line(found)
    assert load().lines == [], "it was removed, to be carried again"
    assert not [path for path in (root / "compile").rglob("*") if path.is_file()]


def test_a_corrupt_index_is_left_out_in_one_line(load, root):
    Packs(root, toolchain_name()).write(ENTRIES)
    (index,) = (root / "compile").rglob("*.json")
    index.write_bytes(index.read_bytes()[:-1])
    found = load()
    assert found.entries == 0
    assert "1 damaged entries or packs" in the_line(found)


@pytest.mark.parametrize("place", ["compile", "compile/TOOLCHAIN"])
@pytest.mark.parametrize("harm", ["open", pytest.param("foreign", marks=is_root)])
def test_a_strangers_folder_on_storage_is_refused_in_one_line(load, root, place, harm):
    Packs(root, toolchain_name()).write(ENTRIES)
    path = root / place.replace("TOOLCHAIN", toolchain_name())
    os.chown(path, 4321, -1) if harm == "foreign" else path.chmod(0o755)
    found = load()
    assert found.entries == 0 and held(found.directory) == {}
    line = the_line(found)
    assert ("belongs to user 4321, not to us" if harm == "foreign" else "is open to others (mode 755)") in line
    assert "TORCHINDUCTOR_CACHE_DIR" in os.environ, "restarts on this node are warm all the same"


@pytest.mark.parametrize("harm", ["open", pytest.param("foreign", marks=is_root)])
def test_a_strangers_directory_in_memory_is_refused_in_one_line(load, root, harm):
    Packs(root, toolchain_name()).write(ENTRIES)
    top = CompileDir.of(root, memory_base()).path
    top.mkdir(parents=True)
    top.parent.chmod(0o700)
    os.chown(top, 4321, -1) if harm == "foreign" else top.chmod(0o777)
    found = load()
    assert found.entries == 0
    assert ("belongs to user 4321, not to us" if harm == "foreign" else "is open to others") in the_line(found)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert list(top.iterdir()) == []


def test_what_another_torch_compiled_is_left_alone_in_one_line(load, root, monkeypatch):
    Packs(root, toolchain_name()).write(ENTRIES)
    before = toolchain_name()
    facts = toolchain.describe_toolchain() | {"torch": "2.99.0"}
    monkeypatch.setattr(toolchain, "describe_toolchain", lambda: facts)
    found = load()
    assert found.directory.name.startswith("torch-2.99.0-")
    assert found.entries == 0 and held(found.directory) == {}
    assert f"all there is was compiled by others ({before})" in the_line(found)


@pytest.mark.parametrize("fact", sorted(toolchain.describe_toolchain()))
def test_each_fact_of_the_toolchain_makes_another_name(monkeypatch, fact):
    before, facts = toolchain_name(), toolchain.describe_toolchain()
    assert toolchain_name() == before
    monkeypatch.setattr(toolchain, "describe_toolchain", lambda: facts | {fact: "another"})
    assert toolchain_name() != before


def test_the_toolchain_is_named_after_the_torch_that_is_installed():
    import torch

    assert toolchain_name().startswith(f"torch-{torch.__version__}-")


def test_storage_that_hangs_costs_the_time_that_it_is_given(load, monkeypatch):
    monkeypatch.setattr(Packs, "list", lambda self: time.sleep(600))
    found = load(timeout=0.2)
    assert "does not answer within" in the_line(found)
    assert "TORCHINDUCTOR_CACHE_DIR" in os.environ


def test_any_other_failure_costs_one_line(load, monkeypatch):
    monkeypatch.setattr(Packs, "list", lambda self: 1 / 0)
    assert "ZeroDivisionError" in the_line(load())


def test_entries_without_room_in_memory_are_left_out_in_one_line(load, root, monkeypatch):
    Packs(root, toolchain_name()).write(ENTRIES)
    monkeypatch.setattr(CompileDir, "room", lambda self: 3)
    found = load()
    assert found.entries == 0
    assert "memory has no room for more" in the_line(found)


def test_a_variable_of_the_users_own_stays_and_is_named():
    os.environ["TRITON_CACHE_DIR"] = "/elsewhere"
    (line,) = compile_cache._set_variables(Path("/somewhere"))
    assert line == "what is kept elsewhere, by TRITON_CACHE_DIR, is not carried"
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere/inductor"


def test_a_variable_that_torch_has_set_itself_does_not_count(monkeypatch, tmp_path):
    """Torch's launcher does so before a script is run."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert compile_cache._set_variables(Path("/somewhere")) == []
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere/inductor"


def test_what_is_no_root_is_an_error():
    with pytest.raises(rekindle.UsageError):
        rekindle.CompileCache("ftp://host/run")


def test_a_warm_worker_has_its_modules_in_the_order_of_a_cold_start():
    """Torch's keys of compiled code depend on it."""
    told = ["json", "__mp_main__", "missing", "itertools", "wave"]
    code = f"""
import multiprocessing, wave, json, sys
from rekindle.launch.become import order_modules
before = dict(sys.modules)
order_modules({told})
assert sys.modules == before
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = done.stdout.split()
    told.remove("missing")
    assert found[:4] == told
    assert found.index("sys") < found.index("multiprocessing") < found.index("rekindle.launch.become")


# -- the real thing --------------------------------------------------------------------------------------------------


class First(NamedTuple):
    """The first step of a start."""

    start: int
    hits: int
    misses: int
    seconds: float


class Compiled(Launcher):
    """A launcher with a compiled model."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._directory = directory
        (directory / "end").unlink(missing_ok=True)
        (directory / "firsts").unlink(missing_ok=True)
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it in this process, once another test compiles
        super().__init__(directory, "--compile-cache=root", *options, SCRIPT, "root", TMPDIR=str(directory))

    def first(self, start: int = 0) -> First:
        path = self._directory / "firsts"
        self.wait_until(lambda: path.exists() and path.read_text().count("\n") > start)
        number, hits, misses, seconds = path.read_text().splitlines()[start].split()
        return First(int(number), int(hits), int(misses), float(seconds))

    def kill_rank(self) -> None:
        os.kill(self.job.trainers()[0], signal.SIGKILL)

    def end(self) -> None:
        (self._directory / "end").touch()
        assert self.process.wait(300) == 0, self.output
        self.wait_until(lambda: not CompileDir.beside(self.job).path.exists())

    def said(self) -> list[str]:
        return [line for line in self.lines if "compile cache" in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place where a compiled model was trained, and a rank killed."""
    directory = tmp_path_factory.mktemp("compiled")
    with Compiled(directory) as job:
        cold = job.first()
        assert cold.misses > 0 and cold.hits == 0
        job.wait_for(WARM)
        job.kill_rank()
        again = job.first(1)
        assert again.start == 1
        assert again.hits > 0 and again.misses == 0, "a restart on the same node"
        job.end()
        assert not job.said()
        assert not [line for line in job.lines if "started cold" in line], "the spare has the same environment"
    assert list((directory / "root" / "compile").rglob("*.json"))
    print(f"first step: {cold.seconds:.2f} s cold, {again.seconds:.2f} s after a restart")
    return directory


@has_compiler
@pytest.mark.campaign(100)
@pytest.mark.timeout(900)
def test_a_fresh_node_compiles_nothing(trained):
    with Compiled(trained) as job:
        (line,) = [job.wait_for("came from storage")]
        fresh = job.first()
        assert fresh.hits > 0 and fresh.misses == 0
        job.end()
        assert job.said() == [line]
    print(f"first step: {fresh.seconds:.2f} s on a fresh node")


def corrupt(place: Path) -> str:
    for pack in place.rglob("*.pack"):
        pack.write_bytes(bytes(pack.stat().st_size))
    return "damaged entries or packs are left out and removed"


def give_away(place: Path) -> str:
    os.chown(place, 4321, -1)
    return "belongs to user 4321"


def rename(place: Path) -> str:
    """As another torch, or another processor, would have called it."""
    (only,) = place.iterdir()
    only.rename(place / f"torch-2.0.0-{hashlib.sha256(b'another').hexdigest()[:12]}")
    return "all there is was compiled by others (torch-2.0.0-"


@has_compiler
@pytest.mark.campaign(120)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("harm", [corrupt, pytest.param(give_away, marks=is_root), rename])
def test_what_can_not_be_used_is_compiled_anew(trained, tmp_path, harm):
    shutil.copytree(trained / "root" / "compile", tmp_path / "root" / "compile")
    words = harm(tmp_path / "root" / "compile")
    with Compiled(tmp_path) as job:
        job.wait_for(words)
        first = job.first()
        assert first.misses > 0 and first.hits == 0
        job.end()
        told = [line for line in job.said() if "compiled anew" in line]  # the rank may say that none can be carried
        assert len(told) == 1, job.output
