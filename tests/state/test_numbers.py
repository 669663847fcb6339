"""Long lists of numbers are one value each: saved in little time, and back with every bit."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle.errors import FormatError
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.state.codec import decode, encode
from rekindle.state.numbers import NumberList

ODD = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8000000000123, 0xFFF0000000000001, 1)]
FLOATS = [0.1 * n for n in range(1000)] + [float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, *ODD]
LISTS: dict[str, list[Any]] = {
    "floats": FLOATS,
    "ints": [*range(-500, 500), 2**63 - 1, -(2**63)],
    "large": [*range(1000), 2**63],
    "mixed": [*range(500), 0.5, *range(500)],
    "flags": [True, False] * 300,
    "short": [0.5, 1.5],
    "none": [],
}


def bits(items: list[Any]) -> list[Any]:
    """Types and values, of floats all 64 bits."""
    return [(type(item), struct.pack("<d", item) if type(item) is float else item) for item in items]


@pytest.mark.parametrize("name", LISTS)
def test_restored_lists_are_equal_bit_for_bit_and_of_the_same_types(name: str, root: Path, memory: Path) -> None:
    values = rekindle.Values(here=list(LISTS[name]), nested={"deep": [[list(LISTS[name])], "text"]})
    ckpt = rekindle.Checkpointer(root, {"values": values}, rng=False)
    ckpt.save(1, wait="memory")
    del ckpt
    again = rekindle.Values()
    ckpt = rekindle.Checkpointer(root, {"values": again}, rng=False)
    assert ckpt.restore() == 1
    for found in (again.here, again.nested["deep"][0][0]):
        assert type(found) is list and bits(found) == bits(LISTS[name])
    assert again.nested["deep"][1] == "text"
    ckpt.close()


def test_a_list_that_grows_costs_no_new_plan_and_is_one_value(root: Path, memory: Path) -> None:
    """A plan of 100,000 values takes most of a second, at each step anew."""
    values = rekindle.Values(losses=list(FLOATS))
    ckpt = rekindle.Checkpointer(root, {"values": values}, rng=False, persist_every=10**6)
    job = JobDir.of(ckpt.root, memory_base(memory))
    plans = set()
    for step in (1, 2, 3):
        values.losses.append(float(step))
        ckpt.save(step, wait="memory")
        plans.add(id(ckpt._capture.prepare()[0]))
    assert len(plans) == 1
    path = max(path for _, path in job.snapshots.shard_ids())
    receipt = Receipt.decode(path.read_bytes(), path)
    assert len(receipt.values) == 1
    assert bits(decode(receipt.values[0])) == bits([*FLOATS, 1.0, 2.0, 3.0])
    ckpt.close()


def test_bytes_are_little_endian_whatever_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = NumberList.of([1, 2**40])
    assert numbers is not None and numbers.data == struct.pack("<qq", 1, 2**40)
    other = "big" if sys.byteorder == "little" else "little"
    monkeypatch.setattr("sys.byteorder", other)
    swapped = NumberList.of([1, 2**40])
    assert swapped is not None and swapped.data == struct.pack(">qq", 1, 2**40) and swapped.items() == [1, 2**40]


@pytest.mark.parametrize("damaged", [["x", ""], ["d", "AAAA"], ["u", ""], [None, ""], [], "dq", {"d": ""}])
def test_damaged_numbers_are_an_error_of_the_format(damaged: Any) -> None:
    with pytest.raises(FormatError):
        decode({"$numbers": damaged})


def test_what_was_saved_number_by_number_is_still_read() -> None:
    assert bits(decode(json.loads(json.dumps(encode(FLOATS[:1004]))))) == bits(FLOATS[:1004])
