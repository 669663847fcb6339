"""The layout of torch.save's zip file: as Python's own zipfile reads it, and as a hostile one may look."""

from __future__ import annotations

import io
import zipfile
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import CorruptError, FormatError
from rekindle.format import torchzip
from rekindle.format.torchzip import CrcFiller, Record, lay_out, read_records

contents = st.lists(st.binary(max_size=300), min_size=1, max_size=12)


def build(data: list[bytes]) -> bytearray:
    """A file whose CRC-32 fields are zero."""
    layout = lay_out([(f"data/{number}", len(one)) for number, one in enumerate(data)])
    whole = bytearray(layout.nbytes)
    for at, part in layout.parts:
        whole[at : at + len(part)] = part
    for record, one in zip(layout.records, data, strict=True):
        whole[record.start : record.stop] = one
    return whole


def records_of(whole: bytes | bytearray) -> list[Record]:
    return read_records(lambda at, n: bytes(whole[at : at + n]), len(whole), "a file")


@given(contents, st.integers(1, 400))
def test_what_is_filled_in_piece_by_piece_is_what_zipfile_checks(data: list[bytes], size: int) -> None:
    whole = build(data)
    filler, view = CrcFiller(records_of(whole)), memoryview(whole)
    for at in range(0, len(whole), size):
        filler.take(view, at, min(at + size, len(whole)))
    with zipfile.ZipFile(io.BytesIO(bytes(whole))) as archive:
        assert archive.testzip() is None
        assert [archive.read(name) for name in archive.namelist()] == data
    assert [record.crc for record in records_of(whole)] == [zlib.crc32(one) for one in data]


@given(contents)
def test_crcs_that_are_known_before_give_the_same_file(data: list[bytes]) -> None:
    whole = build(data)
    layout = lay_out([(f"data/{number}", len(one)) for number, one in enumerate(data)])
    assert [(r.start, r.stop, r.crc_at) for r in layout.records] == [
        (r.start, r.stop, r.crc_at) for r in records_of(whole)
    ]
    for at, part in layout.with_crcs([zlib.crc32(one) for one in data]):
        whole[at : at + len(part)] = part
    with zipfile.ZipFile(io.BytesIO(bytes(whole))) as archive:
        assert archive.testzip() is None


def test_bytes_of_records_are_aligned() -> None:
    assert not [r for r in records_of(build([b"a", b"", b"bc" * 77])) if r.start % torchzip.ALIGNMENT]


def test_more_records_than_a_plain_directory_counts() -> None:
    whole = build([b"ab"] * 70_000)
    assert len(records_of(whole)) == 70_000
    with zipfile.ZipFile(io.BytesIO(bytes(whole))) as archive:
        assert len(archive.namelist()) == 70_000


def test_sizes_and_offsets_beyond_four_gigabytes() -> None:
    """Laid out and read from the headers alone, without the bytes."""
    sizes = [5 << 30, 10, 4 << 30, 0]
    layout = lay_out([(f"data/{number}", size) for number, size in enumerate(sizes)])

    def read(at: int, n: int) -> bytes:
        """Reads zeros between the headers."""
        found = bytearray(n)
        for start, part in layout.parts:
            if at - len(part) < start < at + n:
                skipped = max(0, at - start)
                place = start + skipped - at
                piece = part[skipped : skipped + n - place]
                found[place : place + len(piece)] = piece
        return bytes(found)

    found = read_records(read, layout.nbytes, "a file")
    assert [(r.start, r.stop, r.crc_at) for r in found] == [(r.start, r.stop, r.crc_at) for r in layout.records]
    assert [r.stop - r.start for r in found] == sizes


@given(contents, st.data())
def test_a_damaged_file_is_an_error_or_is_read_within_its_bounds(data: list[bytes], draw: st.DataObject) -> None:
    whole = build(data)
    at = draw.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << draw.draw(st.integers(0, 7))
    try:
        found = records_of(whole)
    except (CorruptError, FormatError):
        return
    assert all(0 <= record.start <= record.stop <= len(whole) for record in found)


@given(contents, st.data())
def test_a_file_that_was_cut_off_is_an_error(data: list[bytes], draw: st.DataObject) -> None:
    whole = build(data)
    with pytest.raises((CorruptError, FormatError)):
        records_of(whole[: draw.draw(st.integers(0, len(whole) - 1))])


def test_a_file_that_was_cut_off_behind_what_looks_like_an_end() -> None:
    """Such as an empty file's end, or a whole file that was saved as bytes."""
    whole = build([b"PK\x05\x06", bytes(build([b"nested"])), b"PK\x05\x06" + bytes(30)])
    assert len(records_of(whole)) == 3
    for nbytes in range(len(whole)):
        with pytest.raises((CorruptError, FormatError)):
            records_of(whole[:nbytes])


def test_another_programs_file_is_told_from_a_damaged_one() -> None:
    with pytest.raises(FormatError, match=r"is no file of torch\.save"):
        records_of(b"\x89HDF\r\n\x1a\n" + bytes(100))
