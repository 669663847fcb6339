"""Real loaders of torchdata and of Hugging Face, killed in the middle of an epoch."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.data.job import Job
from tests.integrations.environments import REPO, environment

RESUMABLE = ["stateful", "stateful-workers", "stream", "stream-loader", "stream-workers", "rows"]
BARE = ["bare", "bare-workers", "bare-stream"]


def train(*arguments: object) -> int:
    done = subprocess.run(
        [environment("data"), "-m", "tests.data.frameworks", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{REPO / 'src'}:{REPO}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.mark.campaign(seconds=25)
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("kind", "exact"),
    [(kind, exact) for kind in RESUMABLE for exact in ("replay", "seeded")] + [(k, "-") for k in BARE],
)
def test_loaders_go_on_in_the_middle_of_an_epoch(
    kind: str, exact: Any, root: Path, memory: Path, tmp_path: Path
) -> None:
    broken, alone = Job(tmp_path / "broken"), Job(tmp_path / "alone")
    assert train(kind, exact, broken.out, root, 13) == -signal.SIGKILL
    assert train(kind, exact, broken.out, root) == 0
    assert train(kind, exact, alone.out) == 0
    assert broken.written() == alone.written()
