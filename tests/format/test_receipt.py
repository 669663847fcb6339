"""Receipts: what is written comes back, and damage is never taken for truth."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import CorruptError, FormatError
from rekindle.format import receipt as receipt_module
from rekindle.format.layout import Chunk, Layout
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.receipt import Receipt, checksum, encode_document, parse_document, read_stamp

INCARNATION = Incarnation(3, "0123456789abcdef", "fedcba9876543210", 7)
STAMP = ShardId(12, 1, 4, INCARNATION, persist=False)

ids = st.text("0123456789abcdef", min_size=16, max_size=16)
incarnations = st.builds(Incarnation, st.integers(1, 10**9), ids, ids | st.just(""), st.integers(0, 10**10 - 1))
stamps = st.builds(
    ShardId, st.integers(0, 10**10 - 1), st.integers(0, 49999), st.integers(50000, 99999), incarnations, st.booleans()
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


structures = st.recursive(
    st.builds(lambda name: {"$tensor": name}, st.text()) | st.builds(lambda at: {"$value": at}, st.integers(0, 3)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text().filter(lambda key: not key.startswith("$")), inner, max_size=3)
        | st.builds(lambda pairs: {"$dict": pairs}, st.lists(st.tuples(json_values, inner).map(list), max_size=3))
        | st.builds(lambda items: {"$tuple": items}, st.lists(inner, max_size=3))
    ),
    max_leaves=8,
)


def encode(stamp: ShardId, values: list, structure: object = None) -> bytes:
    chunks = [Chunk("w", "float32", (2, 3), (0, 0), (2, 3)), Chunk("b", "bfloat16", (8,), (4,), (4,))]
    layout = Layout.build(chunks)
    sums = [checksum(b"%d" % i) for i in range(len(layout.blocks))]
    return Receipt.encode(stamp, Receipt.static_part(layout, structure or {}), sums, json.dumps(values).encode())


SOUND = encode(STAMP, [1, "two", None, {"$float": "nan"}], {"v": {"w": {"$tensor": "w"}}})


@given(stamps, st.lists(json_values, max_size=4), structures)
def test_a_receipt_round_trips(stamp, values, structure):
    values += [None] * 4
    raw = encode(stamp, values, structure)
    receipt = Receipt.decode(raw, "here")
    assert receipt.stamp == stamp
    assert receipt.values == values
    assert receipt.structure == (structure or {})
    assert receipt.raw == raw
    assert [chunk.name for chunk in receipt.layout.chunks] == ["w", "b"]
    assert receipt.file_bytes == receipt.layout.file_bytes
    assert receipt.header_checksum == checksum(receipt.layout.header)
    assert len(receipt.checksums) == len(receipt.layout.blocks) == 2


def test_a_receipt_is_plain_json_for_everybody_else():
    fields = json.loads(SOUND)
    assert fields["format"] == "rekindle-receipt"
    assert [tensor["name"] for tensor in fields["tensors"]] == ["w", "b"]


@given(st.integers(0, len(SOUND) - 1), st.integers(1, 255))
def test_one_damaged_byte_anywhere_is_noticed(at, flip):
    damaged = bytearray(SOUND)
    damaged[at] ^= flip
    with pytest.raises(FormatError, match="some/receipt"):
        Receipt.decode(bytes(damaged), "some/receipt")


def test_every_single_flipped_bit_is_noticed():
    for at in range(len(SOUND)):
        damaged = bytearray(SOUND)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(FormatError):
            Receipt.decode(bytes(damaged), "here")


@given(st.integers(0, len(SOUND) - 1))
def test_a_receipt_cut_short_is_noticed(length):
    with pytest.raises(FormatError):
        Receipt.decode(SOUND[:length], "here")


@given(st.binary(min_size=1, max_size=8))
def test_bytes_after_the_end_are_noticed(surplus):
    with pytest.raises(FormatError):
        Receipt.decode(SOUND + surplus, "here")


def test_an_empty_or_zeroed_file_is_noticed():
    for data in (b"", bytes(len(SOUND)), b"{}", b"null"):
        with pytest.raises(FormatError):
            Receipt.decode(data, "here")


def test_a_newer_major_version_is_refused_by_its_name(monkeypatch):
    monkeypatch.setattr(receipt_module, "VERSION", "2.7")
    newer = encode(STAMP, [])
    monkeypatch.undo()
    with pytest.raises(FormatError, match=r"some/receipt.*'2\.7'"):
        Receipt.decode(newer, "some/receipt")


def test_a_newer_minor_version_is_read(monkeypatch):
    monkeypatch.setattr(receipt_module, "VERSION", receipt_module.VERSION.partition(".")[0] + ".99")
    newer = encode(STAMP, [5])
    monkeypatch.undo()
    assert Receipt.decode(newer, "here").values == [5]


def test_another_kind_of_document_is_refused_by_its_name():
    other = encode_document(STAMP, "rekindle-checkpoint", b'"shards":[]')
    assert parse_document(other, "rekindle-checkpoint", "here")["shards"] == []
    with pytest.raises(FormatError, match="rekindle-checkpoint"):
        Receipt.decode(other, "here")


def test_too_few_checksums_are_noticed():
    layout = Layout.build([Chunk("w", "uint8", (4,), (0,), (4,))])
    with pytest.raises(FormatError, match="0 checksums for 1 blocks"):
        Receipt.decode(Receipt.encode(STAMP, Receipt.static_part(layout, {}), [], b"[]"), "here")


@pytest.mark.parametrize("field", ["checksum", "shard", "structure", "tensors", "values", "checksums"])
def test_a_missing_field_is_named(field):
    fields = json.loads(SOUND)
    body = {k: v for k, v in fields.items() if k not in ("digest", "stamp", "format", "version", field)}
    sealed = encode_document(STAMP, Receipt.KIND, json.dumps(body).encode()[1:-1])
    with pytest.raises(FormatError, match=field):
        Receipt.decode(sealed, "here")


@given(stamps)
def test_the_stamp_is_read_without_the_rest(tmp_path_factory, stamp):
    path = tmp_path_factory.getbasetemp() / "receipt.json"
    path.write_bytes(encode(stamp, ["x" * 5000]))
    assert read_stamp(path) == stamp


def test_the_stamp_of_a_newer_version_can_be_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(receipt_module, "VERSION", "2.0")
    (tmp_path / "receipt.json").write_bytes(encode(STAMP, []))
    assert read_stamp(tmp_path / "receipt.json") == STAMP


@pytest.mark.parametrize("data", [b"", b"{", SOUND[:40], b"x" * 2000, b'{"digest":"0123456789abcdef","stamp":{}}'])
def test_what_does_not_start_with_a_stamp_is_a_format_error(tmp_path, data):
    (tmp_path / "receipt.json").write_bytes(data)
    with pytest.raises(FormatError, match=r"receipt\.json|stamp"):
        read_stamp(tmp_path / "receipt.json")


def test_a_missing_receipt_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_stamp(tmp_path / "receipt.json")


def test_damage_can_be_caught_as_the_built_in():
    with pytest.raises(ValueError):
        Receipt.decode(b"", "here")
    assert issubclass(FormatError, CorruptError)
