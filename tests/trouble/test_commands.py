"""Commands on storage that hangs: each ends by itself and names the storage."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.stored import save
from tests.trouble.test_storage import Troubled, ask, troubled

__all__ = ["troubled"]

COMMANDS = [
    "inspect ROOT",
    "export ROOT OUT --format torch",
    "import OUT ROOT 2",
    "verify ROOT",
    "pin ROOT 1",
    "prune ROOT",
    "advise ROOT",
    "incidents ROOT",
]


@pytest.mark.campaign(seconds=60)
def test_no_command_waits_for_ever(troubled: Troubled, memory: Path, tmp_path: Path) -> None:
    root = troubled.path / "run"
    save(root, 1)
    troubled.do("hang")

    places = {"ROOT": str(root), "OUT": str(tmp_path / "out")}

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return ask(*(places.get(word, word) for word in command.split()), timeout=120)

    with ThreadPoolExecutor(2) as pool:
        for command, done in zip(COMMANDS, pool.map(run, COMMANDS), strict=True):
            assert done.returncode == 1 and "does not answer within 10 s" in done.stderr, (command, done.stderr)
