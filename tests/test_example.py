"""The example that everybody copies: it runs, it goes on where it stopped, and little of it is Rekindle's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forked import run

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"


def train(root: Path, steps: int) -> str:
    """The output of a run that ends at ``steps``."""
    done = run(EXAMPLE, root, f"--steps={steps}", "--width=32", timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def losses(output: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"\[0\] step (\d+) loss (\S+)", output)}


@pytest.mark.timeout(500)  # three trainings, 5 s each where nothing else runs
def test_it_goes_on_where_it_stopped(root: Path, memory: Path) -> None:
    first, second = train(root, 3), train(root, 6)
    assert "nothing to restore" in first
    assert "restored step 3 from storage" in second
    assert list(losses(second)) == [4, 5, 6]
    assert losses(first) | losses(second) == losses(train(root.with_name("unbroken"), 6))


def test_it_takes_six_lines() -> None:
    code = EXAMPLE.read_text().split('"""', 2)[2]  # without the module's docstring
    lines = [line for line in code.splitlines() if re.search(r"rekindle|ckpt", line)]
    assert len(lines) == 6, lines
