"""Experiment on the first seconds: how soon memory for snapshots is there, beside what the hardware needs for it."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sizes import GIB, MIB

from on_gpu.cases import Case, Speaker
from on_gpu.held import allocated, snapshots_in_memory, values
from on_gpu.places import Places
from on_gpu.results import Report

__all__ = ["HugeMemory", "make_and_lock", "memory_ready", "saving_process"]

_COLLAPSE, _POPULATE_WRITE = 25, 23
"""MADV_COLLAPSE, Linux 6.1, and MADV_POPULATE_WRITE, 5.14."""
_FIXED = 0x10
"""MAP_FIXED."""
_HUGE = 2 << 20
_PIECE = 256 * MIB
_MAKERS = 4
_LIMIT = 60.0
"""Seconds that the first snapshot gets."""


class HugeMemory:
    """A mapped file of a tmpfs, at an address that huge pages fit. Unmapped by ``close``."""

    def __init__(self, directory: str, nbytes: int) -> None:
        self._libc = libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.nbytes = nbytes
        anywhere = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        room = libc.mmap(None, nbytes + _HUGE, 0, anywhere, -1, 0)
        self.address = -(-room // _HUGE) * _HUGE
        with tempfile.TemporaryFile(dir=directory) as file:
            os.ftruncate(file.fileno(), nbytes)
            writable = mmap.PROT_READ | mmap.PROT_WRITE
            at = libc.mmap(self.address, nbytes, writable, mmap.MAP_SHARED | _FIXED, file.fileno(), 0)
        if at != self.address:
            raise OSError(ctypes.get_errno(), f"mapping {nbytes} bytes")

    def pieces(self) -> list[tuple[int, int]]:
        return [(at, min(_PIECE, self.nbytes - at)) for at in range(0, self.nbytes, _PIECE)]

    def make(self, at: int, nbytes: int) -> bool:
        """Make pages: huge ones if the kernel can. Returns True if it could. Raises OSError."""
        for offset in range(at, at + nbytes, _HUGE):
            ctypes.memset(self.address + offset, 0, 1)  # of a range without any page it makes none
        whole = nbytes // _HUGE * _HUGE
        if whole and self._libc.madvise(self.address + at, whole, _COLLAPSE) == 0:
            return True
        if self._libc.madvise(self.address + at, nbytes, _POPULATE_WRITE):
            raise OSError(ctypes.get_errno(), f"populating {nbytes} bytes")
        return False

    def close(self) -> None:
        self._libc.munmap(self.address, self.nbytes)


def make_and_lock(memory: HugeMemory, lock: bool) -> tuple[float, int]:
    """Make all pages by some threads, and page-lock each piece when it is there. Returns seconds, and huge pieces."""
    from on_gpu.cuda import register

    pieces = memory.pieces()
    made = [threading.Event() for _ in pieces]
    huge: list[bool] = []

    def make(number: int) -> None:
        try:
            huge.append(memory.make(*pieces[number]))
        finally:
            made[number].set()

    began = time.perf_counter()
    with ThreadPoolExecutor(_MAKERS) as pool:
        jobs = [pool.submit(make, number) for number in range(len(pieces))]
        for ready, (at, nbytes) in zip(made, pieces, strict=True):
            ready.wait()
            if lock and (code := register(memory.address + at, nbytes)):
                raise RuntimeError(f"page-lock: error {code}")
        for job in jobs:
            job.result()
    return time.perf_counter() - began, sum(huge)


def floor_process(speaker: Speaker, directory: str, size: int, device: str) -> None:
    """Say what the hardware needs: pages made by some threads and locked as they come, the second time.

    A virtual machine's memory is made by its host when it is first touched. That is not what is measured.
    """
    import torch

    if device != "cpu":
        torch.zeros(1, device=device)
    first = HugeMemory(directory, 2 * size)
    speaker.say(first_touch=make_and_lock(first, lock=False)[0])
    first.close()
    took, huge = make_and_lock(HugeMemory(directory, size), lock=device != "cpu")
    speaker.say(floor=took, huge=huge, pieces=len(range(0, size, _PIECE)))


def saving_process(speaker: Speaker, memory: str, disk: str, size: int, device: str) -> None:
    """Train a counting state, from the making of the Checkpointer until the memory for two snapshots is there."""
    import rekindle
    from on_gpu.cuda import synchronize
    from on_gpu.network import counting_state
    from on_gpu.snapshots import complete

    parameters, optimizer = counting_state(size, device=device)
    synchronize()
    root = Path(disk) / "run"
    began = time.perf_counter()
    ckpt = rekindle.Checkpointer(
        root,
        {"parameters": parameters, "optimizer": optimizer},
        memory=memory,
        snapshot_every=1,
        persist_every=10**9,
        overlap=True,
    )
    step = start = ckpt.restore()
    speaker.say(restored=start, restore=time.perf_counter() - began)
    while max(snapshots_in_memory(root, memory), default=0) <= start and time.perf_counter() - began < _LIMIT:
        optimizer.step()
        step += 1
        ckpt.step(step)
        complete(ckpt)
        time.sleep(0.005)
    speaker.say(first=time.perf_counter() - began, step=step)
    slots = ckpt._saver.memory.slots if ckpt._saver.memory is not None else None
    waited = slots is not None and slots.wait_made(_LIMIT)
    speaker.say(both=time.perf_counter() - began, waited=waited)
    found = slots.slots if slots is not None else []
    made = [slot.map for slot in found if slot.map is not None and slot.map.made >= size]
    speaker.say(slots=len(made), locked=sum(map_.page_locked for map_ in made))
    speaker.ready()


def memory_ready(report: Report, places: Places, *, size: int, device: str = "cuda") -> None:
    with report.part("the floor"):
        with Case("on_gpu.ready:floor_process", {"directory": places.memory, "size": size, "device": device}) as case:
            found = case.result(report.left)
        report.require(found["floor"] > 0, "pages were made, and page-locked")
        report.figure("the floor: made by 4 threads and page-locked as they come", found["floor"], "s")
        report.figure("the floor: speed", size / 1e9 / found["floor"], "GB/s")
        report.figure("the floor: huge pages", f"{found['huge']} of {found['pieces']} pieces")
        report.figure("memory touched for the first time", 2 * size / 1e9 / found["first_touch"], "GB/s")
    for what in ("a new job", "a restart"):
        if report.has_time(12, what):
            with report.part(what):
                _ready_once(report, places, what, size, device)


def _ready_once(report: Report, places: Places, what: str, size: int, device: str) -> None:
    """Start a process that saves, and kill it when it is ready."""
    root = Path(places.disk) / "run"
    before = max(snapshots_in_memory(root, places.memory), default=0)
    options = {"memory": places.memory, "disk": places.disk, "size": size, "device": device}
    with Case("on_gpu.ready:saving_process", options) as case:
        ready = case.wait_ready(report.left)
        report.require(ready, f"{what}: the process got ready{'' if ready else f': it {case.ending}: {case.errors()}'}")
        said = case.said
        gone = case.kill() or 0.0
        report.require(case.killed(), f"{what}: a SIGKILL has ended the process")
    report.require((before > 0) is (what == "a restart"), f"{what}: memory had step {before} at the start")
    report.require(said["restored"] == before, f"{what}: step {before} was restored: {said['restored']}")
    held = snapshots_in_memory(root, places.memory)
    newest = max(held, default=0)
    report.require(newest > before, f"{what}: a snapshot went into memory within {said['first']:.1f} s")
    low, high = values(held[newest], "parameters.")
    report.require(low == high == newest, f"{what}: the snapshot of step {newest} is whole: {low:g} to {high:g}")
    report.figure(f"{what}: first snapshot after", said["first"], "s", high=max(2 * size / (16 * GIB), 1))
    bytes_held = sorted(allocated(root, places.memory), reverse=True)
    both = said["waited"] and len(bytes_held) >= 2 and bytes_held[1] >= size and said["slots"] >= 2
    report.require(both, f"{what}: memory for two snapshots was made: {bytes_held} bytes")
    report.require(device == "cpu" or said["locked"] >= 2, f"{what}: the memory is page-locked: {said['locked']} of 2")
    report.figure(f"{what}: memory for two snapshots after", said["both"], "s")
    report.figure(f"{what}: of that until restore() had returned", said["restore"], "s")
    report.figure(f"{what}: kill -9 until gone", gone, "s")
