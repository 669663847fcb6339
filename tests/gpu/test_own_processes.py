"""A process of its own for every test of a device: shown without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
TESTS = """
import os
from pathlib import Path
import pytest

def note():
    with open("pids", "a") as file:
        print(os.getpid(), file=file)

@pytest.mark.gpu
def test_before():
    note()

@pytest.mark.gpu
def test_dies():
    note()
    os.abort()

@pytest.mark.gpu
@pytest.mark.parametrize("how", ["one way", "another"])
def test_after(how):
    note()

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="needs a CUDA device")
def test_that_is_skipped():
    note()

@pytest.mark.gpu
def test_that_skips_itself():
    pytest.skip("needs two devices")

def test_of_the_host():
    Path("host").write_text(str(os.getpid()))
"""


@pytest.fixture
def ended(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_them.py").write_text(TESTS)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "REKINDLE_GPU"))}
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "tests.gpu.conftest", "-o", "markers=gpu"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_them.py"],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_one_that_dies_takes_no_other_with_it(ended: subprocess.CompletedProcess[str], tmp_path: Path) -> None:
    assert "1 failed, 4 passed, 2 skipped" in ended.stdout, ended.stdout
    assert "its process has ended with -6" in ended.stdout and "needs two devices" in ended.stdout
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == len(set(pids)) == 4
    assert (tmp_path / "host").read_text() not in pids, "other tests stay in the process of the run"
