"""A checkpoint to an S3 server and back, beside the clients that do nothing else: ``python bench/objects.py``.

Contenders take turns, each turn in a process of its own whose start is not counted. Rekindle's turn up is what its
agent does: a snapshot in shared memory is verified, sent, and made visible. Its turn down ends with verified bytes in
place. boto3's transfer manager and obstore itself move the same bytes and check nothing; settings of both are tried
first, and the fastest compete. The server is a radosgw of our own, in memory, unless ``--url`` names another root.
Linux only.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from sizes import MIB, Size

_ROOT = Path(__file__).resolve().parents[1]
_TENSOR = 64 * MIB
_LIMIT = 600.0
_SETTINGS = [(8, 8), (16, 4), (16, 8), (32, 8)]
"""MiB of a part, and parts at a time, that the others are tried with."""

Turn = dict[str, float]


# -- in a process of its own -----------------------------------------------------------------------------------------


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def _timed(work: Callable[[], object]) -> Turn:
    """Seconds, and the most memory of its own that the process took meanwhile, beside what it had."""
    base, peak, over = _anonymous(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            peak[0] = max(peak[0], _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    over.set()
    watcher.join()
    return {"seconds": seconds, "memory": max(0, peak[0] - base)}


def _mapped(path: str) -> memoryview:
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _room(nbytes: int) -> memoryview:
    """Memory that has been touched, as that of live tensors has."""
    room = mmap.mmap(-1, nbytes)
    for at in range(0, nbytes, mmap.PAGESIZE):
        room[at] = 1
    return memoryview(room)


def _rekindle_up(url: str, job: str, options: tuple[int, int]) -> Turn:
    from rekindle.agent.drain import Drainer
    from rekindle.memory.job_dir import JobDir

    drainer = Drainer(JobDir(Path(job)))
    drainer.job.notes.forget_durable()  # the turn before was removed by us, not lost

    def drain() -> None:
        if not drainer.tick():
            raise RuntimeError(drainer.progress.error)

    return _timed(drain)


def _rekindle_down(url: str, job: str, options: tuple[int, int]) -> Turn:
    from rekindle.format.reader import NullSink, ShardReader, read_blocks
    from rekindle.storage.open import open_store
    from rekindle.storage.verify import check_manifest

    class Into(NullSink):
        def __init__(self, room: memoryview, blocks: list[tuple[int, int]]) -> None:
            self.room, self.blocks = room, blocks

        def place(self, block: int) -> memoryview:
            start, stop = self.blocks[block]
            return self.room[start:stop]

    (entry,) = open_store(url).published()
    with entry.files.shard(0, 1) as shard:
        room = _room(shard.receipt.layout.nbytes)

    def load() -> None:
        (found,) = open_store(url).published()
        if check_manifest(found.files):
            raise RuntimeError("damaged")
        with found.files.shard(0, 1) as shard:
            reader, layout = ShardReader(shard), shard.receipt.layout
            if not reader.header_is_sound() or read_blocks(
                reader, Into(room, layout.blocks), range(len(layout.blocks))
            ):
                raise RuntimeError("damaged")

    return _timed(load)


def _client() -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        max_pool_connections=64,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto3.client("s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL"), config=config)


def _boto3(url: str, path: str, options: tuple[int, int], up: bool) -> Turn:
    from boto3.s3.transfer import TransferConfig

    part, threads = options
    config = TransferConfig(part * MIB, threads, part * MIB, io_chunksize=MIB)
    bucket, _, key = url.removeprefix("s3://").partition("/")
    client = _client()
    if up:
        return _timed(lambda: client.upload_file(path, bucket, f"{key}/raw", Config=config))
    return _timed(lambda: client.download_file(bucket, f"{key}/raw", f"{path}.down", Config=config))


def _obstore(url: str, path: str, options: tuple[int, int], up: bool) -> Turn:
    import obstore
    from obstore.store import S3Store

    part, threads = options
    bucket, _, key = url.removeprefix("s3://").partition("/")
    store = S3Store(bucket, prefix=key, client_options={"allow_http": True, "timeout": "120s"})
    if up:
        data = _mapped(path)
        return _timed(lambda: obstore.put(store, "raw", data, chunk_size=part * MIB, max_concurrency=threads))
    room, nbytes = _room(os.path.getsize(path)), os.path.getsize(path)

    def read(at: int) -> None:
        stop = min(at + part * MIB, nbytes)
        room[at:stop] = memoryview(obstore.get_range(store, "raw", start=at, end=stop))

    def load() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(0, nbytes, part * MIB)))

    return _timed(load)


_WAYS: dict[str, Callable[..., Turn]] = {
    "Rekindle up": _rekindle_up,
    "Rekindle down": _rekindle_down,
    "boto3 up": lambda *args: _boto3(*args, up=True),
    "boto3 down": lambda *args: _boto3(*args, up=False),
    "obstore up": lambda *args: _obstore(*args, up=True),
    "obstore down": lambda *args: _obstore(*args, up=False),
}


def _child(name: str, url: str, path: str, options: tuple[int, int], pipe: Any) -> None:
    pipe.send(_WAYS[name](url, path, options))
    pipe.close()


def _turn(name: str, url: str, path: str, options: tuple[int, int] = (16, 8)) -> Turn:
    receive, send = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_child, args=(name, url, path, options, send))
    process.start()
    send.close()
    try:
        if not receive.poll(_LIMIT):
            raise click.ClickException(f"{name}: no end after {_LIMIT:.0f} s")
        turn: Turn = receive.recv()
        return turn
    except EOFError:
        raise click.ClickException(f"{name}: has failed") from None
    finally:
        process.kill()
        process.join()


# -- the run ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _snapshot(url: str, nbytes: int, memory: Path) -> Iterator[tuple[str, str]]:
    """The job's directory, with one snapshot in memory, and the file of its shard."""
    from rekindle.format.layout import Chunk, Layout
    from rekindle.format.lineage import Incarnation, ShardId
    from rekindle.format.names import shard_name, step_dir
    from rekindle.format.receipt import Receipt, checksum
    from rekindle.memory.job import JobInfo
    from rekindle.memory.job_dir import JobDir, memory_base
    from rekindle.memory.slots import Slots

    sizes = [min(_TENSOR, nbytes - at) for at in range(0, nbytes, _TENSOR)]
    layout = Layout.build(Chunk(f"v.{n:04d}", "uint8", (s,), (0,), (s,)) for n, s in enumerate(sizes))
    stamp = ShardId(1, 0, 1, Incarnation.begin(1))
    job = JobDir.of(url, memory_base(str(memory)))
    job.create()
    job.write_job(JobInfo(url, [0], 1, 1, None, 600.0))
    slots = Slots(job, 0, 1, [0])
    slot = slots.acquire(1, stamp.incarnation, layout.file_bytes)
    assert slot.map is not None
    slot.map[: len(layout.header)] = layout.header
    noise = os.urandom(_TENSOR)
    for start, stop in layout.blocks:
        slot.map[len(layout.header) + start : len(layout.header) + stop] = noise[: stop - start]
    view = memoryview(slot.map)[len(layout.header) :]
    sums = [checksum(view[start:stop]) for start, stop in layout.blocks]
    static = Receipt.static_part(layout, {"v": {c.name[2:]: {"$tensor": c.name} for c in layout.chunks}})
    slots.commit(slot, stamp, Receipt.encode(stamp, static, sums, b"[]"))
    try:
        yield str(job.path), str(job.path / step_dir(1) / shard_name(0, 1))
    finally:
        slots.close()


@contextlib.contextmanager
def _server(url: str | None, directory: Path) -> Iterator[tuple[str, str]]:
    """A root to use, and what serves it."""
    if url is not None:
        yield url.rstrip("/"), os.environ.get("AWS_ENDPOINT_URL", "AWS")
        return
    sys.path.insert(0, str(_ROOT))
    from tests.objects.servers import radosgw

    os.environ["MEMSTORE_BYTES"] = str(10 << 30)
    with radosgw(directory) as server:
        os.environ.update(server.environment)
        yield f"s3://{server.bucket()}/bench", "radosgw on loopback, in memory"


def _clear(url: str) -> None:
    client, (bucket, _, key) = _client(), url.removeprefix("s3://").partition("/")
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{key}/")
    for name in [entry["Key"] for page in pages for entry in page.get("Contents", [])]:
        client.delete_object(Bucket=bucket, Key=name)


def _pair(url: str, job: str, shard: str, best: dict[str, tuple[int, int]]) -> dict[str, Turn]:
    """One round: everybody up and down, in turns."""
    found = {}
    for name in ("Rekindle", "boto3", "obstore"):
        _clear(url)
        path = job if name == "Rekindle" else shard
        for way in ("up", "down"):
            found[f"{name} {way}"] = _turn(f"{name} {way}", url, path, best.get(f"{name} {way}", (16, 8)))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{shard}.down")
    return found


def _tune(url: str, shard: str) -> dict[str, tuple[int, int]]:
    """The settings that are fastest here, of those who have some."""
    best = {}
    for name in ("boto3", "obstore"):
        for way in ("up", "down"):
            seconds = {options: _turn(f"{name} {way}", url, shard, options)["seconds"] for options in _SETTINGS}
            best[f"{name} {way}"] = min(seconds, key=lambda options: seconds[options])
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{shard}.down")
    return best


def _table(rounds: list[dict[str, Turn]], best: dict[str, tuple[int, int]], nbytes: int) -> Table:
    table = Table("", "MiB/s, median", "own memory, MiB", "Rekindle's speed / this one's: median", "lowest")
    for way in ("up", "down"):
        for name in ("Rekindle", "boto3", "obstore"):
            turns = [found[f"{name} {way}"] for found in rounds]
            ratios = [found[f"{name} {way}"]["seconds"] / found[f"Rekindle {way}"]["seconds"] for found in rounds]
            speed = nbytes / MIB / statistics.median(turn["seconds"] for turn in turns)
            told = f"{name} {way}" + (" ({} MiB x {})".format(*best[f"{name} {way}"]) if name != "Rekindle" else "")
            memory = max(turn["memory"] for turn in turns) / MIB
            table.add_row(
                told, f"{speed:.0f}", f"{memory:.0f}", f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}"
            )
    return table


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--size", type=Size(), default="1GiB", help="Bytes of the checkpoint.")
@click.option("--rounds", type=click.IntRange(1), default=5, help="Turns of each contender.")
@click.option("--url", help="A root for this on a server that the environment names; all in it is removed.")
def main(size: int, rounds: int, url: str | None) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no server outlives a killed run
    console = Console(width=150)
    with contextlib.ExitStack() as stack:
        server = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-server-")))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-objects-", dir="/dev/shm")))
        root, served = stack.enter_context(_server(url, server))
        job, shard = stack.enter_context(_snapshot(root, size, memory))
        best = _tune(root, shard)
        samples = [_pair(root, job, shard, best) for _ in range(rounds)]
        _clear(root)
    console.print(_table(samples, best, size))
    console.print(
        f"{size // MIB} MiB, {rounds} rounds, {served}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
