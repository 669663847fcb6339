"""A snapshot read from another node's memory: ``python bench/nodes.py``. Rekindle beside iperf3 and plain sockets.

Contenders take turns, each with a process that sends and one that receives, over as many connections as Rekindle has.
iperf3 only moves bytes. Plain sockets send a file on tmpfs by sendfile and receive it into place, as a program could do
that trusts everybody and checks nothing. Rekindle proves who is there, receives into place, and verifies every block.
Memory of the receiver has been touched. All goes over loopback, or with --link over a link of that rate between two
networks, for root. Linux only.
"""

from __future__ import annotations

import json
import os
import queue
import random
import resource
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
from sizes import GIB, MIB, Size

_OURS, _KEPT, _PLAIN, _IPERF = "Rekindle, verified", "Rekindle, kept as a copy", "sendfile to recv_into", "iperf3"
_KINDS = (_OURS, _KEPT, _PLAIN, _IPERF)
_STEPS = (1, 2, 3)
"""Steps of the snapshots. A copy of the third is written over that of the first, as it goes on for ever."""
_TENSOR = 32 * MIB
_TRIES = 3
_RANGE = struct.Struct("!QQ")
_DOCS = Path(__file__).resolve().parent.parent / "docs"

Turn = dict[str, float]


class Place(NamedTuple):
    """One end of a connection."""

    host: str = "127.0.0.1"
    words: tuple[str, ...] = ()
    """Words of a command line before those of a command that runs there."""


class Ends(NamedTuple):
    """The nodes between which bytes go: this machine and itself, unless told otherwise."""

    sender: Place = Place()
    receiver: Place = Place()


def _connections() -> int:
    from rekindle.format.reader import reader_threads

    return reader_threads(in_memory=False)


def _stamp(step: int) -> Any:
    from rekindle.format.lineage import Incarnation, ShardId

    return ShardId(step, 0, 1, Incarnation(1, "ab" * 8))


# -- the node that sends --------------------------------------------------------------------------------------------


def _make(memory: Path, nbytes: int) -> Any:
    """Returns a job with snapshots of so many bytes."""
    from rekindle.format.names import receipt_name, shard_name, step_dir
    from rekindle.memory.job_dir import JobDir, memory_base
    from rekindle.testing import make_shard

    job = JobDir.of("/nowhere/bench", memory_base(memory))
    job.create()
    content = random.Random(0).randbytes(_TENSOR)
    tensors = {f"layer{n:04}": content[n:] + content[:n] for n in range(nbytes // _TENSOR)}
    for step in _STEPS:
        receipt, raw = make_shard(_stamp(step), tensors)
        place = job.path / step_dir(step)
        place.mkdir()
        (place / shard_name(0, 1)).write_bytes(raw)
        (place / receipt_name(0, 1)).write_bytes(receipt.raw)
    return job


def _serve(memory: Path, nbytes: int, host: str, secret: str) -> None:
    """Serves both ways until standard input ends. Prints the two ports."""
    from rekindle.format.names import shard_name, step_dir
    from rekindle.peers.server import PeerServer
    from rekindle.peers.snapshots import snapshot_handlers
    from rekindle.peers.wire import Credentials

    job = _make(memory, nbytes)
    listener, plain = socket.create_server((host, 0)), socket.create_server((host, 0))
    credentials = Credentials(bytes.fromhex(secret), "ab" * 8, "sender")
    server = PeerServer(listener, lambda: credentials, snapshot_handlers(job))
    server.start()
    fd = os.open(job.path / step_dir(1) / shard_name(0, 1), os.O_RDONLY)
    threading.Thread(target=_accept, args=(plain, fd), daemon=True).start()
    print(json.dumps([listener.getsockname()[1], plain.getsockname()[1]]), flush=True)
    sys.stdin.read()
    server.close()


def _accept(listener: socket.socket, fd: int) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_send_ranges, args=(connection, fd), daemon=True).start()


def _send_ranges(connection: socket.socket, fd: int) -> None:
    with connection:
        while len(asked := connection.recv(_RANGE.size, socket.MSG_WAITALL)) == _RANGE.size:
            at, stop = _RANGE.unpack(asked)
            while at < stop:
                at += os.sendfile(connection.fileno(), fd, at, stop - at)


# -- the node that receives -----------------------------------------------------------------------------------------


def _files(address: tuple[str, int], secret: str, step: int) -> Any:
    """Returns the sender's files of a step."""
    from rekindle.peers.files import PeerFiles
    from rekindle.peers.wire import Credentials

    stamp = _stamp(step)
    credentials = Credentials(bytes.fromhex(secret), stamp.incarnation.id, "receiver")
    return PeerFiles("sender", *address, credentials, stamp.checkpoint)


def _receive_ours(address: tuple[str, int], nbytes: int, secret: str) -> Turn:
    from rekindle.format.reader import NullSink, ShardReader, read_blocks

    files, room = _files(address, secret, 1), memoryview(bytearray(b"\1") * nbytes)

    with _measured(nbytes) as turn, files.shard(0, 1) as shard:
        blocks = shard.receipt.layout.blocks

        class Room(NullSink):
            def place(self, block: int) -> memoryview:
                start, stop = blocks[block]
                return room[start:stop]

        reader = ShardReader(shard)
        assert reader.header_is_sound() and read_blocks(reader, Room(), range(len(blocks))) == []
        reader.close()
    return turn


def _receive_copy(address: tuple[str, int], nbytes: int, secret: str) -> Turn:
    """Copies one snapshot after the other, as an agent does for a node. Measures the third."""
    from rekindle.memory.copies import CopySlots
    from rekindle.memory.job_dir import JobDir, memory_base
    from rekindle.peers.copying import copy_shard

    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        job = JobDir.of("/nowhere/bench", memory_base(Path(memory)))
        job.create()
        slots = CopySlots(job, [0], 1, 0)
        slots.adopt()
        for step in _STEPS:
            with _measured(nbytes) as turn, _files(address, secret, step).shard(0, 1) as shard:
                copy_shard(shard, shard.receipt.layout.chunks, slots)
        slots.close()
    return turn


def _receive_plainly(address: tuple[str, int], nbytes: int) -> Turn:
    from rekindle.format.layout import BLOCK
    from rekindle.format.reader import REMOTE_PIECE_BYTES

    room = memoryview(bytearray(b"\1") * nbytes)
    runs: queue.SimpleQueue[int] = queue.SimpleQueue()
    for at in range(0, nbytes, BLOCK):
        runs.put(at)

    def receive() -> None:
        with socket.create_connection(address) as connection:
            while True:
                try:
                    at = runs.get_nowait()
                except queue.Empty:
                    return
                stop = min(nbytes, at + BLOCK)
                connection.sendall(_RANGE.pack(at, stop))
                while at < stop:
                    at += connection.recv_into(room[at : min(stop, at + REMOTE_PIECE_BYTES)])

    with _measured(nbytes) as turn:
        threads = [threading.Thread(target=receive) for _ in range(_connections())]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return turn


@contextmanager
def _measured(nbytes: int) -> Iterator[Turn]:
    turn: Turn = {"bytes": nbytes}
    used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    yield turn
    turn["seconds"], after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    turn["cpu"] = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime


def _iperf(nbytes: int, ends: Ends) -> Turn:
    """Has iperf3 move so many bytes; again if its server never ends though the client has, as one of 3.12 may."""
    for _ in range(_TRIES):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        receiver = subprocess.Popen(
            [*ends.receiver.words, "iperf3", "-s", "-1", "-J", "-p", port], stdout=subprocess.PIPE
        )
        try:
            _send_by_iperf(nbytes, ends, port)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            said, _ = receiver.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            continue
        finally:
            receiver.kill()
            receiver.wait()
        after, found = resource.getrusage(resource.RUSAGE_CHILDREN), json.loads(said)["end"]["sum_received"]
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"bytes": found["bytes"], "seconds": found["seconds"], "cpu": cpu}
    raise click.ClickException("iperf3 does not come to its end")


def _send_by_iperf(nbytes: int, ends: Ends, port: str) -> None:
    sender = [*ends.sender.words, "iperf3", "-c", ends.receiver.host, "-p", port, "-n", str(nbytes)]
    sender += ["-P", str(_connections()), "-J"]
    until = time.monotonic() + 30
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 60}
    while subprocess.run(sender, **quiet, check=False).returncode:  # the receiver may not listen yet
        assert time.monotonic() < until, "iperf3 does not answer"
        time.sleep(0.1)


# -- turns ----------------------------------------------------------------------------------------------------------


@contextmanager
def _linked(rate: str | None) -> Iterator[Ends]:
    """Yields this machine, or two nodes of a lab, of which each sends at most at ``rate``."""
    if rate is None:
        yield Ends()
        return
    sys.path.insert(0, str(_DOCS.parent))  # the tests have the lab
    from tests.nodes.lab import Lab, why_not

    if reason := why_not():
        raise click.ClickException(reason)
    limit = ("root", "tbf", "rate", rate, "burst", "4mb", "latency", "50ms")
    with tempfile.TemporaryDirectory() as directory, Lab(Path(directory)) as lab:
        nodes = [lab.add(), lab.add()]
        for node in nodes:
            node.run("tc", "qdisc", "add", "dev", "eth0", *limit)
        yield Ends(*(Place(node.address, ("nsenter", "-t", str(node.pid), "-n", "--")) for node in nodes))


def _turn(kind: str, nbytes: int, ends: Ends, ports: list[int], secret: str) -> Turn:
    if kind == _IPERF:
        return _iperf(nbytes, ends)
    port = ports[1] if kind == _PLAIN else ports[0]
    command = [*ends.receiver.words, sys.executable, __file__, "--turn", kind, "--host", ends.sender.host]
    command += ["--port", str(port), "--size", str(nbytes)]
    done = subprocess.run(command, env={**os.environ, "BENCH_SECRET": secret}, stdout=subprocess.PIPE, check=True)
    turn: Turn = json.loads(done.stdout)
    return turn


def _all_turns(nbytes: int, rounds: int, ends: Ends) -> dict[str, list[Turn]]:
    secret = os.urandom(32).hex()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        command = [*ends.sender.words, sys.executable, __file__, "--serve", memory, "--host", ends.sender.host]
        sender = subprocess.Popen(
            [*command, "--size", str(nbytes)],
            env={**os.environ, "BENCH_SECRET": secret},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert sender.stdin is not None and sender.stdout is not None
        try:
            ports = json.loads(sender.stdout.readline())
            kinds = [kind for kind in _KINDS if kind != _IPERF or shutil.which("iperf3")]
            turns: dict[str, list[Turn]] = {kind: [] for kind in kinds}
            for number in range(rounds):
                first = number % len(kinds)
                for kind in kinds[first:] + kinds[:first]:
                    turns[kind].append(_turn(kind, nbytes, ends, ports, secret))
            return turns
        finally:
            sender.stdin.close()
            sender.wait()


def _rates(turns: list[Turn]) -> list[float]:
    return [turn["bytes"] / turn["seconds"] / 1e9 for turn in turns]


def _tabulate(turns: dict[str, list[Turn]], name: str) -> Any:
    from report import Table

    rows = []
    for kind, done in turns.items():
        row = [kind, f"{statistics.median(_rates(done)):.2f}", f"{min(_rates(done)):.2f} to {max(_rates(done)):.2f}"]
        for other in (_IPERF, _PLAIN):
            pairs = zip(_rates(done), _rates(turns.get(other, [])), strict=False)
            ratios = [ours / theirs for ours, theirs in pairs]
            row.append(f"{statistics.median(ratios):.2f}" if ratios else "")
        cpu = statistics.median(turn["cpu"] / turn["bytes"] * 1e9 for turn in done)
        rows.append([*row, f"{cpu:.2f}"])
    columns = ["", "GB/s", "from, to", f"of {_IPERF}", f"of {_PLAIN}", "receiver, CPU s/GB"]
    return Table(name, f"A snapshot read over {_connections()} connections, medians", columns, rows)


def _conditions(turns: dict[str, list[Turn]], link: str | None) -> str:
    """One paragraph: on what, when and how many."""
    from machine import describe

    machine = describe(Path(__file__).parent, Path("/dev/shm"), 1)
    (first, *_), rounds = turns[_OURS], len(turns[_OURS])
    way = "loopback" if link is None else f"a link of {link}"
    return (
        f"{machine['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / GIB:.0f} GiB, "
        f"Linux {machine['kernel']}, {way}, Python {machine['python']}; {first['bytes'] / GIB:.2g} GiB in each of "
        f"{rounds} turn(s), ratios of turns that follow each other."
    )


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--size", type=Size(), default="1GiB", help="Bytes of the snapshot.")
@click.option("--rounds", type=click.IntRange(1), default=7, help="Times that every contender has its turn.")
@click.option("--link", metavar="RATE", help="Rate of a link between two networks, such as 2.5gbit.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for every sample.")
@click.option("--docs", is_flag=True, help="Put the table into docs/benchmarks.md: loopback and link have one each.")
@click.option("--smoke", is_flag=True, help="A quick run at 64 MiB, which checks rather than measures.")
@click.option("--turn", type=click.Choice(_KINDS), default=None, hidden=True)
@click.option("--host", default="127.0.0.1", hidden=True)
@click.option("--port", type=int, default=0, hidden=True)
@click.option("--serve", type=click.Path(path_type=Path), default=None, hidden=True)
def main(
    size: int,
    rounds: int,
    link: str | None,
    output: Path | None,
    docs: bool,
    smoke: bool,
    turn: str | None,
    host: str,
    port: int,
    serve: Path | None,
) -> None:
    secret, size = os.environ.get("BENCH_SECRET", ""), max(1, size // _TENSOR) * _TENSOR
    if serve is not None:
        _serve(serve, size, host, secret)
        return
    if turn is not None:
        receive = {_OURS: _receive_ours, _KEPT: _receive_copy}.get(turn)
        done = _receive_plainly((host, port), size) if receive is None else receive((host, port), size, secret)
        print(json.dumps(done))
        return
    if smoke and docs:
        raise click.UsageError("--smoke gives no figures worth a --docs")
    if smoke:
        size, rounds = 64 * MIB, 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a killed run tidies up too
    with _linked(link) as ends:
        turns = _all_turns(size, rounds, ends)
    _show(turns, link, output, docs=docs)


def _show(turns: dict[str, list[Turn]], link: str | None, output: Path | None, *, docs: bool) -> None:
    from report import console_table, markdown, put_blocks
    from rich.console import Console

    name = "nodes" if link is None else "nodes link"
    table, conditions = _tabulate(turns, name), _conditions(turns, link)
    if output is not None:
        output.write_text(json.dumps({"conditions": conditions, "turns": turns}, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 170)
    console_table(console, table)
    console.print(conditions, markup=False)
    if docs:
        for missing in put_blocks(_DOCS / "benchmarks.md", {name: markdown(table), f"{name} conditions": conditions}):
            click.echo(f"docs/benchmarks.md has no place for {missing!r}")


if __name__ == "__main__":
    main()
