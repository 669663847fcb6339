"""Targets that forge whole stores: a checkpoint's directory, and a job's directory in memory. Whole operations run."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from rekindle import Values
from rekindle.agent.drain import Drainer
from rekindle.cli.main import main
from rekindle.cli.operations import job_status
from rekindle.common.process_start import clock_id
from rekindle.errors import RekindleError
from rekindle.format.layout import DTYPES, Chunk, Layout
from rekindle.format.names import MANIFEST, job_name, receipt_name, shard_name, step_dir
from rekindle.format.receipt import checksum
from rekindle.memory.clean_up import remove_departed_ranks
from rekindle.memory.costs import CostPage, Costs, cost_page
from rekindle.memory.elsewhere import Elsewhere
from rekindle.memory.incidents import StartRecord, describe_end, note_gone, open_incident, write_incident, write_start
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.local_state import LocalStateWriter, padded
from rekindle.memory.rebuild import rebuild_dead_ranks
from rekindle.memory.slots import Slots
from rekindle.memory.status import StatusPage
from rekindle.restore.restore import restore
from rekindle.session.group import SingleProcess
from rekindle.state.rng import RNG, RngState
from rekindle.storage.posix import PosixStore
from tests.conftest import commit
from tests.fuzz.choices import Case, Choices, apply, edits, text
from tests.fuzz.documents import document, garble, spray
from tests.fuzz.fence import preparing, refused
from tests.fuzz.seeds import FIRST, STEP, fields_of, live_state, scratch_directory, sharded, single, two_ranks

__all__ = ["checkpoint", "command", "memory"]

_LARGEST = 64 << 20
"""Bytes that a shard's file is stretched to, at most, to be as long as a forged receipt says."""


def command(*arguments: object) -> None:
    """A command of ``rekindle``, which may refuse by an exit code, and in no other way."""
    result = CliRunner().invoke(main, [str(a) for a in arguments], prog_name="rekindle")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception


def _links(choices: Choices, names: list[str]) -> list[list[str]]:
    """What becomes of a file: a link to the outside, a directory, a pipe that nobody writes to, nothing."""
    if choices.byte() % 6 != 5:
        return []
    return [[choices.pick(("link", "directory", "pipe", "gone", "empty", "moved")), choices.pick(names)]]


def _place(directory: Path, changes: list[list[str]]) -> None:
    for how, name in changes:
        path = directory / name
        if not path.exists():
            continue
        outside = directory.parents[1] / "outside"
        outside.mkdir(exist_ok=True)
        if how in ("link", "moved"):
            shutil.move(path, outside / path.name)
            if how == "link":
                path.symlink_to(outside / path.name)
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if how == "directory":
            path.mkdir()
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "empty":
            path.touch()


class checkpoint:
    """A checkpoint's directory: listed, inspected, verified, exported, restored from."""

    WORLDS: dict[int, Callable[[], Path]] = {1: single, 2: two_ranks}
    DOES: tuple[tuple[str, ...], ...] = (("ls",), ("inspect",), ("inspect", str(STEP), "--json"), ("verify", "--json"))
    DOES += (("export", "--format", "safetensors"), ("export", "--format", "torch"), ("export", "--format", "dcp"))

    @staticmethod
    def make(choices: Choices) -> Case:
        world = choices.pick((1, 2))
        directory = checkpoint.WORLDS[world]() / step_dir(STEP)
        names = [receipt_name(r, world) for r in range(world)] + [shard_name(r, world) for r in range(world)]
        case: Case = {"world": world, "places": _links(choices, [*names, MANIFEST, ""]), "mend": choices.byte() % 2}
        case["does"] = sorted({choices.byte() % len(checkpoint.DOES) for _ in range(3)})
        if choices.byte() % 32 == 31:
            case["spray"] = [choices.pick((10, 50, 300, 1500)), choices.pick((1, 2)), choices.pick((1, 2, 3))]
        for rank in range(world):
            fields = fields_of((directory / receipt_name(rank, world)).read_bytes())
            case[str(rank)] = edits(fields, choices, 4)
        case["manifest"] = [] if choices.byte() % 4 else edits(fields_of((directory / MANIFEST).read_bytes()), choices)
        return garble(choices, case)

    @staticmethod
    def run(case: Case, place: Path) -> None:
        world = case["world"]
        root = place / "root"
        directory = root / step_dir(STEP)
        with preparing():
            shutil.copytree(checkpoint.WORLDS[world](), root)
            forge(directory, case)
        for number in case["does"]:
            what, *more = checkpoint.DOES[number]
            out = [place / more[-1]] if what == "export" else []
            command(what, root, *out, *more, "--memory", place)
        restored(root, world)
        store = PosixStore(root)
        refused(lambda: (store.clean_up(), store.prune(1, None)))
        assert all(path.name in ("root", "outside", "safetensors", "torch", "dcp") for path in place.iterdir())


def forge(directory: Path, case: Case) -> None:
    """Edit the receipts and the manifest of a checkpoint, and make what is not edited agree with them."""
    world = case["world"]
    for rank in range(world):
        path = directory / receipt_name(rank, world)
        fields = fields_of(path.read_bytes())
        if "spray" in case:
            spray(fields, *case["spray"])
        apply(fields, case[str(rank)])
        if case["mend"] & 1:
            _mend(fields, path.with_suffix(".safetensors"))
        path.write_bytes(document(fields, [], case if rank == world - 1 else {}))
    fields = fields_of((directory / MANIFEST).read_bytes())
    for rank, entry in enumerate(fields["shards"]):
        entry["receipt_checksum"] = checksum((directory / receipt_name(rank, world)).read_bytes())
    (directory / MANIFEST).write_bytes(document(fields, case["manifest"], {}))
    _place(directory, case["places"])


def _mend(fields: dict[str, Any], shard: Path) -> None:
    """Byte ranges that follow one another, a file that is long enough, checksums that are those of its bytes."""
    try:
        chunks = [Chunk.from_json({**each, "range": _range(each)}) for each in fields["tensors"]]
        at, placed = 0, []
        for chunk, each in zip(chunks, fields["tensors"], strict=True):
            each["range"] = [at, at + chunk.nbytes]
            placed.append(Chunk.from_json(each))
            at += chunk.nbytes
        if at > _LARGEST or not 0 < int(fields["shard"]["header_bytes"]) < _LARGEST:
            return
        head = int(fields["shard"]["header_bytes"])
        os.truncate(shard, head + at)
        data = memoryview(shard.read_bytes())
        fields["shard"]["header_checksum"] = checksum(data[:head])
        fields["checksums"] = [checksum(data[head + a : head + b]) for a, b in Layout(tuple(placed)).blocks]
    except (RekindleError, KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError, OSError):
        return


def _range(each: Any) -> list[int]:
    import math

    return [0, math.prod(map(int, each["sizes"])) * DTYPES[each["dtype"]][1]]


def restored(root: Path, world: int, job: JobDir | None = None) -> None:
    """Load it into a state that would take the sound one; it may refuse."""
    state = live_state(1) if world == 1 else _shape_of_two()
    before = torch.get_rng_state()
    state[RNG] = RngState()
    for parts in (None, frozenset(state)):
        refused(
            lambda parts=parts: restore(
                SingleProcess(), state, job, PosixStore(root), None, allow_pickle=False, parts=parts
            )
        )  # type: ignore[misc]
    torch.set_rng_state(before)


def _shape_of_two() -> dict[str, Any]:
    tensors = {"w": torch.zeros(4, 3), "b": torch.zeros(3, dtype=torch.complex64)}
    notes = {"own": torch.zeros(2, dtype=torch.int64), "list": (0, [0])}
    return {"model": Values(**tensors), "notes": Values(**notes)}


# -- memory ----------------------------------------------------------------------------------------------------------


@cache
def _job_seed() -> Path:
    """A dead job's directory: snapshots and small states of two ranks, status pages, what the agent wrote."""
    base = scratch_directory() / "memory"
    root = base / "root"
    job = JobDir(base / "job")
    job.path.parent.mkdir(mode=0o700)
    job.create()
    job.write_job(JobInfo(str(root), [0, 1], 2, 2, None, 60.0))
    for rank in (0, 1):
        found, data = sharded(rank)
        smalls = [LocalStateWriter(job, rank), LocalStateWriter(job, rank, before_update=True)]
        numbers = [n for n, (a, b) in enumerate(found.layout.blocks) if b - a < 20]
        sizes = [b - a for n, (a, b) in enumerate(found.layout.blocks) if n in numbers]
        body = memoryview(b"".join(bytes([n]) * padded(size) for n, size in enumerate(sizes)))
        static = found.static_part(found.layout, found.structure)
        for small in smalls:
            small.set_plan(found.stamp, static, numbers, {"model.w": [0, 1], "optimizer.state.w.exp_avg": [0, 1]})
        for small in smalls:
            small.set_plan(found.stamp, static, numbers, {"model.w": [0, 1], "optimizer.state.w.exp_avg": [0, 1]})
            small.write(found.stamp, json.dumps(found.values).encode(), body)
        slots = Slots(job, rank, 2, [0, 1])
        commit(slots, found, data)
        slots.close()
        StatusPage(job.paths.status_page(rank), 1)
        CostPage(cost_page(job.path, rank)).write(Costs(generation=1))
        job.paths.rank_lock(rank).touch()
    job.notes.write_durable(3)
    job.paths.agent_status.write_text(json.dumps({"error": "storage is full", "durable": 3, "step": None, "done": 0}))
    fault = {"cause": "hang", "rank": 1, "generation": 1, "step": 5, "what": "rank 1 hangs", "detail": ""}
    job.paths.fault.write_text(json.dumps({**fault, "noticed": 1.5, "at": 2.5}))
    write_start(job, StartRecord(FIRST.id, 1, clock_id(), 1.25, 1.0, 1.3, 2, ("run", 0)))
    note_gone(job, 1.75, 1.75)
    ended = describe_end(job)
    assert ended is not None
    write_incident(job, replace(ended, start="b" * 16, host="node"))
    return job.path


class memory:
    """A job's directory in memory: listed, put together, drained, restored from, ended."""

    DOCUMENTS = ("rank-00000.plan", "rank-00001.plan", "receipt-0", "receipt-1")
    SMALL = ("rank-00000.small-0", "rank-00001.small-u", "rank-00001.small-0")
    PLAIN = (
        "job.json",
        "agent.json",
        "fault.json",
        "start.json",
        "gone.json",
        f"incidents/0000000001-{'b' * 16}-node.jsonl",
    )
    RAW = ("durable", "drained", "rank-00000.status", "rank-00000.costs", "rank-00001.small-0", "rank-00000.lock")
    ODD = (
        "rank-abc.lock",
        "rank-1.slot",
        "rank--0001.small-0",
        "step-0000000009",
        "rank-99999.plan",
        "slots/rank-x.slot",
    )

    @staticmethod
    def make(choices: Choices) -> Case:
        job = _job_seed()
        case: Case = {"documents": {}, "small": {}, "plain": {}, "raw": {}, "odd": [], "places": []}
        for _ in range(1 + choices.byte() % 3):
            kind = choices.byte() % 8
            if kind < 3:
                name = choices.pick(memory.DOCUMENTS)
                case["documents"][name] = edits(fields_of(_file(job, name).read_bytes()), choices, 4)
            elif kind < 5:
                name = choices.pick(memory.SMALL)
                case["small"][name] = [edits(_small(job / name)[0], choices, 4), choices.byte() % 4]
            elif kind < 6:
                name = choices.pick(memory.PLAIN)
                case["plain"][name] = edits(json.loads((job / name).read_bytes()), choices, 4)
            elif kind < 7:
                name = choices.pick(memory.RAW)
                case["raw"][name] = [choices.number(5000), base64.b64encode(choices.rest(choices.byte())).decode()]
            else:
                case["odd"].append(choices.pick(memory.ODD))
                case["places"] += _links(choices, [*memory.PLAIN, *memory.RAW, "slots", step_dir(STEP)])
        case["gone"] = choices.byte() % 4
        return case

    @staticmethod
    def run(case: Case, place: Path) -> None:
        root = place / "root"
        job = JobDir.of(root, memory_base(place))
        with preparing():
            job.path.parent.mkdir(mode=0o700)
            shutil.copytree(_job_seed(), job.path)
            _forge_job(job, root, case)
        for given in (
            ("ls", root),
            ("inspect", root),
            ("verify", root),
            ("export", root, place / "out", "--format", "torch"),
            ("incidents", root),
            ("incidents", root, "--json"),
            ("metrics", "--once"),
        ):
            command(*given, "--memory", place)
        refused(lambda: job_status(job))
        refused(lambda: str(job.notes.drain_error()) + str(job.notes.durable()))
        refused(lambda: open_incident(job))
        refused(lambda: rebuild_dead_ranks(job, Elsewhere()))
        refused(
            lambda: [remove_departed_ranks(job, stamp.checkpoint) for stamp, _ in list(job.snapshots.shard_ids())[:1]]
        )
        restored(root, 2, job)
        drainer = Drainer(job)
        for _ in range(2):
            refused(drainer.tick)
            refused(drainer.pending)
        refused(lambda: job_status(job))
        refused(job.remove)
        assert all(path.name in ("root", "outside", "out", job.path.parent.name) for path in place.iterdir())


def _file(job: Path, name: str) -> Path:
    if name.startswith("receipt-"):
        return job / step_dir(STEP) / receipt_name(int(name[-1]), 2)
    return job / name


def _small(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return fields_of(raw[8 : 8 + length]), raw[8 + length :]


def _forge_job(job: JobDir, root: Path, case: Case) -> None:
    for name, changes in case["documents"].items():
        path = _file(job.path, name)
        path.write_bytes(document(fields_of(path.read_bytes()), changes, {}))
    for name, plan in (("rank-00000", "rank-00000.plan"), ("rank-00001", "rank-00001.plan")):  # what belongs to it
        digest = checksum((job.path / plan).read_bytes())
        for path in job.path.glob(f"{name}.small-*"):
            fields, tensors = _small(path)
            fields["plan"] = digest
            changes, how = case["small"].get(path.name, ([], 0))
            tensors = (tensors, tensors[:-1], tensors * 2, b"")[how]
            fields["tensors"] = checksum(tensors)
            data = document(fields, changes, {})
            path.write_bytes(len(data).to_bytes(8, "little") + data + tensors)
    for name, changes in case["plain"].items():
        fields = json.loads((job.path / name).read_bytes())
        whole = {"": fields}
        apply(whole, [[how, ["", *path], what] for how, path, what in changes])
        (job.path / name).write_bytes(text(whole[""]) if "" in whole else b"")
    info = job.path / "job.json"
    data = info.read_bytes()
    info.write_bytes(
        data.replace(json.dumps(str(_job_seed().parent / "root")).encode(), json.dumps(str(root)).encode())
    )
    for name, (at, new) in case["raw"].items():
        old = (job.path / name).read_bytes()
        (job.path / name).write_bytes(old[:at] + base64.b64decode(new) + old[at + len(base64.b64decode(new)) :])
    for name in case["odd"]:
        path = job.path / name
        path.mkdir(exist_ok=True) if name.startswith("step") else path.touch()
    for rank in (0, 1):
        if case["gone"] >> rank & 1:
            (job.path / step_dir(STEP) / receipt_name(rank, 2)).unlink(missing_ok=True)
            (job.path / step_dir(STEP) / shard_name(rank, 2)).unlink(missing_ok=True)
    _place(job.path, case["places"])
    assert job.path.name == job_name(root)
