"""Exports of weights alone, opened by the real ``from_pretrained``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.environments import environment, lines, ranks_of
from tests.transfer.helpers import done

PROGRAM = "open_pretrained"


@pytest.mark.campaign(seconds=40)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("limit", ["5GB", "20KB"])
def test_the_weights_of_a_run_open_as_a_pretrained_model(limit: str, memory: Path, tmp_path: Path) -> None:
    python, root, folder, out = environment("transformers"), tmp_path / "run", tmp_path / "trained", tmp_path / "out"
    assert ranks_of(1, python, PROGRAM, "save", root, folder, where=tmp_path) == [0]
    saved = lines(tmp_path, PROGRAM)["weights"]
    told = done("export", root, out, "--weights-only", "--config", folder, "--max-shard-size", limit)
    assert ("model.safetensors.index.json" in told["files"]) == (limit == "20KB")
    assert ranks_of(1, python, PROGRAM, "open", out, where=tmp_path) == [0]
    opened = lines(tmp_path, PROGRAM)
    assert (opened["keys"], opened["tied"], opened["weights"]) == ("[] []", "True", saved)
