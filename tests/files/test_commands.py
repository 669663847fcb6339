"""``ls --files``, ``flush`` and ``stop --files``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.cli.main import main
from rekindle.files import client as clients
from rekindle.memory.files_dir import FilesDir
from tests.files.programs import KILLED, run

_SAVE = "rekindle.save(b'data', sys.argv[1]); os.kill(os.getpid(), signal.SIGKILL)"


def rekindle_command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_ls_shows_files_and_what_keeps_them(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    rekindle.save(b"one", root / "one")
    assert drainer.tick()
    rekindle.save(b"three", root / "three")
    text = rekindle_command("ls", "--files").output
    assert str(root / "one") in text and "on storage and in memory" in text and "in memory, on its way" in text
    found = json.loads(rekindle_command("ls", "--files", "--json").output)
    assert [(Path(file["path"]).name, file["state"], file["nbytes"]) for file in found] == [
        ("one", "both", 3),
        ("three", "memory", 5),
    ]


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--files", "root"], ["stop"], ["stop", "--files", "--stale"]])
def test_one_of_them_is_to_be_named(arguments: list[str]) -> None:
    assert rekindle_command(*arguments).exit_code == 2


def test_flush_carries_files_where_no_agent_does(store: FilesDir, root: Path) -> None:
    assert run(_SAVE, root / "x", point="upload.started") == KILLED  # its agent dies at once
    done = rekindle_command("flush", root / "x", "--timeout", 60)
    assert done.exit_code == 0, done.output
    assert (root / "x").read_bytes() == b"data" and store.agent() is None


def test_flush_says_why_it_can_not(store: FilesDir, root: Path) -> None:
    root.mkdir()
    assert run(_SAVE, root / "gone" / "x", point="upload.started") == KILLED
    (root / "gone").write_bytes(b"in the way")
    done = rekindle_command("flush", "--timeout", 0.3)
    assert done.exit_code == rekindle.NotDurableError.exit_code and "gone/x: " in done.output
    assert rekindle_command("stop", "--files", "--timeout", 0.3).exit_code == rekindle.NotDurableError.exit_code
    assert rekindle_command("stop", "--files", "--discard").exit_code == 0 and not store.path.exists()


def test_stop_gives_memory_back(store: FilesDir, root: Path) -> None:
    rekindle.save(b"data", root / "x")
    refused = rekindle_command("stop", "--files")
    assert refused.exit_code == rekindle.BusyError.exit_code and str(os.getpid()) in refused.output
    assert clients._client is not None
    clients._client.close()
    clients._client = None
    done = rekindle_command("stop", "--files")
    assert done.exit_code == 0, done.output
    assert (root / "x").read_bytes() == b"data" and not store.path.exists()
    assert "no files" in rekindle_command("stop", "--files").output


def test_jobs_are_told_from_files(drainer: FileDrainer, root: Path) -> None:
    rekindle.save(b"data", root / "x")
    assert "no jobs have memory" in rekindle_command("status").output
    assert "nothing is stale" in rekindle_command("stop", "--stale").output
