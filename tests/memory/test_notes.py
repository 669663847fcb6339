"""The small notes of a job: a damaged one is not believed."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rekindle.memory.job_dir import JobDir
from rekindle.memory.notes import Common, Marks, Notes, SafeStep
from rekindle.memory.thirds import Thirds

START, FORMER = "a" * 16, "b" * 16
COMMON = Common(START, step=7, safe=5, drain=3, kept=7)
NOTES: dict[str, tuple[Callable[[Notes], object], Callable[[Notes], object], object]] = {
    "durable": (lambda notes: notes.write_durable(8), Notes.durable, 8),
    "drained": (lambda notes: notes.write_last_drain(1.5, 2.25), Notes.last_drain, (1.5, 2.25)),
    "anew": (lambda notes: notes.write_fresh_start(3, 9), Notes.fresh_start, (3, 9)),
    "common": (lambda notes: notes.write_common(COMMON), Notes.marks, Marks(COMMON, SafeStep(START, 5))),
    "wanted": (lambda notes: notes.write_wanted(8), Notes.wanted, 8),
    "cramped": (lambda notes: notes.write_cramped(START), lambda notes: notes.is_cramped(START), True),
}
"""By file: how a note is written and read, and what it then says."""


@pytest.mark.parametrize("name", NOTES)
def test_a_note_with_any_flipped_bit_or_without_its_end_is_not_believed(job: JobDir, name: str) -> None:
    write, read, value = NOTES[name]
    write(job.notes)
    path = job.path / name
    whole = path.read_bytes()
    assert read(job.notes) == value
    write(job.notes)
    assert len(path.read_bytes()) == len(whole), "full memory is written over in place"
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert not read(job.notes), bytes(damaged)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert not read(job.notes) or read(job.notes) == value


OLD_NOTES = {
    "durable": (b"%020d" % 8, 8),
    "anew": (b"%020d %020d" % (3, 9), (3, 9)),
    "common": (
        f"{START} {7:020d} {-1:020d} {3:020d} {7:020d} {FORMER} {2:020d}".encode(),
        Marks(Common(START, 7, -1, 3, 7), SafeStep(FORMER, 2)),
    ),
    "drained": (b"%020.3f %020.3f" % (1.5, 2.25), None),
    "wanted": (b"%020d" % 8, None),
    "cramped": (f"{START} {int(time.monotonic()):020d}".encode(), False),
}
"""By file: the note of a version before notes had checksums, and what it is taken to say."""


@pytest.mark.parametrize("name", NOTES)
def test_of_an_older_versions_notes_those_are_believed_that_a_restart_needs(job: JobDir, name: str) -> None:
    note, value = OLD_NOTES[name]
    (job.path / name).write_bytes(note)
    assert NOTES[name][1](job.notes) == value
    NOTES[name][0](job.notes)
    assert NOTES[name][1](job.notes) in (NOTES[name][2], value)
    for length in range(len(note)):
        (job.path / name).write_bytes(note[:length])
        assert not NOTES[name][1](job.notes), "its digits are cut off"


def test_a_damaged_note_on_third_slots_is_not_believed(job: JobDir) -> None:
    thirds = Thirds(job.paths)
    thirds.write_made(START)
    thirds.ask()
    assert thirds.are_made(START) and thirds.are_asked()
    for name in ("third", "third-asked"):
        note = bytearray((job.path / name).read_bytes())
        note[17] ^= 1
        (job.path / name).write_bytes(note)
    assert not thirds.are_made(START) and not thirds.are_asked()
