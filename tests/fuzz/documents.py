"""Targets that read documents, values, boxes, pages and names: what comes out is what every part goes on with."""

from __future__ import annotations

import base64
import itertools
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from rekindle.errors import RekindleError
from rekindle.format.boxes import Box, uncovered
from rekindle.format.completeness import find_defect
from rekindle.format.names import STEP_DIR, canonical_root, job_name, parse_shard_name, root_path
from rekindle.format.receipt import Receipt, read_stamp
from rekindle.memory.status import PHASE_TEXTS, PHASES, STAGES, StatusPage, read_status
from rekindle.restore.reshard import Have, Want, plan
from rekindle.restore.saved import Saved
from rekindle.state.codec import decode, encode, has_pickle
from rekindle.state.tree import assemble, entries
from rekindle.storage.listing import list_values
from rekindle.storage.throttle import parse_rate, parse_size
from rekindle.transfer.merge import extract_part, find_tensors, merge
from tests.fuzz.choices import Case, Choices, apply, edits, text
from tests.fuzz.fence import preparing
from tests.fuzz.seeds import fields_of, scratch_directory, sealed, sharded

__all__ = ["boxes", "document", "names", "receipt", "stamp", "status", "values"]

Run = Callable[[Case, Path], None]


def document(fields: dict[str, Any], changes: list[Any], case: Case) -> bytes:
    """A document after some edits, sealed; then garbled past its digests, where the case says so."""
    apply(fields, changes)
    mark = text(fields.pop("stamp", None))
    data = sealed(mark, text(fields))
    if "garble" in case:
        at, new = case["garble"]
        at %= len(data)
        data = data[:at] + base64.b64decode(new) + data[at + 1 :]
    return data


def garble(choices: Choices, case: Case) -> Case:
    """Now and then, an edit of the bytes themselves."""
    if choices.byte() % 8 == 7:
        case["garble"] = [choices.number(1 << 16), base64.b64encode(choices.rest(8)).decode()]
    return case


class receipt:
    """A receipt, and everything that is made of one without reading anything else."""

    @staticmethod
    def make(choices: Choices) -> Case:
        rank, spray = choices.byte() % 2, choices.byte()
        case: Case = {"rank": rank}
        if spray % 32 == 31:
            case["spray"] = [choices.pick((10, 50, 300, 1500)), choices.pick((1, 2)), choices.pick((1, 2, 3))]
        case["edits"] = edits(fields_of(sharded(rank)[0].raw), choices)
        return garble(choices, case)

    @staticmethod
    def run(case: Case, place: Path) -> None:
        fields = fields_of(sharded(case["rank"])[0].raw)
        if "spray" in case:
            spray(fields, *case["spray"])
        data = document(fields, case["edits"], case)
        try:
            found = Receipt.decode(data, "receipt")
        except RekindleError:
            return
        mate = sharded(1 - case["rank"])[0]
        for others in ([found], [found, mate], [mate, found]):
            for use in (find_defect, _merged, _wanted):
                try:
                    use(others)
                except RekindleError:
                    continue
        list(list_values(found))
        assert sum(stop - start for start, stop in found.layout.blocks) == found.layout.nbytes
        try:
            _saved(found, mate)
        except RekindleError:
            return


def spray(fields: dict[str, Any], count: int, every: int, dimensions: int) -> None:
    """A tensor in very many small boxes, which leave gaps where ``every`` is 2, as one that is cut up by nobody is."""
    fields["tensors"], at = [], 0
    for number in range(count):
        where = [number * every % 97, number * every // 97, 0][:dimensions] if dimensions > 1 else [number * every]
        shape = [count * every + 97] * dimensions
        box = {"global_shape": shape, "offsets": where, "sizes": [1] * dimensions, "range": [at, at + 1]}
        fields["tensors"].append({"name": "model.w", "dtype": "uint8", **box})
        at += 1
    fields["checksums"] = ["0" * 16] * count
    fields["shard"]["data_bytes"] = at


def _merged(receipts: list[Receipt]) -> None:
    merged = merge(receipts)
    named = dict(find_tensors(merged.structure))
    structure, kept = extract_part(merged.structure, merged.values, {name: name for name in named.values()})
    assemble(structure, kept, lambda name: name, allow_pickle=False)  # type: ignore[arg-type, return-value]


def _wanted(receipts: list[Receipt]) -> None:
    wholes = merge(receipts).tensors.values()
    have = [Have(whole.name, each.box) for whole in wholes for each in whole.parts]
    plan([Want(whole.name, whole.box) for whole in wholes], have)


def _saved(found: Receipt, mate: Receipt) -> None:
    saved = Saved(found)
    saved.add(mate)
    for name in entries(found.structure):
        saved.entry(name)
        for key in saved.children(name):
            saved.child(name, key)
        for parameter in saved.parameters(name):
            saved.group_of(name, parameter)
            saved.kept(name, parameter)
        list(saved.beside(name))


class stamp:
    """The head of a document, by which a store is listed."""

    @staticmethod
    def make(choices: Choices) -> Case:
        case: Case = {}
        if choices.byte() % 4 == 3:
            case["raw"] = base64.b64encode(choices.rest(2000)).decode()
        fields = {"stamp": fields_of(sharded(0)[0].raw)["stamp"]}
        return garble(choices, {**case, "edits": edits(fields, choices, 4)})

    @staticmethod
    def run(case: Case, place: Path) -> None:
        fields = {"stamp": fields_of(sharded(0)[0].raw)["stamp"], "format": "rekindle-receipt", "version": "1.0"}
        data = base64.b64decode(case["raw"]) if "raw" in case else document(fields, case["edits"], case)
        (path := place / "receipt.json").write_bytes(data)
        try:
            found = read_stamp(path)
        except RekindleError:
            return
        assert 0 <= found.rank < found.world <= 100_000 and STEP_DIR.match(f"step-{found.step:010d}")
        assert STEP_DIR.match(f"step-{found.step:010d}.{found.incarnation.id}.partial")


class values:
    """Typed values, as a receipt has them."""

    SEED = [
        *(None, True, 3, 0.5, "text", {"$int": "0x10000000000000000"}, {"$float": "-inf"}, {"$bytes": "YWJj"}),
        *({"$str": "7aCA"}, {"$tuple": [1, {"$tuple": []}]}, {"$set": [1, 2]}, {"$frozenset": [{"$tuple": [1]}]}),
        *({"$dict": [["a", 1], [2, {"$dict": [[3, [4]]]}]]}, {"$scalar": ["<f8", "AAAAAAAA8D8="]}),
        *({"$array": ["<i4", [2, 1], "AQAAAAIAAAA="]}, {"$dtype": "bfloat16"}, {"$device": "cpu"}, {"$size": [2, 3]}),
        *({"$scalar": ["<U0", ""]}, {"$array": ["|S3", [1], "YWJj"]}, {"$array": ["<M8[ns]", [1], "AAAAAAAAAAA="]}),
    ]

    @staticmethod
    def make(choices: Choices) -> Case:
        return {"edits": edits(_again(values.SEED), choices, 8)}

    @staticmethod
    def run(case: Case, place: Path) -> None:
        fields = {"stamp": {}, "format": "x", "version": "1.0", "values": _again(values.SEED)}
        apply(fields["values"], case["edits"])
        base = fields_of(sharded(0)[0].raw)
        base["structure"], base["values"] = {}, fields["values"]
        try:
            found = Receipt.decode(document(base, [], {}), "receipt").values
        except RekindleError:
            return
        has_pickle(found)
        for value in found:
            try:
                made = decode(value)
            except RekindleError:
                continue
            if "$device" not in repr(value):
                encode(made)


def _again(fields: Any) -> Any:
    import copy

    return copy.deepcopy(fields)


class boxes:
    """Boxes of a tensor: what is said of them is compared with each element counted by hand."""

    @staticmethod
    def make(choices: Choices) -> Case:
        shape = [choices.number(6) for _ in range(choices.number(4))]
        found = []
        while choices.left and len(found) < 40:
            spans = [(choices.number(size + 1), choices.number(size + 1)) for size in shape]
            found.append([[min(span), max(span)] for span in spans])
        return {"shape": shape, "boxes": found}

    @staticmethod
    def run(case: Case, place: Path) -> None:
        shape = tuple(case["shape"])
        whole = Box((0,) * len(shape), shape)
        some = [Box(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in case["boxes"]]
        cells = set(itertools.product(*map(range, shape)))
        there = set().union(*map(_cells, some)) if some else set()
        rest = uncovered(whole, some)
        assert sum(box.volume for box in rest) == len(cells - there)
        assert set().union(*map(_cells, rest)) == cells - there if rest else cells <= there
        found = plan([Want("w", whole)], [Have("w", box, number % 3) for number, box in enumerate(some)])
        moved = [cell for move in found.moves for cell in _cells(move.box)]
        assert len(moved) == len(set(moved)) and set(moved) == cells & there
        assert all(_cells(move.box) <= _cells(some[move.have]) for move in found.moves)


def _cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))))


class status:
    """A status page."""

    @staticmethod
    def make(choices: Choices) -> Case:
        changes = [[choices.number(4096), choices.byte()] for _ in range(choices.number(12))]
        return {"size": choices.pick((4096, 4096, 4096, 4096, 4096, 4096, 0, 100, 8192)), "bytes": changes}

    @staticmethod
    def run(case: Case, place: Path) -> None:
        with preparing():
            data = bytearray(_page())
        for at, new in case["bytes"]:
            data[at] = new
        (path := place / "rank-00000.status").write_bytes(data[: case["size"]].ljust(case["size"], b"\0"))
        try:
            found = read_status(path)
        except RekindleError:
            return
        assert PHASES[found.phase] and PHASE_TEXTS[found.phase] and STAGES[found.stage]
        assert 0 <= found.longest < float("inf")
        "".join(found.note).encode()


@cache
def _page() -> bytes:
    path = scratch_directory() / "page"
    page = StatusPage(path, 1)
    page.step, page.note = 5, b"evaluating"
    page.write()
    return path.read_bytes()


class names:
    """Roots, file names and amounts, as people give them."""

    PARTS = ("file://", "://", "s3://", "[", "]", "%00", "%2e%2e/", "..", "/", "~", "~nobody", "\0", "\ud800", "@", "#")
    PARTS += ("step-", "0000000007", "0" * 10, "\u0661" * 10, ".", "a" * 16, "partial", "retired", "shard-", "00000")
    PARTS += (
        "-of-",
        "\u0660" * 5,
        ".json",
        ".safetensors",
        "\n",
        "1e9",
        "GB",
        "MiB/s",
        " ",
        "9" * 5000,
        "x" * 5000,
        ":",
    )

    @staticmethod
    def make(choices: Choices) -> Case:
        parts = []
        while choices.left and len(parts) < 8:
            own = choices.byte() % 6 == 5
            parts.append(choices.rest(choices.byte() % 9).decode("latin-1") if own else choices.pick(names.PARTS))
        return {"text": "".join(parts), "bytes": choices.byte() % 16 == 15}

    @staticmethod
    def run(case: Case, place: Path) -> None:
        name = case["text"]
        found = parse_shard_name(name)
        if found:
            assert name == f"shard-{found[0]:05d}-of-{found[1]:05d}.{found[2]}"
        match = STEP_DIR.match(name)
        if match:
            assert name.startswith(f"step-{int(match['step']):010d}")
        parse_size(name)
        for call in (parse_rate, root_path, canonical_root):
            try:
                made: Any = call(name.encode("utf-8", "surrogatepass") if case["bytes"] else name)  # type: ignore[operator, arg-type]
            except RekindleError:
                continue
            if call is canonical_root:
                assert os.sep not in job_name(made) and len(job_name(made)) < 40
            if call is root_path:
                assert made.is_absolute() and os.sep not in job_name(made) and len(job_name(made)) < 40
                made.exists() if len(os.fsencode(made)) < 200 else None
