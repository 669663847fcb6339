"""Experiments on making host memory ready: pages, page-locks, and what is left of them at a death."""

from __future__ import annotations

import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from machine import free_memory
from sizes import GIB, MIB

from on_gpu.cases import Case, Speaker
from on_gpu.cuda import Longest, SharedMemory, clear_error, populate, register, unregister
from on_gpu.places import Places
from on_gpu.results import Report

__all__ = ["exit_time", "pinned_process", "prepare", "refused"]

_SPARE = 8 * GIB
"""Bytes of memory that stay free for everything else."""


def _fitting(wanted: int) -> int:
    """Returns ``wanted`` bytes, or as many GiB as fit into memory."""
    return min(wanted, max((free_memory() - _SPARE) // GIB, 1) * GIB)


def prepare(report: Report, places: Places) -> None:
    torch.zeros(1, device="cuda")
    size = _fitting(16 * GIB)
    began = time.perf_counter()
    memory = SharedMemory(places.memory, size, allocate=True)
    took = time.perf_counter() - began
    report.require(memory.allocated() >= size, "fallocate made all pages")
    report.figure("bytes", size / GIB, "GiB", expected="16 GiB", met=size == 16 * GIB)
    _alone(report)
    report.figure("fallocate", size / 1e9 / took, "GB/s", low=3, high=5)
    del memory
    for threads in (1, 4, 8, 16):
        began = time.perf_counter()
        memory = SharedMemory(places.memory, size)
        populate(memory, threads)
        took = time.perf_counter() - began
        report.require(memory.allocated() >= size, f"{threads} threads made all pages")
        report.figure(
            f"populate, {threads} threads", size / 1e9 / took, "GB/s", low=5 if threads > 1 else None, high=25
        )
    before = torch.cuda.mem_get_info()[0]
    _lock(report, memory, "whole", size, 1)
    taken = before - _free_with_all_locked(memory)
    report.figure("taken of the device / page-locked", 100 * taken / size, "%", low=0.2, high=0.4)
    for piece, threads in ((GIB, 1), (GIB, 4), (256 * MIB, 1), (256 * MIB, 4)):
        if report.has_time(6, f"pieces of {piece // MIB} MiB, {threads} threads"):
            _lock(report, memory, f"pieces of {piece // MIB} MiB, {threads} threads", piece, threads)
    del memory
    if places.huge is None:
        report.left_out("huge pages", places.kind)
    elif report.has_time(8, "huge pages"):
        with report.part("huge pages"):
            _huge(report, places.huge, size)


def _huge(report: Report, directory: str, size: int) -> None:
    memory = SharedMemory(directory, size)
    began = time.perf_counter()
    populate(memory, 16)
    took = time.perf_counter() - began
    report.require(memory.is_huge(), "the pages are huge")
    report.figure("huge pages: populate, 16 threads", size / 1e9 / took, "GB/s", low=5)
    _lock(report, memory, "huge pages, whole", size, 1, low=30, high=None)
    _lock(report, memory, "huge pages, pieces of 1024 MiB, 1 threads", GIB, 1, low=30, high=None)


def _map_and_unmap() -> None:
    mmap.mmap(-1, 1 << 16).close()


def _alone(report: Report) -> None:
    with Longest(_map_and_unmap, 1e-4).watched() as watch:
        time.sleep(0.5)
    report.figure("longest mmap() of another thread, nothing beside it", watch.seconds * 1e3, "ms")


def _free_with_all_locked(memory: SharedMemory) -> int:
    """Returns the bytes that the device has free while all of ``memory`` is page-locked."""
    _check(register(memory.address, memory.nbytes))
    free = torch.cuda.mem_get_info()[0]
    _check(unregister(memory.address))
    return free


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}")


def _lock(
    report: Report, memory: SharedMemory, name: str, piece: int, threads: int, low: float = 8, high: float | None = 12
) -> None:
    """Page-lock and unlock all of the memory, and watch what that does to another thread's mmap()."""
    parts = [(memory.address + at, min(piece, memory.nbytes - at)) for at in range(0, memory.nbytes, piece)]
    longest_call = [0.0]

    def lock(part: tuple[int, int]) -> None:
        began = time.perf_counter()
        _check(register(*part))
        longest_call[0] = max(longest_call[0], time.perf_counter() - began)

    with ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(0,)) as pool:
        with Longest(_map_and_unmap, 1e-4).watched() as watch:
            began = time.perf_counter()
            list(pool.map(lock, parts))
            took = time.perf_counter() - began
        report.figure(f"page-lock, {name}", memory.nbytes / 1e9 / took, "GB/s", low=low, high=high)
        waited = f"page-lock, {name}: longest mmap() of another thread"
        report.figure(waited, watch.seconds * 1e3, "ms", f"about one call, {longest_call[0] * 1e3:.0f} ms")
        report.require(watch.calls > 0, "another thread called mmap() meanwhile")
        began = time.perf_counter()
        list(pool.map(lambda part: _check(unregister(part[0])), parts))
        report.figure(f"unlock, {name}", memory.nbytes / 1e9 / (time.perf_counter() - began), "GB/s")


def refused(report: Report, places: Places) -> None:
    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    memory = SharedMemory(places.memory, MIB)
    code = register(memory.address, MIB)
    report.require(code == 0, f"the first page-lock (error code {code})")
    codes = []

    def refuse() -> None:
        codes.append(register(memory.address, MIB))

    thread = threading.Thread(target=refuse)
    thread.start()
    thread.join()
    report.require(codes[-1] != 0, "a page-lock was refused in another thread")
    report.figure("refused in another thread", codes[-1], "(error code)", low=712, high=712)
    _launch(report, x, "the launch after that", raises=False)
    refuse()
    report.require(codes[-1] != 0, "a page-lock was refused in this thread")
    report.figure("refused in this thread", codes[-1], "(error code)", low=712, high=712)
    _launch(report, x, "the launch after that, in the same thread", raises=True)
    _launch(report, x, "the next launch", raises=False)
    refuse()
    try:
        report.figure("cudaGetLastError after one more", clear_error(), "(error code)", low=712, high=712)
    except RuntimeError as error:
        report.left_out("cudaGetLastError", str(error))
        return
    _launch(report, x, "the launch after cudaGetLastError", raises=False)


def _launch(report: Report, x: torch.Tensor, name: str, *, raises: bool) -> None:
    try:
        x.add_(1)
        torch.cuda.synchronize()
        shown = "fine"
    except RuntimeError as error:
        shown = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    report.figure(name, shown, expected="an error" if raises else "fine", met=(shown != "fine") is raises)


def pinned_process(speaker: Speaker, directory: str, size: int) -> None:
    """Hold so much page-locked memory in a file with a name, as a trainer does, until it is killed."""
    torch.zeros(1, device="cuda")
    if size:
        memory = SharedMemory(directory, size, name="pinned")
        populate(memory, 16)
        parts = [(memory.address + at, min(GIB, size - at)) for at in range(0, size, GIB)]
        with ThreadPoolExecutor(4, initializer=torch.cuda.set_device, initargs=(0,)) as pool:
            list(pool.map(lambda part: _check(register(*part)), parts))
        speaker.say(locked=sum(length for _, length in parts), huge=memory.is_huge())
    speaker.ready()


def exit_time(report: Report, places: Places) -> None:
    size = _fitting(64 * GIB)
    kinds = [("no page-locked memory", places.memory, 0), ("4 KiB pages", places.memory, size)]
    kinds += [("huge pages", places.huge, size)] if places.huge else []
    for name, directory, nbytes in kinds:
        if not report.has_time(8, name):
            return
        with report.part(name):
            _exit_time(report, name, directory, nbytes)
    if not places.huge:
        report.left_out("huge pages", places.kind)


def _exit_time(report: Report, name: str, directory: str, size: int) -> None:
    with Case("on_gpu.pinning:pinned_process", {"directory": directory, "size": size}) as case:
        ready = case.wait_ready(report.left)
        report.require(ready, f"the process got ready{'' if ready else f': it {case.ending}: {case.errors()}'}")
        report.require(case.said.get("locked", 0) == size, f"{size / GIB:g} GiB are page-locked")
        report.require(not size or case.said["huge"] is (name == "huge pages"), f"the memory is of {name}")
        gone = case.kill()
        report.require(gone is None or case.killed(), "a SIGKILL has ended the process")
    (Path(directory) / "pinned").unlink(missing_ok=True)
    low, high = (1, 3) if name == "4 KiB pages" else (None, 3 if size else 1)
    if size:
        report.figure(f"{name}: bytes", size / GIB, "GiB", expected="64 GiB", met=size == 64 * GIB)
    if gone is None:
        report.figure(f"{name}: kill -9 until gone", "still there after 20 s", expected="1 to 3 s", met=False)
    else:
        report.figure(f"{name}: kill -9 until gone", gone, "s", low=low, high=high)
