"""Targets that import what others have made: safetensors files and their index, our own note, torch.save, DCP."""

from __future__ import annotations

import base64
import io
import json
import pickle
import shutil
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rekindle.format.names import STEP_DIR
from tests.fuzz.choices import Case, Choices, apply, edits, text
from tests.fuzz.documents import document, garble
from tests.fuzz.fence import preparing
from tests.fuzz.seeds import fields_of, live_state, scratch_directory, single
from tests.fuzz.stores import command

__all__ = ["dcp", "note", "safetensors", "torchfile"]


def taken_in(source: Path, place: Path, *more: str) -> None:
    """Import it; if that is done, what has been made is sound."""
    root = place / "root"
    command("import", source, root, 5, "--memory", place, *more)
    made = [path for path in root.iterdir() if STEP_DIR.match(path.name)] if root.exists() else []
    for path in made:
        assert path.name == "step-0000000005", f"left {path.name} behind"
        command("ls", root, "--memory", place)
        command("inspect", root, "--memory", place)


@cache
def exported(form: str) -> Path:
    out = scratch_directory() / f"exported-{form}"
    command("export", single(), out, "--format", form, "--memory", scratch_directory())
    return out


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


INDEX = {"metadata": {"total_size": 5}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}


class safetensors:
    """A file that others have made, alone or with an index."""

    @staticmethod
    def make(choices: Choices) -> Case:
        case: Case = {"alone": choices.byte() % 2 == 0, "length": 0}
        if choices.byte() % 8 == 7:
            case["length"] = choices.pick((1, -1, 4096, 1 << 40, -(1 << 20), 1 << 63))
        case["header"] = edits(_table(), choices)
        case["index"] = edits(json.loads(json.dumps(INDEX)), choices, 3) if not case["alone"] else []
        return case

    @staticmethod
    def run(case: Case, place: Path) -> None:
        table = {"": _table()}
        apply(table, [[how, ["", *path], what] for how, path, what in case["header"]])
        head = text(table.get(""))
        length = max(0, min(len(head) + case["length"], (1 << 64) - 1))
        directory = place / "source"
        directory.mkdir()
        (path := directory / "model.safetensors").write_bytes(length.to_bytes(8, "little") + head + bytes(64))
        if case["alone"]:
            taken_in(path, place)
            return
        index = {"": json.loads(json.dumps(INDEX))}
        apply(index, [[how, ["", *way], what] for how, way, what in case["index"]])
        (directory / "model.safetensors.index.json").write_bytes(text(index.get("")))
        taken_in(directory, place)


def _table() -> dict[str, Any]:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    table["a"] = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    table["b"] = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
    table["c"] = {"dtype": "U8", "shape": [0, 7], "data_offsets": [32, 32]}
    return table


class note:
    """An export of ours, whose note says something else."""

    @staticmethod
    def make(choices: Choices) -> Case:
        fields = fields_of((exported("safetensors") / "rekindle.json").read_bytes())
        case: Case = {"form": choices.pick(("safetensors", "safetensors", "dcp")), "edits": edits(fields, choices)}
        return garble(choices, case)

    @staticmethod
    def run(case: Case, place: Path) -> None:
        source = place / "source"
        with preparing():
            shutil.copytree(exported(case["form"]), source)
        path = source / "rekindle.json"
        path.write_bytes(document(fields_of(path.read_bytes()), case["edits"], case))
        taken_in(source, place, *(["--allow-pickle"] if case["form"] == "dcp" else []))


class torchfile:
    """A file of torch.save: its pickle is made of opcodes in whatever order."""

    KINDS = ("bytes", "opcodes", "zip", "shared")
    OPCODES = (
        *(b"}", b"]", b")", b"(", b"t", b"l", b"d", b"u", b"s", b"e", b"a", b"0", b"2", b"1", b"N", b"\x88", b"."),
        *(
            b"K\x01",
            b"M\xff\xff",
            b"J\xff\xff\xff\x7f",
            b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
            b"X\x01\0\0\0a",
            b"q\0",
            b"h\0",
        ),
        *(
            b"X\x02\0\0\0cd",
            b"q\1",
            b"h\1",
            b"R",
            b"Q",
            b"b",
            b"\x85",
            b"\x86",
            b"\x87",
            b"G" + bytes(8),
            b"B\2\0\0\0ab",
        ),
        *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"ccollections\nOrderedDict\n"),
        *(
            b"cos\nsystem\n",
            b"cbuiltins\nset\n",
            b"ctorch\nSize\n",
            b"ctorch._utils\n_rebuild_parameter\n",
            b"ctorch\ndevice\n",
        ),
        *(
            b"ctorch\nbfloat16\n",
            b"c_codecs\nencode\n",
            b"ctorch._utils\n_rebuild_sparse_tensor\n",
            b"ctorch\nTensor\n",
        ),
        *(
            b"ctorch.serialization\n_get_layout\n",
            b"ccollections\nCounter\n",
            b"ctorch._tensor\n_rebuild_from_type_v2\n",
        ),
    )

    @staticmethod
    def make(choices: Choices) -> Case:
        kind = choices.pick(torchfile.KINDS)
        if kind == "opcodes":
            at, count = choices.number(400), choices.byte() % 4
            some = b"".join(choices.pick(torchfile.OPCODES) for _ in range(1 + choices.byte() % 12))
            return {"pickle": [at, count, base64.b64encode(some).decode()]}
        if kind == "shared":
            return {"shared": [choices.pick((2, 30, 3000)), choices.pick(("wide", "deep", "self", "stride", "dict"))]}
        changes = [[choices.number(1 << 14), choices.byte()] for _ in range(1 + choices.byte() % 6)]
        return {"file" if kind == "zip" else "bytes": changes}

    @staticmethod
    def run(case: Case, place: Path) -> None:
        path = place / "source.pt"
        with preparing():
            torchfile.write(case, path)
        taken_in(path, place)

    @staticmethod
    def write(case: Case, path: Path) -> None:
        if "shared" in case:
            torch.save(_shared(*case["shared"]), path)
        else:
            path.write_bytes(_torch_seed())
        if "file" in case:
            data = bytearray(path.read_bytes())
            for at, new in case["file"]:
                data[at % len(data)] = new
            path.write_bytes(data)
        elif "pickle" in case or "bytes" in case:
            _repickle(path, case)


def _repickle(path: Path, case: Case) -> None:
    with zipfile.ZipFile(path) as old:
        files = {info.filename: old.read(info) for info in old.infolist()}
    name = next(name for name in files if name.endswith("/data.pkl"))
    data = files[name]
    if "pickle" in case:
        at, count, some = case["pickle"]
        at %= len(data)
        data = data[:at] + base64.b64decode(some) + data[at + count :]
    for at, new in case.get("bytes", ()):
        at %= len(data)
        data = data[:at] + bytes([new]) + data[at + 1 :]
    with zipfile.ZipFile(path, "w") as new_file:
        for each, content in files.items():
            new_file.writestr(each, data if each == name else content)


@cache
def _torch_seed() -> bytes:
    buffer = io.BytesIO()
    state = live_state()
    tree = {"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict(), "epoch": 3}
    torch.save({**tree, "odd": {"$int": "0x7b"}, "list": [1, (2.5, "x")]}, buffer)
    return buffer.getvalue()


def _shared(count: int, how: str) -> Any:
    """Small files that are large when they are walked through."""
    if how == "stride":
        return {"w": torch.zeros(1).expand(1 << min(count, 50))}
    if how == "self":
        own: list[Any] = [1]
        own.append(own)
        return {"w": own}
    node: Any = 1
    for _ in range(min(count, 300)):
        node = [node, node] if how == "wide" else {"a": node, "b": node} if how == "dict" else [node]
    return {"w": node}


class dcp:
    """A directory of torch.distributed.checkpoint: refused unread, or, with pickles allowed, odd in its numbers."""

    @staticmethod
    def make(choices: Choices) -> Case:
        changes = []
        for _ in range(1 + choices.byte() % 4):
            where = choices.pick(("size", "offsets", "sizes", "dtype", "offset", "length", "path", "gone", "planner"))
            changes.append(
                [where, choices.byte(), choices.pick((0, 1, -1, 3, 1 << 40, 1 << 62, 7, "x", "../../x", None))]
            )
        return {"allowed": choices.byte() % 8 != 7, "changes": changes, "note": choices.byte() % 2}

    @staticmethod
    def run(case: Case, place: Path) -> None:
        source = place / "source"
        with preparing():
            shutil.copytree(exported("dcp"), source)
            if not case["note"]:
                (source / "rekindle.json").unlink()
            path = source / ".metadata"
            metadata = pickle.loads(path.read_bytes())
            for change in case["changes"]:
                _odd(metadata, *change)
            path.write_bytes(pickle.dumps(metadata))
        taken_in(source, place, *(["--allow-pickle"] if case["allowed"] else []))


def _odd(metadata: Any, where: str, which: int, new: Any) -> None:
    kept = [each for each in metadata.state_dict_metadata.values() if hasattr(each, "chunks")]
    places = list(metadata.storage_data)
    if where in ("offset", "length", "path") and places:
        info = metadata.storage_data[places[which % len(places)]]
        object.__setattr__(info, {"path": "relative_path"}.get(where, where), new)
    elif where == "gone":
        metadata.state_dict_metadata.pop(list(metadata.state_dict_metadata)[which % len(metadata.state_dict_metadata)])
    elif where == "planner":
        metadata.planner_data = {key: (new,) for key in metadata.state_dict_metadata}
    elif kept:
        each = kept[which % len(kept)]
        try:
            shape = torch.Size([new, 4]) if isinstance(new, int) else new
        except (OverflowError, TypeError):
            shape = [new]
        if where == "size":
            each.size = shape
        elif where == "dtype":
            object.__setattr__(each.properties, "dtype", new)
        else:
            object.__setattr__(each.chunks[0], where, shape)
