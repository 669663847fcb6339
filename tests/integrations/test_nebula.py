"""Real DeepSpeed with ``"nebula": {"enabled": true}``, unchanged, on the stand-in for ``torch_nebula``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.integrations.environments import PROGRAMS, REPO, environment


def train(python: str, where: Path, *options: object) -> dict[str, str]:
    """Runs both ranks to their ends. Maps the first word of each line to the rest; "rc" to the exit code."""
    run = [python, "-m", "rekindle", "run", "--provide", "torch_nebula", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*run, "--max-restarts", "0", str(PROGRAMS / "train_nebula.py"), *map(str, options)],
        env={**os.environ, "PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        cwd=where,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    found = {key: rest for key, _, rest in (line.partition(" ") for line in done.stdout.splitlines())}
    return {**found, "rc": str(done.returncode), "stderr": done.stderr[-2000:]}


def digests(found: dict[str, str]) -> list[str]:
    assert found["rc"] == "0", found["stderr"]
    return [found[f"digest-{rank}"] for rank in range(2)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[str]]:
    """Returns the ends of a training by DeepSpeed alone."""

    @cache
    def end(stage: int) -> list[str]:
        where = tmp_path_factory.mktemp("unbroken")
        return digests(train(environment("nebula"), where, where / "run", "--stage", stage))

    return end


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.campaign(seconds=25))])
def test_a_load_by_nebula_goes_on_from_memory(
    stage: int, memory: Path, tmp_path: Path, unbroken: Callable[[int], list[str]]
) -> None:
    python, root = environment("nebula"), tmp_path / "run"
    options = ["--stage", stage, "--load", "true"]
    assert train(python, tmp_path, root, *options, "--die-after-save", 2)["rc"] != "0"
    resumed = train(python, tmp_path, root, *options)
    assert digests(resumed) == unbroken(stage) and resumed["start-0"] == resumed["start-1"] == "2"


@pytest.mark.campaign(seconds=25)
@pytest.mark.timeout(600)
def test_a_load_by_deepspeed_itself_goes_on_from_storage(
    memory: Path, tmp_path: Path, unbroken: Callable[[int], list[str]]
) -> None:
    """``enable_nebula_load`` is false: it reads its own paths, where files have to have arrived."""
    python, root = environment("nebula"), tmp_path / "run"
    options = ["--load", "false"]
    assert train(python, tmp_path, root, *options, "--steps", 2)["rc"] == "0"
    resumed = train(python, tmp_path, root, *options)
    assert digests(resumed) == unbroken(1) and resumed["start-0"] == "2"
