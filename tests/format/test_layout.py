"""Where a tensor's bytes lie, and that everybody else's reader finds them there."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from rekindle.errors import FormatError
from rekindle.format.layout import BLOCK, DTYPES, PAGE, Chunk, Layout, block_ranges

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def chunk_lists(draw):
    """Whole tensors and boxes of larger ones, of any dtype, empty and zero-dimensional ones among them."""
    chunks = []
    for name in draw(st.lists(names, unique=True, max_size=12)):
        sizes = draw(shapes)
        offsets = tuple(draw(st.integers(0, 3)) for _ in sizes)
        whole = tuple(o + s + draw(st.integers(0, 2)) for o, s in zip(offsets, sizes, strict=True))
        chunks.append(Chunk(name, draw(st.sampled_from(sorted(DTYPES))), whole, offsets, sizes))
    return chunks


def one(dtype: str, *sizes: int, start: int = 0) -> Chunk:
    return Chunk("x", dtype, sizes, (0,) * len(sizes), sizes, start)


@given(chunk_lists())
def test_tensors_lie_without_gaps_and_aligned_to_their_elements(chunks):
    layout = Layout.build(chunks)
    at = 0
    for chunk in layout.chunks:
        assert chunk.start == at
        assert chunk.start % DTYPES[chunk.dtype][1] == 0
        assert chunk.stop - chunk.start == math.prod(chunk.sizes) * DTYPES[chunk.dtype][1]
        at = chunk.stop
    assert layout.nbytes == at
    assert {(c.name, c.dtype, c.global_shape, c.offsets, c.sizes) for c in layout.chunks} == {
        (c.name, c.dtype, c.global_shape, c.offsets, c.sizes) for c in chunks
    }


@given(chunk_lists(), st.randoms())
def test_a_layout_does_not_depend_on_the_order_of_the_walk(chunks, random):
    shuffled = list(chunks)
    random.shuffle(shuffled)
    assert Layout.build(shuffled) == Layout.build(chunks)


@given(chunk_lists())
def test_data_starts_on_a_page(chunks):
    header = Layout.build(chunks).header
    assert len(header) % PAGE == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert json.loads(header[8:])["__metadata__"]["DCP_SHARDING_INFO"]


@given(chunk_lists())
def test_a_stock_reader_opens_the_file_and_finds_every_tensor(tmp_path_factory, chunks):
    layout = Layout.build(chunks)
    path = tmp_path_factory.getbasetemp() / "stock.safetensors"
    path.write_bytes(layout.header + bytes(layout.nbytes))
    assert path.stat().st_size == layout.file_bytes
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == {chunk.name for chunk in chunks}
        offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
        for chunk in layout.chunks:
            found = file.get_slice(chunk.name)
            code, width = DTYPES[chunk.dtype]
            as_bytes = [width] * (code == "U8" and chunk.dtype != "uint8")
            assert (found.get_dtype(), found.get_shape()) == (code, [*chunk.sizes, *as_bytes])
            assert offsets[chunk.name]["saved_offsets"][: len(chunk.offsets)] == list(chunk.offsets)


@given(chunk_lists())
def test_a_stock_reader_is_told_one_offset_per_dimension_of_what_it_sees(chunks):
    """torch takes a tensor's global shape from both, dimension by dimension."""
    table = json.loads(Layout.build(chunks).header[8:])
    for name, entry in json.loads(table.pop("__metadata__")["DCP_SHARDING_INFO"]).items():
        assert len(entry["saved_offsets"]) == len(table[name]["shape"])


@given(chunk_lists())
def test_checksum_blocks_cover_every_byte_once(chunks):
    layout = Layout.build(chunks)
    at = 0
    for number, (start, stop) in enumerate(layout.blocks):
        assert start == at < stop <= start + BLOCK
        assert any(c.name == layout.tensor_of(number) and c.start <= start and stop <= c.stop for c in layout.chunks)
        at = stop
    assert at == layout.nbytes
    with pytest.raises(IndexError):
        layout.tensor_of(len(layout.blocks))


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_a_large_tensor_has_a_checksum_for_each_block(nbytes):
    chunk = one("uint8", nbytes, start=4096)
    ranges = block_ranges(chunk)
    assert len(ranges) == -(-nbytes // BLOCK)
    assert sum(stop - start for start, stop in ranges) == nbytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@given(chunk_lists())
def test_a_chunk_survives_json(chunks):
    for chunk in Layout.build(chunks).chunks:
        assert Chunk.from_json(json.loads(json.dumps(chunk.to_json()))) == chunk


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float33"},
        {"sizes": [3, 5]},
        {"sizes": [-2, -4]},
        {"range": [0, 31]},
        {"range": [-32, 0]},
        {"range": [0]},
        {"range": None},
        {"offsets": 1},
        {"global_shape": ["x"]},
    ],
)
def test_a_chunk_that_contradicts_itself_is_refused(change):
    sound = one("float32", 2, 4).to_json()
    assert Chunk.from_json(sound)
    with pytest.raises(FormatError):
        Chunk.from_json({**sound, **change})


def test_a_chunk_without_a_field_is_refused():
    sound = one("float32", 2, 4).to_json()
    for field in sound:
        with pytest.raises(FormatError):
            Chunk.from_json({k: v for k, v in sound.items() if k != field})
    with pytest.raises(FormatError):
        Chunk.from_json(None)


def test_a_state_without_tensors_is_a_readable_file_too(tmp_path):
    layout = Layout.build([])
    assert layout.nbytes == 0 and not layout.blocks
    (tmp_path / "empty.safetensors").write_bytes(layout.header)
    with safe_open(tmp_path / "empty.safetensors", framework="numpy") as file:
        assert list(file.keys()) == []
