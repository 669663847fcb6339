"""The record of the nodes of a start, which holds their secret."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import FormatError
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Node, Nodes

START = "0123456789abcdef"


def nodes(count: int, own: int = 0) -> Nodes:
    return Nodes(
        START,
        3,
        bytes(range(32)),
        own,
        [Node(f"n{n}", "10.0.0.1", 100 + n, [2 * n, 2 * n + 1], f"rack-{n}") for n in range(count)],
    )


def test_the_record_is_read_as_it_was_written_and_is_for_this_user_alone(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    assert Nodes.read(job) is None
    job.paths.nodes.write_text("{}")  # an older one, which everybody could read
    nodes(3, 1).write(job)
    assert Nodes.read(job) == nodes(3, 1)
    assert stat.S_IMODE(job.paths.nodes.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["nodes.json"]


def test_the_secret_is_not_in_what_is_shown_of_a_record() -> None:
    assert nodes(2).secret.hex() not in repr(nodes(2)) and "secret" not in repr(nodes(2))


@pytest.mark.parametrize(
    "change",
    [
        {"secret": "00"},
        {"secret": 5},
        {"own": 2},
        {"start": "../../etc"},
        {"nodes": {}},
        {"nodes": [{"name": "a", "host": "h", "port": 1, "ranks": [0], "domain": ""}] * 2},
        {"nodes": [{"name": "a", "host": "h", "port": 65536, "ranks": [0], "domain": ""}], "own": 0},
        {"nodes": [{"name": "a", "host": "h", "port": 1, "ranks": [], "domain": ""}], "own": 0},
        {"nodes": [{"name": "a" * 300, "host": "h", "port": 1, "ranks": [0], "domain": ""}], "own": 0},
    ],
)
def test_a_record_that_nobody_would_have_written_is_refused_and_named(tmp_path: Path, change: dict[str, Any]) -> None:
    job = JobDir(tmp_path)
    nodes(2, 1).write(job)
    job.paths.nodes.write_text(json.dumps({**json.loads(job.paths.nodes.read_text()), **change}))
    with pytest.raises(FormatError, match=r"nodes\.json"):
        Nodes.read(job)


def test_partners_are_half_of_all_nodes_apart() -> None:
    assert [nodes(4, own).partner for own in range(4)] == [2, 3, 0, 1]
    assert [nodes(3, own).partner for own in range(3)] == [1, 2, 0]
    assert nodes(4).node_of(5).name == "n2"
