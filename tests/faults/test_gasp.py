"""Faults at chosen moments of a real run: noticed, secured, gone on from, and the same in the end as without.

Some cells of the matrix; ``python -m tests.faults.matrix`` runs more, and ``--full`` all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.snapshot.memory import JobDir
from tests.faults.cluster import MOMENTS, Cell, run
from tests.faults.matrix import judge, world_of

CELLS = [("ddp", "kill", moment) for moment in MOMENTS] + [
    ("ddp", "exception", "update-second"),
    ("ddp", "term", "backward"),
    ("ddp", "kill-two", "copying"),
    ("ddp", "agent-kill", "all-reduce"),
    ("ddp", "block", "forward"),
    ("bare", "kill", "forward"),
    ("bare", "kill", "update-first"),
    ("bare", "kill-in-gasp", "backward"),
    ("bare", "term-all", "forward"),
    ("zero", "kill", "copying"),
    ("zero", "exception", "update-first"),
    ("zero", "stop", "before-step"),
]
CAUSES = {
    "exception": ("exception", "rank 1 raised RuntimeError: a fault on purpose"),
    "kill": ("signal", "rank 1 was killed by SIGKILL"),
    "kill-two": ("signal", "was killed by SIGKILL"),
    "kill-in-gasp": ("signal", "rank 1 was killed by SIGKILL"),
    "term": ("notice", "rank 1 was sent SIGTERM"),
    "term-all": ("notice", "was sent SIGTERM"),
    "stop": ("hang", "rank 1 hangs after step 8"),
    "loop": ("hang", "hangs after step 8"),
    "block": ("hang", "hangs after step 8"),
    "agent-kill": ("", ""),
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], list[str]]:
    """Digests that a run of a configuration ends with when nothing happens to it."""
    found: dict[str, list[str]] = {}

    def find(config: str, memory: Path) -> list[str]:
        if config not in found:
            out = run(Cell(tmp_path_factory.mktemp(config) / "run", memory, config, world=world_of(config)))
            assert out.codes == [[0] * world_of(config)]
            found[config] = out.digests
        return found[config]

    return find


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_fault(
    cell: tuple[str, str, str], root: Path, memory: Path, job: JobDir, unbroken: Callable[[str, Path], list[str]]
) -> None:
    config, fault, moment = cell
    out = run(Cell(root, memory, config, fault, moment, world=world_of(config)))
    cause, what = CAUSES[fault]
    assert out.cause == cause and what in out.what
    assert any(code != 0 for code in out.codes[0]) and len(out.codes) == 2
    assert judge(out, unbroken(config, memory), config == "bare") == []
