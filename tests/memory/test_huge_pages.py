"""Memory of huge pages where the kernel has them: whole, no more than the file; of small ones after any error."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.memory import pages
from rekindle.memory.pages import AT_ONCE, HUGE, Pages

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux has MADV_COLLAPSE")

SIZE = (72 << 20) + 3 * 4096
"""Two pieces, and an end that is no multiple of a huge page."""
NO_ADVICE = 999
"""An advice that no kernel knows: it answers as one without MADV_COLLAPSE, with EINVAL."""


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    place = Path("/dev/shm") / f"rekindle-test-{os.getpid()}"
    fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    place.unlink()
    yield fd
    os.close(fd)


def make(fd: int, nbytes: int = SIZE) -> Pages:
    os.ftruncate(fd, nbytes)
    found = Pages(fd, nbytes)
    found.make(fd, nbytes, None, lambda: True)
    assert found.made == nbytes
    return found


def huge_bytes(mapping: Pages) -> int:
    """Bytes of the mapping that are mapped by huge pages."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            inside = int(line.split("-")[0], 16) == address
        elif inside and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) << 10
    return 0


def kernel_collapses(fd: int) -> bool:
    os.ftruncate(fd, SIZE)
    mapping = Pages(fd, SIZE)
    os.posix_fallocate(fd, 0, 1)
    libc = ctypes.CDLL(None)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    done = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE), pages._MADV_COLLAPSE) == 0
    os.ftruncate(fd, 0)
    return done


def assert_whole(fd: int, mapping: Pages) -> None:
    assert os.fstat(fd).st_blocks * 512 == len(mapping) == os.fstat(fd).st_size, "no hole, and nothing rounded up"
    mapping[:] = bytes([7]) * len(mapping)
    assert os.pread(fd, 5, len(mapping) - 5) == b"\x07" * 5


def test_large_memory_is_of_huge_pages(fd: int) -> None:
    if not kernel_collapses(fd):
        pytest.skip("this kernel makes no huge page")
    mapping = make(fd)
    assert huge_bytes(mapping) >= 16 << 20, "a fragmented machine may lack some"
    assert_whole(fd, mapping)


def test_small_memory_is_of_small_pages(fd: int) -> None:
    mapping = make(fd, AT_ONCE)
    assert huge_bytes(mapping) == 0
    assert_whole(fd, mapping)


def test_mappings_begin_at_a_huge_page_however_many_there_are(fd: int) -> None:
    os.ftruncate(fd, SIZE)
    made: list[Pages] = []
    for number in range(12):
        made.append(Pages(fd, SIZE - number * 4096))
        assert ctypes.addressof(ctypes.c_char.from_buffer(made[-1])) % HUGE == 0
        if number % 3 == 2:
            del made[number // 2]  # leaves a gap that is too short for some, and long enough for others


@pytest.mark.parametrize("lacks", ["the advice", "an address", "speed"])
def test_a_kernel_that_lacks_something_makes_small_pages(lacks: str, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    advise = pages.advise

    def note(address: int, nbytes: int, advice: int) -> None:
        if advice == pages._MADV_COLLAPSE:
            asked.append(address)
        advise(address, nbytes, advice)

    monkeypatch.setattr(pages, "advise", note)
    monkeypatch.setattr(pages, "_threads", lambda: 1)
    if lacks == "the advice":
        monkeypatch.setattr(pages, "_MADV_COLLAPSE", NO_ADVICE)
    elif lacks == "an address":
        monkeypatch.setattr(pages, "_TRIES", 0)
        monkeypatch.setattr(pages, "HUGE", 1 << 60)  # of which no address is a multiple
    else:
        monkeypatch.setattr(pages, "_SLOW", 0.0)
    mapping = make(fd)
    assert len(asked) == {"the advice": 2, "an address": 0, "speed": 1}[lacks]
    if lacks != "speed":
        assert huge_bytes(mapping) == 0
    assert_whole(fd, mapping)


def test_a_process_that_comes_after_allocates_nothing_again(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(fd)
    first[:5] = b"bytes"
    allocated: list[int] = []
    monkeypatch.setattr(pages, "allocate", lambda fd, start, nbytes: allocated.append(start))
    again = make(fd)
    assert not allocated and again[:5] == b"bytes"


@pytest.mark.parametrize("hole", ["pages that were never taken", "pages that have no zeros yet"])
def test_a_file_with_holes_is_made_whole(hole: str, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was killed while it made memory leaves them."""
    os.ftruncate(fd, SIZE)
    if hole == "pages that were never taken":
        os.pwrite(fd, bytes(SIZE - 4096), 4096)
    else:
        os.posix_fallocate(fd, 0, SIZE)
        assert os.fstat(fd).st_blocks * 512 == SIZE
    allocated: list[int] = []
    allocate = pages.allocate

    def note(fd: int, start: int, nbytes: int) -> None:
        allocated.append(start)
        allocate(fd, start, nbytes)

    monkeypatch.setattr(pages, "allocate", note)
    mapping = make(fd)
    assert 0 in allocated
    assert_whole(fd, mapping)


FILL = """
import errno, os, sys
from rekindle.memory.pages import Pages
nbytes = int(sys.argv[2])
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, nbytes)
mapping = Pages(fd, nbytes)
try:
    mapping.make(fd, nbytes, None, lambda: True)
except OSError as error:
    print(error.errno, mapping.made)
mapping[: mapping.made] = bytes([1]) * mapping.made
"""


def test_a_full_file_system_is_an_error_and_never_a_signal(small_tmpfs) -> None:
    """Also at the last page: what is made may be written to."""
    for lacking in (4096, HUGE, SIZE // 2):
        place = small_tmpfs(SIZE - lacking)
        command = [sys.executable, "-c", FILL, str(place / "file"), str(SIZE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode != -signal.SIGBUS
        number, made = map(int, done.stdout.split())
        assert (done.returncode, number) == (0, 28) and made < SIZE, "ENOSPC"


def test_page_locks_are_made_while_other_pages_still_are(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_TOGETHER", 4 << 20)
    monkeypatch.setattr(pages, "LOCKED", 8 << 20)
    monkeypatch.setattr(pages, "_threads", lambda: 3)
    locked: list[tuple[int, int, int]] = []
    making: list[int] = []
    make_one = pages._Making._make

    def count(self: pages._Making, start: int, stop: int) -> int:
        making.append(start)
        return make_one(self, start, stop)

    monkeypatch.setattr(pages._Making, "_make", count)
    os.ftruncate(fd, SIZE)
    mapping = Pages(fd, SIZE)
    mapping.make(fd, SIZE, lambda view, start, stop: locked.append((start, stop, len(making))), lambda: True)
    ends = [*range(8 << 20, SIZE, 8 << 20), SIZE]
    assert [stop for _, stop, _ in locked] == ends and [start for start, _, _ in locked] == [0, *ends[:-1]]
    assert locked[0][2] < len(making), "the first is locked before the last is made"
    assert mapping.made == SIZE


def test_an_error_of_any_thread_ends_all_of_them(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_TOGETHER", 4 << 20)
    monkeypatch.setattr(pages, "_threads", lambda: 4)

    def fail(self: pages._Making, start: int, stop: int) -> int:
        raise OSError(28, "full")

    monkeypatch.setattr(pages._Making, "_make", fail)
    os.ftruncate(fd, SIZE)
    before = threading.active_count()
    mapping = Pages(fd, SIZE)
    with pytest.raises(OSError, match="full"):
        mapping.make(fd, SIZE, None, lambda: True)
    assert mapping.made == 0 and threading.active_count() <= before


def test_what_a_state_that_shrank_leaves_is_cut_at_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.memory.slot import Slot

    path = tmp_path / "file"
    slot = Slot(path, os.open(path, os.O_RDWR | os.O_CREAT))
    slot.make(SIZE)
    cuts: list[int] = []
    truncate = os.ftruncate

    def note(fd: int, nbytes: int) -> None:
        cuts.append(nbytes)
        truncate(fd, nbytes)

    monkeypatch.setattr("rekindle.memory.slot.os.ftruncate", note)
    slot.trim(20 << 20 | 4096)
    assert cuts[-1] == slot.size == 20 << 20 | 4096 and len(cuts) > 3
    assert not any(cut % HUGE for cut in cuts[:-1])
    slot.close()
