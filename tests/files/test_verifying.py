"""A file at its path: read once, and compared with its CRC-32 as it is read."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.errors import CorruptError
from rekindle.files import copying
from rekindle.files.copying import filled_from_memory
from rekindle.files.verifying import VerifiedFile
from rekindle.format.torchzip import Record, read_records
from rekindle.memory.files_dir import FilesDir

MIB = 1 << 20
STATE = {"large": torch.arange(13 * MIB // 8 + 5), "small": torch.arange(7)}


def zipped(state: object = STATE) -> bytearray:
    file = io.BytesIO()
    torch.save(state, file)
    return bytearray(file.getbuffer())


def records_of(data: bytearray) -> list[Record]:
    return read_records(lambda at, nbytes: bytes(data[at : at + nbytes]), len(data), "x")


def opened(data: bytearray) -> VerifiedFile:
    return VerifiedFile(len(data), filled_from_memory(memoryview(data)), "x", in_memory=True)


def _meets(at: int, nbytes: int, record: Record) -> bool:
    return at < record.stop and at + nbytes > record.start


def bytes_read() -> int:
    """Returns the bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="needs Linux's /proc")
def test_a_file_at_its_path_is_read_once(store: FilesDir, root: Path) -> None:
    root.mkdir()
    data = zipped()
    (root / "x.pt").write_bytes(data)
    rekindle.load(root / "x.pt")  # what the first load imports is read, too
    before = bytes_read()
    found = rekindle.load(root / "x.pt")
    assert len(data) <= bytes_read() - before < 1.2 * len(data)
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())


@pytest.mark.parametrize("place", ["first", "inner", "last"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_flipped_bit_in_each_record(place: str, weights_only: bool, store: FilesDir, root: Path) -> None:
    """Also in those that torch doesn't read: a damaged file isn't half right."""
    root.mkdir()
    data = zipped()
    for record in records_of(data):
        at = {"first": record.start, "inner": (record.start + record.stop) // 2, "last": record.stop - 1}[place]
        damaged = data.copy()
        damaged[at] ^= 1
        (root / "x.pt").write_bytes(damaged)
        with pytest.raises(CorruptError, match=f"record {record.name} differs from its CRC-32"):
            rekindle.load(root / "x.pt", weights_only=weights_only)


def test_bytes_that_are_read_in_parts_are_compared_at_the_end() -> None:
    data = zipped()
    large = max(records_of(data), key=lambda record: record.stop - record.start)
    data[large.start + 5 * MIB] ^= 1
    with opened(data) as file:
        file.seek(large.start)
        assert file.read(6 * MIB) == data[large.start : large.start + 6 * MIB]
        with pytest.raises(CorruptError, match="CRC-32"):
            file.verify_rest()


def test_a_record_that_is_damaged_between_two_reads_is_noticed() -> None:
    """What torch is given is what was compared."""
    data = zipped()
    large = max(records_of(data), key=lambda record: record.stop - record.start)
    with opened(data) as file:
        data[large.start + 5 * MIB] ^= 1
        file.seek(large.start)
        with pytest.raises(CorruptError, match="CRC-32"):
            file.read(large.stop - large.start)


def test_a_file_that_is_cut_off_while_it_is_read(store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    path = root / "x.pt"
    path.write_bytes(zipped())
    load = torch.load

    def cut(file: Any, **rest: Any) -> Any:
        os.truncate(path, 5 * MIB)
        return load(file, **rest)

    monkeypatch.setattr(torch, "load", cut)
    with pytest.raises(CorruptError, match=r"was cut off at byte [\d,]+ while it was read"):
        rekindle.load(path)


def test_an_error_of_storage_is_that_of_the_load(store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    data = zipped()
    (root / "x.pt").write_bytes(data)
    large = max(records_of(data), key=lambda record: record.stop - record.start)
    preadv: Callable[[int, Any, int], int] = os.preadv

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if _meets(offset, 1, large):
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(copying.os, "preadv", failing)
    with pytest.raises(OSError, match="Input/output error"):
        rekindle.load(root / "x.pt")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rekindle-load")]
