"""What must be true of a disk after a power cut, and after the product has come back to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rekindle.agent.drain import Drainer
from rekindle.errors import UsageError
from rekindle.format.lineage import Incarnation, ShardId, superseded_by
from rekindle.format.names import MANIFEST, receipt_name, shard_name, step_dir
from rekindle.memory.job_dir import JobDir
from rekindle.storage.catalog import find_copies
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import verify
from tests.crash.disk import Tree
from tests.crash.jobs import Key, Place, content_of, drain, newest_of

__all__ = ["Promise", "come_back", "drained_again", "judge", "look"]


@dataclass(frozen=True)
class Promise:
    """What somebody has been told before the power went."""

    durable: frozenset[Key] = frozenset()
    exported: frozenset[str] = frozenset()

    def told(self, what: object) -> Promise:
        if isinstance(what, str):
            return Promise(self.durable, self.exported | {what})
        assert isinstance(what, tuple)
        return Promise(self.durable | {what}, self.exported)

    @property
    def newest(self) -> Key | None:
        """The checkpoint that must not be lost: the newest one that no later start of the job has left behind."""
        starts = {incarnation for _, incarnation in self.durable}
        live = [key for key in self.durable if not superseded_by(*key, starts)]
        return max(live, key=lambda key: (key[0], key[1].generation), default=None)

    def kept_by(self, newest: ShardId | None) -> str | None:
        """What is wrong with what a restore would begin with; None when nothing is."""
        mine = self.newest
        if mine is None or (newest is not None and newest.checkpoint == mine):
            return None
        what = f"step {mine[0]} of start {mine[1].generation}, told to be durable,"
        if newest is None:
            return f"{what} is lost: nothing is offered"
        step, incarnation = newest.checkpoint
        newer = incarnation.generation > mine[1].generation or (incarnation == mine[1] and step > mine[0])
        if newer and not superseded_by(step, incarnation, {one for _, one in self.durable}):
            return None
        return f"{what} is lost: step {step} of start {incarnation.generation} is offered"


Known = Mapping[Key, Mapping[str, bytes]]


def look(root: Path, promise: Promise, known: Known) -> Iterator[str]:
    """What is wrong with the checkpoints that are offered."""
    store = PosixStore(root)
    for copy in find_copies(None, store):
        name = f"step {copy.step} of start {copy.incarnation.generation}"
        for problem in verify(copy):
            yield f"{name} is offered and torn: {problem}"
        for file, content in known.get(copy.checkpoint, {}).items():
            path = Path(copy.files.named(file))
            if path.exists() and path.read_bytes() != content:
                yield f"{name} is offered, and {file} is not what was saved"
    for step, files in store.damaged():
        yield f"step {step} has a manifest that can't be read: {files.named('')}"
    lost = promise.kept_by(newest_of(store.published()))
    if lost:
        yield lost


def come_back(place: Place) -> tuple[ShardId, bool]:
    """What the product does next: it tidies up, goes on from the newest checkpoint, and saves. The save, and whether
    it was told to be durable."""
    store = PosixStore(place.root)
    store.clean_up()
    published = store.published()
    newest = newest_of(published)
    generation = 1 + max([entry.stamp.incarnation.generation for entry in published] + _generations(place.root))
    parent = (newest.incarnation.id, newest.step) if newest is not None else ("", 0)
    step = 1 + max([int(name[5:15]) for name in _steps(place.root)], default=0)
    stamp = ShardId(step, 0, 1, Incarnation(generation, f"{generation:016x}", *parent))
    return stamp, drain(place.memory(stamp))


def judge(place: Place, promise: Promise, known: Known, exports: Mapping[str, Tree]) -> Iterator[str]:
    """Everything that is wrong with the disk at ``place``, now and after the product has come back to it."""
    yield from look(place.root, promise, known)
    yield from (f"after the power cut: {wrong}" for wrong in _exports(place, promise, exports))
    stamp, durable = come_back(place)
    name = f"the next save, step {stamp.step} of start {stamp.incarnation.generation},"
    if not durable:
        yield f"{name} did not become durable"
        return
    after = promise.told(stamp.checkpoint)
    yield from (f"after {name} {wrong}" for wrong in look(place.root, after, known))
    litter = set(os.listdir(place.root)) - {step_dir(stamp.step)}
    if litter:
        yield f"after {name} is left behind: {', '.join(sorted(litter))}"
    extra = set(os.listdir(place.root / step_dir(stamp.step))) - {MANIFEST, shard_name(0, 1), receipt_name(0, 1)}
    if extra:
        yield f"{name} has beside its files: {', '.join(sorted(extra))}"
    yield from _export_again(place)


def drained_again(place: Place, promise: Promise, known: Known, memory: Sequence[JobDir]) -> Iterator[str]:
    """What is wrong where only the storage had lost its power, and the nodes go on with what they have in memory."""
    for job in [*memory, *memory]:  # the last node to finish publishes; the others learn of it
        drain(job)
    yield from (f"drained again, {wrong}" for wrong in look(place.root, promise, known))
    memory[0].notes.forget_durable()
    if Drainer(memory[0]).pending() is not None:
        yield "drained again, it does not become durable"


def _exports(place: Place, promise: Promise, exports: Mapping[str, Tree]) -> Iterator[str]:
    for path in place.world.glob("out-*"):
        if content_of(path) != exports.get(path.name):
            yield f"{path.name} is there and torn"
    for name in promise.exported:
        if not (place.world / name).exists():
            yield f"{name}, told to be exported, is lost"


def _export_again(place: Place) -> Iterator[str]:
    """Another export by the same name works, or is refused where the first one got there; nothing else stays."""
    from rekindle.transfer.exporting import export
    from rekindle.transfer.progress import Progress

    names = {path.name.removesuffix(".tmp").lstrip(".") for path in place.world.iterdir()} - {"jobs"}
    for name in sorted(names):
        out = place.world / name
        there = out.exists()
        try:
            export(find_copies(None, PosixStore(place.root))[0], out, "safetensors", None, 4000, Progress())
        except UsageError:
            if not there:
                yield f"{name} can't be exported again"
        if not out.exists():
            yield f"{name} is not there when it has been exported again"
        if (place.world / f".{name}.tmp").exists():
            yield f".{name}.tmp stays for ever"


def _steps(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith("step-")] if root.is_dir() else []


def _generations(root: Path) -> list[int]:
    """Of starts of the job that have left something: no id is drawn twice."""
    return [0] + [int(name.split(".")[1], 16) for name in _steps(root) if "." in name]
