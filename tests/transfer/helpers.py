"""Checkpoints of several ranks without a process for each, and the commands as a user would give them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner, Result

import rekindle
from rekindle.cli.main import main
from rekindle.format.layout import Chunk, Layout
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import MANIFEST, MANIFEST_KIND, receipt_name, shard_name
from rekindle.format.receipt import Receipt, checksum, encode_document
from rekindle.storage.posix import PosixStore

FORMATS = ["safetensors", "torch", "dcp"]


class Piece(NamedTuple):
    """A box of a tensor, as one rank has it."""

    name: str
    data: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    own: bool = False


def all_of(name: str, data: torch.Tensor, own: bool = False) -> Piece:
    return Piece(name, data, tuple(data.shape), (0,) * data.dim(), own)


def box_of(name: str, data: torch.Tensor, *spans: tuple[int, int]) -> Piece:
    """The part of a tensor from first to last, exclusive, along each dimension."""
    part = data[tuple(slice(*span) for span in spans)]
    return Piece(name, part, tuple(data.shape), tuple(first for first, _ in spans))


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


class Rank(NamedTuple):
    """The state that one rank saves."""

    pieces: Sequence[Piece]
    structure: Any
    values: Sequence[Any] = ()


def named(*names: str) -> dict[str, Any]:
    """The structure of a module's entry ``model`` with these tensors, by their names in the state."""
    return {"model": {name.removeprefix("model."): {"$tensor": name} for name in names}}


def write(root: Path, ranks: Sequence[Rank], step: int = 1, sound: bool = True) -> Path:
    """A durable checkpoint of these ranks; one that is not ``sound`` gets a manifest that no store would write."""
    store = PosixStore(root)
    entries = []
    for number, rank in enumerate(ranks):
        by_place = {(piece.name, piece.offsets): piece for piece in rank.pieces}
        layout = Layout.build(
            Chunk(p.name, str(p.data.dtype)[6:], p.shape, p.offsets, tuple(p.data.shape), own=p.own)
            for p in rank.pieces
        )
        body = b"".join(raw(by_place[chunk.name, chunk.offsets].data) for chunk in layout.chunks)
        stamp = ShardId(step, number, len(ranks), Incarnation(1, "a" * 16))
        static = Receipt.static_part(layout, rank.structure)
        sums = [checksum(body[start:stop]) for start, stop in layout.blocks]
        text = Receipt.encode(stamp, static, sums, json.dumps(rank.values).encode())
        receipt = Receipt.decode(text, "here")
        store.write_shard(receipt, memoryview(layout.header + body), lambda nbytes: None)
        names = {"file": shard_name(number, len(ranks)), "receipt": receipt_name(number, len(ranks))}
        entries.append({**names, "bytes": receipt.file_bytes, "receipt_checksum": checksum(receipt.raw)})
    if not sound:
        with pytest.raises(rekindle.CorruptError, match="is in no shard"):
            store.publish(stamp)
        manifest = json.dumps({"saved_at": "", "shards": entries})[1:-1].encode()
        (store._partial(stamp) / MANIFEST).write_bytes(encode_document(replace(stamp, rank=0), MANIFEST_KIND, manifest))
        store.clean_up()
    else:
        assert store.publish(stamp)
    return root / f"step-{step:010d}"


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def done(*arguments: object) -> Any:
    """Runs a command that must succeed. Returns its JSON output."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def taken_in(source: Path, root: Path, step: int = 1, *options: str) -> Any:
    """``rekindle import``, with leave to load a DCP directory."""
    more = ["--allow-pickle"] if (source / ".metadata").exists() and "--allow-pickle" not in options else []
    return done("import", source, root, step, *options, *more)


def restored(root: Path, state: dict[str, Any], step: int) -> None:
    """Load ``step``, the newest of ``root``, into ``state``."""
    checkpointer = rekindle.Checkpointer(root, state)
    try:
        assert checkpointer.restore() == step
    finally:
        checkpointer.close()


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit."""
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and raw(ours) == raw(theirs)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert same(tensor, theirs[name]), name


def names(paths: Iterable[Path]) -> list[str]:
    return sorted(path.name for path in paths)
