"""What a rank tells the launcher of its imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rekindle.faults.imports
from rekindle.faults.imports import IMPORTS
from rekindle.faults.torchelastic import LAUNCH

SCRIPT = """
import os
os.environ["SET_BY_SCRIPT"] = "1"
os.environ["RANK"] = "0"  # a warm worker gets its variables after its process has begun
from rekindle.faults.imports import ImportRecord
record = ImportRecord()
for step in STEPS:
    record.note_step(step)
"""


def record_of(place: Path, steps: list[int], **environment: str) -> dict[str, object] | None:
    """Returns what a rank with these steps has left."""
    code = SCRIPT.replace("STEPS", repr(steps))
    told = {name: value for name, value in os.environ.items() if name != "RANK"} | environment | {LAUNCH: str(place)}
    subprocess.run([sys.executable, "-c", code], env=told, check=True, timeout=100)
    path = place / IMPORTS
    return json.loads(path.read_bytes()) if path.exists() else None


@pytest.mark.parametrize("steps", [[1], [5, 5]])
def test_one_step_is_not_enough_though_it_is_saved_too(tmp_path: Path, steps: list[int]) -> None:
    assert record_of(tmp_path, steps, RANK="0") is None


def test_one_rank_of_a_launcher_tells(tmp_path: Path) -> None:
    assert record_of(tmp_path, [5, 6], RANK="1", LOCAL_RANK="1") is None
    assert record_of(tmp_path, [5, 6], RANK="1", LOCAL_RANK="0") is not None


def test_the_second_step_tells_modules_and_variables(tmp_path: Path) -> None:
    found = record_of(tmp_path, [5, 6], RANK="0")
    assert found is not None and found["changed"] == ["SET_BY_SCRIPT"]
    modules = found["modules"]
    assert modules["rekindle.faults.imports"] == rekindle.faults.imports.__file__
    assert modules["itertools"] == ""
    assert list(modules).index("rekindle.common.environ") < list(modules).index("rekindle.faults.imports")


def test_where_the_kernel_shows_another_environment_the_variables_of_a_cold_start_stay(tmp_path: Path) -> None:
    (tmp_path / IMPORTS).write_text(json.dumps({"modules": {}, "changed": ["OMP_DYNAMIC"]}))
    found = record_of(tmp_path, [5, 6])
    assert found is not None and found["changed"] == ["OMP_DYNAMIC"] and found["modules"]
