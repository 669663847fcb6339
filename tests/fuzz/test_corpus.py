"""What fuzzing has found is replayed, and each target is given some more bad input, the same at every run."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.choices import Choices
from tests.fuzz.fence import Breach, fenced
from tests.fuzz.targets import TARGETS, run

CORPUS = Path(__file__).parent / "corpus"
KEPT = sorted(path.relative_to(CORPUS).as_posix() for path in CORPUS.glob("*/*.json"))
EXAMPLES = {
    "boxes": 100,
    "names": 100,
    "status": 100,
    "stamp": 60,
    "values": 25,
    "receipt": 40,
    "http": 60,
    "watch": 60,
}
"""Of each target, at a test run; of others fewer, for each of theirs is a dozen of whole operations."""
SOME = 12


def test_the_corpus_is_there() -> None:
    assert {name.partition("/")[0] for name in KEPT} <= TARGETS.keys() and len(KEPT) > 10


def test_what_a_thread_of_an_earlier_test_starts_is_not_held_against_an_input(tmp_path: Path) -> None:
    """A thread that keeps an agent running starts others."""
    go, names = threading.Event(), [tmp_path / "outside", tmp_path / "beyond"]
    place = tmp_path / "place"
    place.mkdir()

    def keeper() -> None:
        assert go.wait(60)
        names[0].write_bytes(b"")
        other = threading.Thread(target=names[1].write_bytes, args=(b"",))
        other.start()
        other.join()

    thread = threading.Thread(target=keeper)
    thread.start()
    with fenced(place):
        go.set()
        thread.join(60)
    assert all(name.exists() for name in names)

    with pytest.raises(Breach, match="beyond its place"), fenced(place):
        own = threading.Thread(target=names[1].write_bytes, args=(b"",))
        own.start()
        own.join()


@pytest.mark.parametrize("name", KEPT)
def test_what_was_found_is_refused_by_name(name: str) -> None:
    run(TARGETS[name.partition("/")[0]], json.loads((CORPUS / name).read_bytes())["case"])


@pytest.mark.parametrize("name", TARGETS)
def test_more_of_the_kind_is_too(name: str) -> None:
    @settings(
        max_examples=EXAMPLES.get(name, SOME), derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.binary(min_size=20, max_size=300))
    def bad(data: bytes) -> None:
        case: Any = TARGETS[name].make(Choices(data))
        run(TARGETS[name], json.loads(json.dumps(case)))  # what is kept in a file must do the same

    bad()
