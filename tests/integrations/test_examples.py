"""The examples, as users start them: killed and started again by the same command they end as if nothing had been."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rekindle.format.names import shard_name, step_dir
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.posix import PosixStore
from tests.faults.harness import wait_for
from tests.integrations.environments import REPO, environment, without_ours

STEPS = {"transformers": 200, "accelerate": 1280, "lightning": 1280}
"""Updates that each example makes."""


def python_of(name: str) -> str:
    if name != "lightning":
        return environment("transformers")
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed: pip install -e '.[dev]'")
    return sys.executable


def example(name: str) -> Path:
    return REPO / f"examples/train_{name}.py"


def start(name: str, root: Path, script: Path | None = None) -> subprocess.Popen[bytes]:
    """Starts an example in a clone of the repository: Rekindle itself need not be installed for this."""
    own = {"PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(root.with_suffix(".out"), "ab") as output:
        return subprocess.Popen(
            [python_of(name), str(script or example(name)), str(root)],
            env={**os.environ, **own},
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=root.parent,
        )


def finish(name: str, root: Path, script: Path | None = None) -> None:
    process = start(name, root, script)
    try:
        assert process.wait(300) == 0, root.with_suffix(".out").read_text()[-4000:]
    finally:
        process.kill()


def last_step(name: str, root: Path) -> bytes:
    """Returns all tensors of the last checkpoint, as storage has them."""
    return (root / step_dir(STEPS[name]) / shard_name(0, 1)).read_bytes()


@pytest.mark.campaign(seconds=60)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", STEPS)
def test_killed_and_started_again(name: str, memory: Path, tmp_path: Path) -> None:
    """Weights, what the optimizer keeps, and losses are those of a run that was not killed."""
    root, unbroken = tmp_path / "run", tmp_path / "unbroken"
    process = start(name, root)
    job = JobDir.of(root, memory_base(memory))

    def in_memory() -> int:
        assert process.poll() is None, root.with_suffix(".out").read_text()[-4000:]
        return max((stamp.step for stamp, _ in job.snapshots.shard_ids()), default=0)

    try:
        wait_for(lambda: in_memory() > STEPS[name] // 10, 300, "no step is in memory")
    finally:
        process.kill()
    assert process.wait(20) == -signal.SIGKILL
    finish(name, root)
    newest = PosixStore(root).published()[-1].stamp
    assert newest.step == STEPS[name] and newest.incarnation.parent_step > STEPS[name] // 10
    finish(name, unbroken)
    assert last_step(name, root) == last_step(name, unbroken)


def results(name: str, place: Path) -> dict[str, Any]:
    """Returns what a script leaves without Rekindle: the weights in a file, or the losses that it tells."""
    if name == "transformers":
        return load_file(place / "run-trainer" / "model.safetensors")
    if name == "lightning":
        [saved] = place.rglob("*.ckpt")
        return torch.load(saved, weights_only=True)["state_dict"]
    told = [line.split(": loss ") for line in (place / "run.out").read_text().splitlines() if ": loss " in line]
    return {when: torch.tensor(float(loss), dtype=torch.float64) for when, loss in told}


@pytest.mark.campaign(seconds=40)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", STEPS)
def test_without_rekindle_it_is_the_script_that_users_have(name: str, memory: Path, tmp_path: Path) -> None:
    """It runs by the same command, and comes to the same end, bit for bit: the adapter changes nothing of training."""
    ours = example(name).read_text().replace("{loss.item():.4f}", "{loss.item()!r}")  # all digits of Accelerate's
    without = without_ours(ours)
    assert not re.search("import rekindle|from rekindle|ckpt", without)
    places = tmp_path / "without", tmp_path / "with"
    for place, script in zip(places, (without, ours), strict=True):
        place.mkdir()
        (place / "train.py").write_text(script)
        finish(name, place / "run", place / "train.py")
    expected, reached = (results(name, place) for place in places)
    assert len(expected) > 3
    torch.testing.assert_close(reached, expected, rtol=0, atol=0)
