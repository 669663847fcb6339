"""Lists the experiments: what each measures, what is expected, what hangs on it, and the seconds that it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BEYOND_ONE_DEVICE", "EXPERIMENTS", "RUNS", "Experiment"]

RUNS = {
    "run-1": "what the hardware does",
    "run-2": "what Rekindle makes of it",
    "run-3": "what a user's job needs",
}
"""Each ends within 9 minutes. The most important experiments of a run come first."""


@dataclass(frozen=True)
class Experiment:
    """One experiment, and the function that makes it."""

    name: str
    run: str
    title: str
    subject: str
    """What must have happened in a run, or its figures mean nothing."""
    expected: str
    decides: str
    """What hangs on the outcome."""
    work: str
    """module:function. The function gets a Report, the Places, and the options."""
    budget: float
    """Seconds, the start of its processes included. Those of a run add up to 9 minutes at most."""
    options: Mapping[str, Any] = field(default_factory=dict)


EXPERIMENTS = [
    Experiment(
        "bus",
        "run-1",
        "copies of 1 GiB between the device and page-locked memory",
        "page-locked copies both ways; the bytes come back as they went",
        "50 to 55 GB/s each way",
        "the ceiling of all copies",
        "on_gpu.copies:bus",
        25,
    ),
    Experiment(
        "registered",
        "run-1",
        "copies into page-locked tmpfs, of small and of huge pages, and across the border of two registrations",
        "the memory is page-locked, its pages are of the kind said, and the bytes arrive",
        "within 3% of the bus; across a border error 1, or fine",
        "copying straight into snapshots; cutting copies at the borders of chunks",
        "on_gpu.copies:registered",
        35,
    ),
    Experiment(
        "prepare",
        "run-1",
        "making 16 GiB ready: fallocate; populate by 1, 4, 8, 16 threads; page-lock whole, in 1 GiB, in 256 MiB, by 1 "
        "and 4 threads; huge pages; what it takes of the device; how long another thread's mmap() waits",
        "all pages are allocated, page-locks succeed, huge pages are huge, another thread calls mmap() meanwhile",
        "fallocate 3 to 5 GB/s, populate 5 to 25, page-lock 8 to 12, huge pages over 30; 0.2 to 0.4% of the device; "
        "mmap() waits as long as a call takes",
        "chunks, threads, huge pages",
        "on_gpu.pinning:prepare",
        95,
    ),
    Experiment(
        "refused",
        "run-1",
        "a refused page-lock, then a launch of the same thread",
        "page-locks are refused after a first one that wasn't",
        "error 712, raised by the next launch; not when another thread had it, nor after cudaGetLastError",
        "where memory is page-locked",
        "on_gpu.pinning:refused",
        20,
    ),
    Experiment(
        "pageable",
        "run-1",
        "a copy of 4 GiB into memory that is not page-locked, and launches of another thread meanwhile",
        "one copy goes into page-locked memory and one does not, the bytes arrive, launches are made meanwhile",
        "launches wait for the whole copy; beside a page-locked one they don't",
        "bouncing such copies through a small page-locked ring",
        "on_gpu.copies:pageable",
        30,
    ),
    Experiment(
        "tests",
        "run-1",
        "tests/gpu, each test in a process of its own",
        "a test runs, not all are skipped",
        "none fails",
        "the baseline",
        "on_gpu.suite:run_tests",
        75,
    ),
    Experiment(
        "local-state",
        "run-1",
        "the state that only one rank has, 400 BatchNorm layers, 200 guarded steps: equal to the live one?",
        "states in memory are compared with live ones",
        "0 torn",
        "whether a dead rank's buffers can be trusted",
        "on_gpu.snapshots:local_state",
        35,
    ),
    Experiment(
        "stuck",
        "run-1",
        "the device spins; the main thread is in one of seven calls; another thread tries six, with "
        "CUDA_DEVICE_MAX_CONNECTIONS at its default and 1",
        "the main thread is in its call, and the device spins, when each other call is tried",
        "query and both copies pass unless the main thread is in .cpu(), a lazy load or empty_cache()",
        "what securing a state may call; when a communicator must be aborted",
        "on_gpu.stuck:stuck",
        105,
    ),
    Experiment(
        "item",
        "run-1",
        ".item() beside a copy of 8 GiB in one piece, and in pieces of 32 MiB",
        ".item() is called while a copy runs, and the bytes arrive",
        "160 ms in one piece, under 2 ms in pieces",
        "the size of copies",
        "on_gpu.copies:item",
        35,
    ),
    Experiment(
        "pollers",
        "run-1",
        "launches a second beside threads that poll an event",
        "all threads wait for an event, until the last launch",
        "20 to 60% fewer beside 7 that poll at 0.1 ms",
        "one waiter for all",
        "on_gpu.launches:pollers",
        35,
    ),
    Experiment(
        "ipc",
        "run-1",
        "a process is killed while another one reads its device memory",
        "a process reads another one's memory when that is killed",
        "the reader hangs, or has an illegal access (Xid 31)",
        "what docs/faults.md says of survivors",
        "on_gpu.endings:ipc",
        40,
    ),
    Experiment(
        "every-step",
        "run-2",
        "a snapshot of 4 GiB at every step, and restores",
        "each step of a window has a snapshot; the last one is restored, from where it says, with the same bits",
        "at most 1% slower, 0.9 of the bus, restore at 20 GB/s",
        "the promise",
        "on_gpu.snapshots:every_step",
        80,
        {"size": 4 << 30, "rows": 131072, "rounds": 3, "steps": 8, "storage": True},
    ),
    Experiment(
        "every-step-32",
        "run-2",
        "the same with 32 GiB, fewer rows as activations would not fit, and no restore from storage",
        "as in every-step",
        "at most 1% slower, 0.9 of the bus, restore at 20 GB/s",
        "the promise",
        "on_gpu.snapshots:every_step",
        110,
        {"size": 32 << 30, "rows": 49152, "rounds": 2, "steps": 4, "storage": False},
    ),
    Experiment(
        "launch-bound",
        "run-2",
        "a guarded loop of small kernels with a snapshot at every step",
        "each step of a window has a snapshot",
        "at most 2% slower",
        "the waiter",
        "on_gpu.snapshots:launch_bound",
        35,
    ),
    Experiment(
        "gasp",
        "run-2",
        "a notice while the device spins: before an update, inside of one, after one, and just before one; 32 GiB once",
        "the device is busy when the notice comes, two steps after a snapshot; a step is restored",
        "0.7 s for 32 GiB; always the step that the device had reached, never a torn one",
        "which step is secured",
        "on_gpu.gasp:gasp",
        140,
    ),
    Experiment(
        "gate",
        "run-2",
        "cuStreamWaitValue32 before each update: its price, and that it holds the device back",
        "a closed gate holds the device back",
        "under 3 us a step",
        "keeping a gate on the device",
        "on_gpu.launches:gate",
        20,
    ),
    Experiment(
        "assert",
        "run-2",
        "a device assert in a job of one rank with NCCL, TORCH_NCCL_RETHROW_CUDA_ERRORS at 1 and 0",
        "the newest step has a snapshot, and an assert of the device ends the job",
        "SIGABRT with 1, a Python exception with 0; the newest snapshot is restored",
        "what `rekindle run` sets",
        "on_gpu.endings:device_assert",
        50,
    ),
    Experiment(
        "capture",
        "run-2",
        "a CUDA graph captured in global mode beside a thread that queries, and beside a snapshot's copy",
        "another thread queries during a capture, or a snapshot is made; the graph adds what it captured",
        "passes where the thread's mode is relaxed, and beside a snapshot",
        "the capture mode of background threads",
        "on_gpu.launches:capture",
        30,
    ),
    Experiment(
        "exit",
        "run-2",
        "kill -9 of a process with 64 GiB of page-locked memory: the time until it is gone",
        "all of the memory is page-locked, and a SIGKILL ends the process",
        "1 to 3 s, less with huge pages",
        "the clock of a restart",
        "on_gpu.pinning:exit_time",
        50,
    ),
    Experiment(
        "first-step",
        "run-2",
        "the first ten steps of 16 GiB on fresh memory",
        "a snapshot is in memory at the end",
        "no step() over 20 ms",
        "preparing memory in the background",
        "on_gpu.snapshots:first_step",
        25,
    ),
    Experiment(
        "memory-ready",
        "run-3",
        "making memory for two snapshots of 16 GiB, in a new job and after a SIGKILL, beside the hardware's floor",
        "memory is read past the product: a whole snapshot of a step after the start, two files of the state's size, "
        "page-locked; the restart restores the step before",
        "first snapshot within 2 s",
        "how pages are made, and by how many threads",
        "on_gpu.ready:memory_ready",
        60,
        {"size": 16 << 30},
    ),
    Experiment(
        "updates",
        "run-3",
        "snapshots of a state that is updated in each of twenty ways",
        "every element is updated as often as the steps say; a snapshot of a step asked for is looked at, or refused "
        "with a message",
        "every snapshot holds its step, or is refused with a message; a notice amid a replayed graph secures a right "
        "step or none",
        "when copies are made inside of step()",
        "on_gpu.updates:updates",
        115,
        {"size": 1 << 30},
    ),
    Experiment(
        "user-job",
        "run-3",
        "a GPT of 354 million parameters with all defaults, beside training alone, dcp.async_save and torch.save",
        "each way of saving has saved: a snapshot in memory, or a file of the state's size",
        "all defaults: at most 1.02 of training alone",
        "the defaults",
        "on_gpu.user_costs:user_job",
        175,
        {"width": 1024, "layers": 24, "batch": 8, "tokens": 1024, "steps": 200, "every": 20, "rounds": 2},
    ),
    Experiment(
        "user-recovery",
        "run-3",
        "the same job killed: SIGKILL to the first new step under rekindle run, and under torchrun with torch.save",
        "the process dies of SIGKILL, and the new one begins with the bits that the old one had after the same step",
        "at most 4 s; torchrun takes 11 s",
        "the clock of a restart",
        "on_gpu.user_recovery:user_recovery",
        115,
        {"width": 1024, "layers": 24, "batch": 8, "tokens": 1024, "every": 20},
    ),
    Experiment(
        "two-ranks",
        "run-3",
        "two ranks of that job on one card, under gloo and DDP: one is killed",
        "the rank dies of SIGKILL, and both begin with the bits that they had after the same step",
        "both are back",
        "restarts of one rank of several",
        "on_gpu.user_recovery:two_ranks",
        70,
        {"width": 512, "layers": 12, "batch": 4, "tokens": 512, "every": 20},
    ),
]

BEYOND_ONE_DEVICE = {
    "survivors of NCCL": "a killed peer, stuck collectives, and aborting communicators take at least two devices",
    "contexts on GPU 0": "threads that do not set their device open one there, which one device can't show",
    "NUMA": "copies to the far node, and threads bound to the near one",
    "DRAM shared by 8": "the sum of eight copies and their hashing against the memory's bandwidth",
    "the network card": "copies and NCCL between nodes share a PCIe link",
}
