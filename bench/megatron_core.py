"""Measures the stall of saves of a training with Megatron-core, with and without Rekindle, on two ranks.

``.venv-megatron/bin/python bench/megatron_core.py [--mib 512] [--saves 6]``. A stall is the time that the thread that
trains spends in saving, scheduling and waiting before the next update. Three ways:

- megatron: dist_checkpointing's asynchronous save to a directory on disk
- rekindle: the same call after ``install()``: into memory, from where an agent carries it to the same directory
- every step: ``MegatronState`` of a GPT that trains, of about 590 MiB on each rank, saved at each of its steps

``--copies`` measures the price of copies instead, and needs root: memory of a rank's optimizer and traffic at a step of
a GPT on four data-parallel ranks, with one optimizer instance and with two. Each training has a network of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).parents[1]
RANKS, TENSORS = 2, 16
TRAIN = ("--settings", '{"persist_every": 1000000}')

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--mib", type=int, default=512, help="MiB of tensors on each rank")
options.add_argument("--saves", type=int, default=6)
options.add_argument("--copies", action="store_true", help="measure memory and traffic of two copies")
options.add_argument("--way", choices=["megatron", "rekindle"], help=argparse.SUPPRESS)
options.add_argument("--where", type=Path, help=argparse.SUPPRESS)


def save(given: argparse.Namespace) -> list[float]:
    """Saves on this rank, and returns the seconds of each stall."""
    sys.path[:0] = [str(REPO / "src"), str(REPO / "tests/integrations/programs")]
    import megatron_on_cpu  # noqa: F401  before anything of Megatron's
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if given.way == "rekindle":
        from rekindle.integrations.megatron import install

        install()
    rows = given.mib * (1 << 20) // TENSORS // 4096
    tensors = [torch.rand(rows, 1024) for _ in range(TENSORS)]
    queue, stalls = AsyncCallsQueue(), []
    for number in range(1, given.saves + 1):
        directory = given.where / f"iter_{number:07d}"
        directory.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        began = time.perf_counter()
        state = {
            f"weight{i}": ShardedTensor.from_rank_offsets(f"weight{i}", tensor, (0, rank, RANKS))
            for i, tensor in enumerate(tensors)
        }
        queue.schedule_async_request(dist_checkpointing.save(state, str(directory), async_sharded_save=True))
        stalls.append(time.perf_counter() - began)
        queue.maybe_finalize_async_calls(blocking=True)
        time.sleep(2)  # a step's computation
    queue.close()
    return stalls


def measure(way: str, given: argparse.Namespace, where: Path) -> list[float]:
    """Returns the longest stall of all ranks at each save."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    here = [str(Path(__file__)), "--mib", given.mib, "--saves", given.saves, "--way", way, "--where", where]
    subprocess.run([*torchrun, *map(str, here)], check=True)
    each = [json.loads((where / f"stalls-{rank}.json").read_text()) for rank in range(RANKS)]
    return [max(stalls) for stalls in zip(*each, strict=True)]


def train(ranks: int, where: Path, *arguments: object, run_by: Sequence[str] = ()) -> tuple[str, list[tuple[str, ...]]]:
    """Trains the tests' GPT. Returns all output, and size, median and longest stall in ms of each rank's saves."""
    launcher = [*run_by, sys.executable, "-m", "rekindle", "run", "--standalone", f"--nproc-per-node={ranks}"]
    program = REPO / "tests/integrations/programs/train_megatron.py"
    where.mkdir()
    done = subprocess.run(
        [*launcher, "--max-restarts=0", program, where / "run", where, *TRAIN, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPO / "src")},
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found = re.findall(r"saves of (.+?), 0 failed, stall median ([\d.]+) ms, longest ([\d.]+) ms", done.stdout)
    assert len(found) == ranks, done.stdout
    return done.stdout, found


def every_step(where: Path) -> tuple[str, float, float]:
    """Returns the size of a rank's snapshots, and median and longest stall in ms, of the slower rank."""
    _, found = train(RANKS, where, "--hidden", 1792, "--steps", 12)
    return found[0][0], max(float(median) for _, median, _ in found), max(float(longest) for _, _, longest in found)


def spent(where: Path, instances: int, steps: int) -> tuple[str, int, int]:
    """Trains on four ranks. Returns a snapshot's size, the bytes of a rank's optimizer, and those that all sent."""
    alone = ("unshare", "--net", "sh", "-c", 'ip link set lo up && "$@" && cat /proc/net/dev', "sh")
    told, found = train(4, where, "--hidden", 512, "--steps", steps, "--instances", instances, run_by=alone)
    held = json.loads((where / "end-0.json").read_text())["held"]
    return found[0][0], held, int(re.findall(r"lo: *(\d+)", told)[0])


def copies(folder: Path) -> None:
    print("4 data-parallel ranks; of each rank")
    print("| instances | optimizer, MB | snapshot | sent at a step, MB |\n|---|---|---|---|")
    for instances in (1, 2):
        (size, held, few), (_, _, many) = (
            spent(folder / f"{instances}-{steps}", instances, steps) for steps in (4, 12)
        )
        print(f"| {instances} | {held / 1e6:.1f} | {size} | {(many - few) / 4 / 8 / 1e6:.1f} |", flush=True)


def main() -> None:
    given = options.parse_args()
    if given.way:
        stalls = save(given)
        (given.where / f"stalls-{os.environ['RANK']}.json").write_text(json.dumps(stalls))
        for child in multiprocessing.active_children():  # Megatron's server of queues
            child.terminate()
        os._exit(0)  # gloo's threads need no end
    with (
        tempfile.TemporaryDirectory(prefix="rekindle-bench-", dir=Path.cwd()) as folder,
        tempfile.TemporaryDirectory(prefix="rekindle-bench-", dir="/dev/shm") as memory,
    ):
        os.environ |= {"REKINDLE_MEMORY": memory, "OMP_NUM_THREADS": "1"}
        if given.copies:
            copies(Path(folder))
            return
        found = {way: measure(way, given, Path(folder) / way) for way in ("megatron", "rekindle")}
        size, median, longest = every_step(Path(folder) / "every-step")
    print(f"{RANKS} ranks, {given.mib} MiB on each, {os.cpu_count()} cores; milliseconds of the slower rank")
    print("| way | first | later, median | longest |\n|---|---|---|---|")
    for way, stalls in found.items():
        first, *later = (1e3 * stall for stall in stalls)
        print(f"| {way} | {first:.0f} | {statistics.median(later):.0f} | {max(later):.0f} |")
    print(f"| every step, {size} | | {median:.1f} | {longest:.0f} |")


if __name__ == "__main__":
    main()
