"""What tests of all parts share. Nothing here is replaced by a mock: memory is tmpfs, locks are the kernel's."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from rekindle.format.receipt import Receipt
from rekindle.memory import pages
from rekindle.memory.job_dir import JobDir
from rekindle.memory.slots import Slots
from rekindle.storage.posix import PosixStore
from rekindle.testing import make_shard
from tests.faults.harness import end_agent
from tests.memory.gate import Gate
from tests.shares import deal, may_be_skipped, parse, put_longest_first, seconds_of

settings.register_profile("rekindle", deadline=None)  # machines that run tests are busy ones
settings.load_profile("rekindle")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell script starts what it leaves in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send it, to themselves and to what they start
torch.set_num_threads(1)  # sums depend on the number of threads, which a busy machine changes between two calls
os.environ["OMP_NUM_THREADS"] = "1"  # for what tests start: threads that wait for each other take its cores, too

_PREFIX = "rekindle-test-"
"""Beginning of the names of memory stores that tests make."""
ShardOf = Callable[..., tuple[Receipt, bytes]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--campaign-share", metavar="N/M", help="with -m '': of the campaigns only the Nth of M shares")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    given = config.getoption("--campaign-share")
    if given:
        share, shares = parse(given)
        costs = {item.nodeid: cost for item in items if (cost := seconds_of(item)) is not None}
        rare = may_be_skipped((config.rootpath / "Makefile").read_text())
        dealt = deal(costs.items(), shares, {name for name in costs if name.partition("::")[0] in rare})
        others = [item for item in items if dealt.get(item.nodeid, share) != share]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if dealt.get(item.nodeid, share) == share]
        put_longest_first(items)


@pytest.fixture(autouse=True)
def _no_lines_of_other_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keeps lines on other tests' memory out of ``caplog``: a thread that waits for an agent may outlive its test."""
    if "caplog" not in request.fixturenames:
        yield
        return
    ours = str(request.getfixturevalue("memory")) if "memory" in request.fixturenames else None

    def is_ours(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return _PREFIX not in message or (ours is not None and ours in message)

    handler = request.getfixturevalue("caplog").handler
    handler.addFilter(is_ours)
    yield
    handler.removeFilter(is_ours)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A memory store of the test's own; agents that still serve it are ended afterwards."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    monkeypatch.setenv("REKINDLE_MEMORY", str(path))
    yield path
    with suppress(FileNotFoundError):  # an agent gives memory back as we look
        for directory in path.glob("rekindle-*/*"):
            end_agent(JobDir(directory))
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint root that nobody has made yet."""
    return tmp_path / "run"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts something for the rest of the test, or skips it with a reason."""
    places: list[Path] = []

    def mount(name: str, *command: str) -> Path:
        path = tmp_path / name
        path.mkdir()
        done = subprocess.run(["mount", *command, str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"can't be mounted here: {done.stderr.strip()}")
        places.append(path)
        return path

    yield mount
    for path in places:
        subprocess.run(["umount", "-l", str(path)], check=False)


@pytest.fixture
def small_tmpfs(mounted: Callable[..., Path]) -> Callable[[int], Path]:
    """Mounts a tmpfs of so many bytes; a full one is a real one."""
    numbers = count()
    return lambda nbytes: mounted(f"tmpfs-{next(numbers)}", "-t", "tmpfs", "-o", f"size={nbytes},mode=700", "tmpfs")


@pytest.fixture
def memories(small_tmpfs: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The memory of two nodes on this host."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    places = [small_tmpfs(256 << 20), small_tmpfs(256 << 20)]
    yield places
    for place in places:
        for directory in place.glob("rekindle-*/*/"):
            end_agent(JobDir(directory))


class Disk:
    """A directory that is mounted at another place, as a disk would be: a root on it can go out of sight."""

    def __init__(self, source: Path, place: Path) -> None:
        self.source, self.place = source, place
        self.root = place / "run"

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.place)], check=True)

    def mount(self) -> None:
        subprocess.run(["mount", "--bind", str(self.source), str(self.place)], check=True)

    def really(self) -> list[int]:
        """Steps that the disk has, mounted or not."""
        return [entry.stamp.step for entry in PosixStore(self.source / "run").published()]


@pytest.fixture
def disk(tmp_path: Path, mounted: Callable[..., Path]) -> Disk:
    source = tmp_path / "source"
    source.mkdir()
    return Disk(source, mounted("disk", "--bind", str(source)))


def have_own_mounts() -> None:
    """Gives this process mounts of its own, as each node has them: what it mounts and unmounts, others don't see."""
    ctypes.CDLL(None, use_errno=True).unshare(0x00020000)  # CLONE_NEWNS
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def commit(slots: Slots, receipt: Receipt, data: bytes) -> None:
    """A save of a shard made by hand into memory."""
    slot = slots.acquire(receipt.stamp.step, receipt.stamp.incarnation, len(data))
    assert slot.map is not None
    slot.map[: len(data)] = data
    slots.commit(slot, receipt.stamp, receipt.raw)


@pytest.fixture(scope="session")
def shard_of() -> ShardOf:
    """``make_shard``, for tests of parts that never hold torch."""
    return make_shard


@pytest.fixture
def pipeline() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(state: Mapping[str, Any], **options: Any) -> Any:
        from tests.pipeline import Pipeline  # with torch, which tests of other parts do without

        made.append(Pipeline(state, **options))
        return made[-1]

    yield make
    for one in made:
        one.writer.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Stands before the making of memory in the background, shut until the test opens it."""
    gate = Gate()
    monkeypatch.setattr(pages._Making, "make_one", lambda making: gate.make_one(making))
    yield gate
    gate.open.set()
