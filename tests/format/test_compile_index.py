"""The index of a pack: what it lists is what was written, and nothing that leads elsewhere."""

from __future__ import annotations

import json

import pytest

from rekindle.errors import FormatError, VersionError
from rekindle.format.compile_index import MAX_ENTRY, MAX_INDEX, Entry, decode_index, digest, encode_index
from rekindle.storage.packs import PACK_ENTRIES

ENTRIES = [Entry("inductor/ab/kernel.so", 3, digest(b"abc")), Entry("triton/x/k.json", 0, digest(b""))]


def named(document: object) -> tuple[str, bytes]:
    data = json.dumps(document).encode()
    return digest(data), data


def test_an_index_lists_what_it_was_given():
    name, data = encode_index(ENTRIES)
    assert decode_index(name, data) == ENTRIES
    assert encode_index(ENTRIES) == (name, data), "the same on every node"


def test_an_index_that_differs_from_its_name_is_damaged():
    name, data = encode_index(ENTRIES)
    for torn in (data[:-1], b"", data + b" ", data.replace(b"kernel", b"colonel")):
        with pytest.raises(FormatError, match="is damaged"):
            decode_index(name, torn)


def test_the_largest_index_that_is_written_is_read():
    longest = "inductor/" + "a" * 1010
    entries = [Entry(f"{longest}{number:04}", 1 << 20, digest(b"")) for number in range(PACK_ENTRIES)]
    assert len(encode_index(entries)[1]) <= MAX_INDEX


def test_a_newer_version_is_refused_by_name():
    document = json.loads(encode_index(ENTRIES)[1]) | {"version": "2.0"}
    with pytest.raises(VersionError, match=r"format version '2\.0'"):
        decode_index(*named(document))


@pytest.mark.parametrize(
    "entry",
    [
        ["../inductor/a", 1, digest(b"a")],
        ["/inductor/a", 1, digest(b"a")],
        ["inductor/../../a", 1, digest(b"a")],
        ["inductor//a", 1, digest(b"a")],
        ["inductor", 1, digest(b"a")],
        ["elsewhere/a", 1, digest(b"a")],
        ["inductor/.hidden", 1, digest(b"a")],
        ["inductor/a\0b", 1, digest(b"a")],
        ["inductor/" + "a" * 2000, 1, digest(b"a")],
        ["inductor/a", -1, digest(b"a")],
        ["inductor/a", MAX_ENTRY + 1, digest(b"a")],
        ["inductor/a", True, digest(b"a")],
        ["inductor/a", 1, "0"],
        ["inductor/a", 1],
        "inductor/a",
        None,
    ],
)
def test_what_is_no_entry_is_refused(entry):
    document = json.loads(encode_index([])[1]) | {"entries": [entry]}
    with pytest.raises(FormatError):
        decode_index(*named(document))


@pytest.mark.parametrize("document", [[], {}, {"format": "rekindle-checkpoint"}, None, {"entries": []}])
def test_another_document_is_refused(document):
    with pytest.raises(FormatError):
        decode_index(*named(document))
