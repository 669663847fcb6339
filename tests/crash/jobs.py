"""What is done to storage: each operation as the product does it, by its own hands, on shards of three blocks."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rekindle.agent.drain import Drainer
from rekindle.format.lineage import Incarnation, ShardId, superseded_by
from rekindle.format.names import receipt_name, shard_name, step_dir
from rekindle.memory.job import JobInfo as Info
from rekindle.memory.job_dir import JobDir
from rekindle.save.to_storage import DirectSaver
from rekindle.storage.catalog import find_copies
from rekindle.storage.commit import Committer
from rekindle.storage.posix import PosixStore
from tests.conftest import make_shard
from tests.crash.disk import Tree
from tests.crash.recorder import Killed, Recorder

__all__ = ["FORMS", "OPERATIONS", "Key", "Place", "Run", "content_of", "drain", "newest_of", "race", "reports"]

KEEP = 1
Key = tuple[int, Incarnation]


def _data(step: int, rank: int) -> dict[str, bytes]:
    return {"x": b"step %d, " % step * 500, "y": b"rank %d, " % rank * 50}


@dataclass
class Place:
    """Where the disk and the memory of a run lie, always by the same names. Memory that was filled once is kept."""

    path: Path
    _filled: dict[tuple[ShardId, ...], JobDir] = field(default_factory=dict)

    @property
    def world(self) -> Path:
        return self.path / "disk"

    @property
    def root(self) -> Path:
        return self.world / "jobs" / "run"

    @property
    def empty_job(self) -> JobDir:
        return JobDir(self.path / "memory" / "nothing")

    def put(self, tree: Tree) -> None:
        """Make the disk be as it is there."""
        shutil.rmtree(self.world, ignore_errors=True)
        self.world.mkdir(parents=True)
        for path, content in tree.items():
            if content is None:
                (self.world / path).mkdir()
            else:
                with open(self.world / path, "wb", buffering=0) as file:
                    file.write(content)

    def memory(self, *stamps: ShardId) -> JobDir:
        """A node's memory with these snapshots, as committed."""
        if stamps not in self._filled:
            job = JobDir(self.path / "memory" / f"{len(self._filled):06d}")
            job.create()
            ranks = [stamp.rank for stamp in stamps]
            job.write_job(Info(str(self.root), ranks, stamps[0].world, KEEP, None, 600.0))
            directory = job.path / step_dir(stamps[0].step)
            directory.mkdir()
            for stamp in stamps:
                receipt, data = make_shard(stamp, _data(stamp.step, stamp.rank))
                (directory / shard_name(stamp.rank, stamp.world)).write_bytes(data)
                (directory / receipt_name(stamp.rank, stamp.world)).write_bytes(receipt.raw)
            self._filled[stamps] = job
        self._filled[stamps].notes.forget_durable()
        return self._filled[stamps]


def newest_of(published: list[Any]) -> ShardId | None:
    """What a restore would begin with."""
    seen = {entry.stamp.incarnation for entry in published}
    live = [e.stamp for e in published if not superseded_by(e.stamp.step, e.stamp.incarnation, seen)]
    return live[-1] if live else None


def content_of(path: Path) -> Tree:
    """A file, by an empty name, or all that lies in a directory."""
    if not path.is_dir():
        return {"": path.read_bytes()}
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


def drain(job: JobDir) -> bool:
    """By an agent that has just come up. Memory is used again in many states: it knows nothing of those before."""
    job.notes.forget_durable()
    return Drainer(job).tick()


@contextmanager
def reports(tell: Callable[[object, str], None]) -> Iterator[None]:
    """Hear whenever the product tells somebody that a checkpoint is durable. And draw no lots, so that runs repeat."""
    publish, tidy = PosixStore.publish, Committer.tidy
    numbers = itertools.count(1 << 28)  # far from the numbers of starts: an import has an id of its own

    def heard_publish(store: PosixStore, stamp: ShardId, before: Callable[[], object] = lambda: None) -> bool:
        done = publish(store, stamp, before)
        if done:
            tell(stamp.checkpoint, f"step {stamp.step} of start {stamp.incarnation.generation} is told to be durable")
        return done

    def heard_durable(committer: Committer, stamp: ShardId, keep: int | None, keep_every: int | None) -> list[int]:
        tell(stamp.checkpoint, f"step {stamp.step} of start {stamp.incarnation.generation} is taken to be durable")
        return tidy(committer, stamp, keep, keep_every)

    with (
        patch.object(PosixStore, "publish", heard_publish),
        patch.object(Committer, "tidy", heard_durable),
        patch("secrets.token_hex", lambda nbytes: f"{next(numbers):0{2 * nbytes}x}"),
    ):
        yield


@dataclass
class Run:
    """A history under way: which start of the job it is, at which step, and what came of it."""

    place: Place
    recorder: Recorder
    incarnation: Incarnation = field(default_factory=lambda: Incarnation(1, f"{1:016x}"))
    step: int = 0
    exports: dict[str, Tree] = field(default_factory=dict)
    """What was exported, by name."""
    known: dict[Key, Mapping[str, bytes]] = field(default_factory=dict)
    """The files of each checkpoint that was begun."""
    last: list[JobDir] = field(default_factory=list)
    """The memory that was drained last."""
    calls: int = 0
    """Calls that the last operation has made."""

    @property
    def store(self) -> PosixStore:
        return PosixStore(self.place.root)

    def do(self, name: str, die_at: int | None = None) -> None:
        """An operation, by a process of its own, which may die at one of its calls."""
        newest = newest_of(self.store.published())
        mine = self.incarnation
        if newest is not None and newest.incarnation != mine and newest.incarnation.generation >= mine.generation:
            self.start_again()  # as after an import, which no live job allows
        self.recorder.begin(die_at)
        try:
            (OPERATIONS | FORMS)[name](self)
        except Killed:
            if name != "resume":
                self.start_again(self.incarnation)
        self.calls = self.recorder.calls
        for path in self.place.world.glob("out-*"):
            self.exports[path.name] = content_of(path)

    def start_again(self, before: Incarnation | None = None, back: int = 0) -> None:
        """A new start of the job, from the newest checkpoint that can be seen, or from so many steps before."""
        published = self.store.published()
        seen = [entry.stamp.incarnation for entry in published] + [before or self.incarnation]
        generation = 1 + max(one.generation for one in seen)
        self.incarnation = Incarnation(generation, f"{generation:016x}")
        newest = newest_of(published)
        self.step = max(newest.step - back, 0) if newest is not None else 0
        if newest is not None:
            self.incarnation = replace(self.incarnation, parent=newest.incarnation.id, parent_step=self.step)

    def begin(self, *ranks: int, world: int = 1) -> list[ShardId]:
        """The next step's stamps, of these ranks."""
        self.step += 1
        stamps = [ShardId(self.step, rank, world, self.incarnation) for rank in ranks]
        self.know(stamps)
        return stamps

    def know(self, stamps: list[ShardId]) -> None:
        files = {}
        for stamp in stamps:
            receipt, data = make_shard(stamp, _data(stamp.step, stamp.rank))
            files[shard_name(stamp.rank, stamp.world)] = data
            files[receipt_name(stamp.rank, stamp.world)] = receipt.raw
        self.known[stamps[0].checkpoint] = files

    def write(self, stamp: ShardId) -> Committer:
        """Write a shard, and no more."""
        receipt, data = make_shard(stamp, _data(stamp.step, stamp.rank))
        committer = Committer(self.store, None)
        committer.begin(stamp)
        committer.write(receipt, memoryview(data))
        return committer


def _save(run: Run) -> None:
    """Straight to storage, as where there is no memory."""
    (stamp,) = run.begin(0)
    receipt, data = make_shard(stamp, _data(stamp.step, 0))
    live: Any = None  # the state is not asked for
    DirectSaver(live, run.store, (KEEP, None))._write(receipt, memoryview(data))


def _drain(run: Run, ranks: int = 1) -> None:
    run.last = [run.place.memory(*run.begin(*range(ranks), world=ranks))]
    drain(run.last[0])


def _drain_two(run: Run) -> None:
    _drain(run, 2)


def _two_nodes(run: Run) -> list[Drainer]:
    stamps = run.begin(0, 1, world=2)
    run.last = [run.place.memory(stamp) for stamp in stamps]
    return [Drainer(job) for job in run.last]


def _nodes(run: Run) -> None:
    """The first has done its part when the second comes; it asks again later."""
    first, second = _two_nodes(run)
    first.tick()
    second.tick()
    first._unfinished._ask_at = 0.0
    first.tick()


def race(at: int) -> Callable[[Run], None]:
    """Two nodes publish at once: all that the second does comes just before call ``at`` of the first."""

    def nodes(run: Run) -> None:
        first, second = _two_nodes(run)
        second.tick()
        second._unfinished._ask_at = 0.0
        run.recorder.begin(run.recorder.die_at, {at: second.tick})
        first.tick()

    return nodes


def _resume(run: Run) -> None:
    """Another agent finds the same memory."""
    for job in run.last:
        drain(job)


def _over(run: Run) -> None:
    """The job has gone back by a step, and publishes that step anew; it was killed before it could tidy up."""
    run.start_again(back=1)
    (stamp,) = run.begin(0)
    run.write(stamp).commit(stamp, [stamp])


def _part(run: Run) -> None:
    """One of two ranks has written its shard when all is over."""
    (stamp,) = run.begin(0, world=2)
    run.know([stamp, replace(stamp, rank=1)])
    run.write(stamp)
    run.start_again(run.incarnation)


def _prune(run: Run) -> None:
    run.store.prune(KEEP, None)


def _settle(run: Run) -> None:
    run.store.clean_up()


def _discard(run: Run) -> None:
    (stamp,) = run.begin(0, world=2)
    run.write(stamp)
    run.store.discard(stamp)


def _export(form: str) -> Callable[[Run], None]:
    def export_it(run: Run) -> None:
        from rekindle.transfer.exporting import export
        from rekindle.transfer.progress import Progress

        newest = newest_of(run.store.published())
        copies = [c for c in find_copies(None, run.store) if newest is not None and c.checkpoint == newest.checkpoint]
        if copies:
            out = run.place.world / f"out-{len(run.exports)}"
            export(copies[0], out, form, None, 4000, Progress())  # type: ignore[arg-type]
            run.recorder.tell(out.name, f"{out.name} is told to be exported")

    return export_it


def _import(run: Run) -> None:
    """Of a file that lies elsewhere."""
    from rekindle.transfer.importing import import_checkpoint
    from rekindle.transfer.progress import Progress

    source = run.place.path / "source.safetensors"
    if not source.exists():
        table = {"w": {"dtype": "U8", "shape": [9000], "data_offsets": [0, 9000]}}
        head = json.dumps(table).encode()
        source.write_bytes(len(head).to_bytes(8, "little") + head + bytes(range(250)) * 36)
    newest = newest_of(run.store.published())
    step = 1 + max(run.step, newest.step if newest is not None else 0)
    run.step = step
    import_checkpoint(source, run.place.empty_job, run.place.root, step, None, Progress(), allow_pickle=False)


OPERATIONS: dict[str, Callable[[Run], None]] = {
    "save": _save,
    "drain": _drain,
    "drain-two": _drain_two,
    "nodes": _nodes,
    "resume": _resume,
    "over": _over,
    "part": _part,
    "prune": _prune,
    "settle": _settle,
    "discard": _discard,
    "export": _export("safetensors"),
    "import": _import,
}
"""Those of which sequences are made."""
FORMS = {f"export-{form}": _export(form) for form in ("torch", "dcp")}
"""Other formats, which go to storage in the same way as the first."""
