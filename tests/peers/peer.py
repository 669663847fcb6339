"""Another node: a job's memory, and a server in front of it, in this process or in one of its own."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rekindle.format.layout import BLOCK
from rekindle.format.lineage import CheckpointKey, Incarnation, ShardId
from rekindle.format.names import receipt_name, shard_name, step_dir
from rekindle.format.reader import NullSink
from rekindle.format.shard import OpenShard
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.peers.files import PeerFiles
from rekindle.peers.links import Links
from rekindle.peers.server import Handler, PeerServer
from rekindle.peers.snapshots import snapshot_handlers
from rekindle.peers.wire import Credentials, Link, connect
from rekindle.testing import make_shard

HOST = "127.0.0.1"
SECRET = bytes(range(32))
START = "c" * 16
FIRST = Incarnation(1, "a" * 16)
CREDENTIALS = Credentials(SECRET, START, "near")
OWN = Credentials(SECRET, START, "far")


def far_job(memory: Path) -> JobDir:
    """The job's directory on the other node."""
    job = JobDir.of("/somewhere/run", memory_base(memory / "far"))
    job.create()
    return job


def put(job: JobDir, step: int, data: Mapping[str, bytes], rank: int = 0, world: int = 1) -> Path:
    """A snapshot as a trainer left it. Gives the path of its shard."""
    receipt, raw = make_shard(ShardId(step, rank, world, FIRST), data)
    place = job.path / step_dir(step)
    place.mkdir(exist_ok=True)
    shard = place / shard_name(rank, world)
    shard.write_bytes(raw)
    (place / receipt_name(rank, world)).write_bytes(receipt.raw)
    return shard


def blocks_of(count: int) -> dict[str, bytes]:
    """A tensor of one block for each number."""
    return {f"t{number:02}": bytes([number + 1]) * BLOCK for number in range(count)}


@contextmanager
def serving(handlers: Mapping[str, Handler], port: int = 0) -> Iterator[int]:
    """Serves from threads of this process. Gives the port."""
    listener = socket.create_server((HOST, port))
    server = PeerServer(listener, lambda: OWN, handlers)
    server.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()


@contextmanager
def serving_alone(job: JobDir) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Serves a job's snapshots from a process of its own. Gives it and the port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.peers.peer", str(job.path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def link_to(port: int) -> Link:
    return connect(HOST, port, CREDENTIALS, 30)


def files_at(
    port: int, step: int = 7, incarnation: Incarnation = FIRST, node: str = "far", links: Links | None = None
) -> PeerFiles:
    return PeerFiles(node, HOST, port, CREDENTIALS, CheckpointKey(step, incarnation), links=links)


class Memory(NullSink):
    """Puts blocks into memory of its own; those that ``aside`` picks come by ``take``."""

    def __init__(self, shard: OpenShard, aside: Callable[[int], bool] = lambda block: False) -> None:
        self.blocks = [bytearray(stop - start) for start, stop in shard.receipt.layout.blocks]
        self.aside = aside

    def place(self, block: int) -> memoryview | None:
        return None if self.aside(block) else memoryview(self.blocks[block])

    def take(self, block: int, at: int, data: memoryview) -> None:
        self.blocks[block][at : at + len(data)] = data

    def whole(self) -> bytes:
        return b"".join(self.blocks)


def pinned(path: Path) -> bool:
    """True if a writer would find the file pinned."""
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def wait_until(true: Callable[[], Any]) -> None:
    """Waits for what another thread or process does."""
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


if __name__ == "__main__":
    with serving(snapshot_handlers(JobDir(Path(sys.argv[1])))) as port:
        print(json.dumps(port), flush=True)
        sys.stdin.read()
