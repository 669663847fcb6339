"""``ls --files``, ``flush`` and ``stop --files``."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import rekindle
from rekindle.agent import file_drain
from rekindle.agent.file_drain import FileDrainer
from rekindle.cli import terminal
from rekindle.cli.main import main
from rekindle.files import client as clients
from rekindle.memory.files_dir import FilesDir
from tests.files.programs import KILLED, dies_with_its_agent, run

_SAVE = dies_with_its_agent("rekindle.save(b'data', sys.argv[1])")


def rekindle_command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_ls_shows_files_and_what_keeps_them(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    assert rekindle_command("ls", "--files").output.startswith("no files are in this node's memory")
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


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["ls", "--files", "root"], ["stop"], ["stop", "--files", "--stale"], ["status", "--files", "root"]],
)
def test_one_of_them_is_to_be_named(arguments: list[str]) -> None:
    assert rekindle_command(*arguments).exit_code == 2


def test_flush_carries_files_where_no_agent_does(store: FilesDir, root: Path) -> None:
    assert run(_SAVE, root / "x", point="upload.started") == KILLED
    done = rekindle_command("flush", root / "x", "--timeout", 60)
    assert done.exit_code == 0, done.output
    assert (root / "x").read_bytes() == b"data" and store.agent() is None


def test_flush_of_what_nobody_saved_is_an_error(store: FilesDir, root: Path) -> None:
    """In a memory store that has files, and in one that has none."""
    assert rekindle_command("flush", root / "x").exit_code == rekindle.NotFoundError.exit_code
    rekindle.save(b"data", root / "y")
    assert rekindle_command("flush", root / "x").exit_code == rekindle.NotFoundError.exit_code
    assert rekindle_command("flush", root / "y").exit_code == 0
    (root / "x").write_bytes(b"of another program")
    assert rekindle_command("flush", root / "x").exit_code == 0


def test_those_who_wait_are_told_why_and_how_far(store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_TELL_FIRST", 0.0)
    monkeypatch.setattr(terminal, "_TELL_EVERY", 0.0)
    root.mkdir()
    assert run(_SAVE, root / "gone" / "[x]", point="upload.started") == KILLED
    (root / "gone").write_bytes(b"in the way")
    shown, show = threading.Event(), terminal.WaitDisplay.show

    def show_and_help(self: terminal.WaitDisplay, carried: str | None, done: int, total: int, why: str) -> None:
        show(self, carried, done, total, why)
        if carried is not None:
            shown.set()
        if "[x]: " in why and (root / "gone").is_file():
            (root / "gone").unlink()

    monkeypatch.setattr(terminal.WaitDisplay, "show", show_and_help)
    monkeypatch.setattr(file_drain, "reach", lambda *_: shown.wait(60))
    done = rekindle_command("flush")
    told = done.output.splitlines()
    assert done.exit_code == 0 and (root / "gone" / "[x]").read_bytes() == b"data", told
    assert any(line.startswith("files: 1 not on storage yet: ") and "gone/[x]: " in line for line in told), told
    assert any(f"storage has 0 bytes of 4 bytes of {root}/gone/[x]; waits" in line for line in told), told


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
    assert json.loads(rekindle_command("status", "--json").output) == []
    assert "nothing is stale" in rekindle_command("stop", "--stale").output


def test_stale_files_are_given_back_with_stale_jobs(store: FilesDir, root: Path) -> None:
    """Their agent was killed, and no process has them."""
    assert run(_SAVE, root / "x", point="upload.started") == KILLED
    done = rekindle_command("stop", "--stale")
    assert done.exit_code == 0 and "given back" in done.output, done.output
    assert (root / "x").read_bytes() == b"data" and not store.path.exists()
    assert "nothing is stale" in rekindle_command("stop", "--stale").output


def test_stale_files_that_storage_does_not_take_stay(store: FilesDir, root: Path) -> None:
    root.mkdir()
    assert run(_SAVE, root / "gone" / "x", point="upload.started") == KILLED
    (root / "gone").write_bytes(b"in the way")
    done = rekindle_command("stop", "--stale", "--timeout", 0.3)
    assert done.exit_code == rekindle.NotDurableError.exit_code and store.path.exists()


def test_status_tells_of_files_and_of_what_keeps_them(store: FilesDir, root: Path) -> None:
    assert rekindle_command("status", "--files").output.startswith("no files are in this node's memory")
    assert json.loads(rekindle_command("status", "--files", "--json").output) is None
    assert run(_SAVE, root / "x", point="upload.started") == KILLED
    alone = rekindle_command("status")
    assert alone.exit_code == 1 and "1 not on storage yet" in alone.output and "run 'rekindle flush'" in alone.output
    found = json.loads(rekindle_command("status", "--files", "--json").stdout)
    assert (found["agent"], found["files"], found["waiting"]) == (None, 1, 1) and found["problem"]
    rekindle.flush(timeout=60)
    found = json.loads(rekindle_command("status", "--files", "--json").stdout)
    assert (found["agent"], found["processes"]) == (store.agent(), [os.getpid()])
    assert (found["waiting"], found["problem"], found["drain"]["error"]) == (0, None, None)
    assert found["memory_bytes"] >= 4
    well = rekindle_command("status", "--files")
    assert well.exit_code == 0 and "no jobs" not in well.output and str(store.agent()) in well.output


def test_status_says_why_a_file_does_not_arrive(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    root.mkdir()
    rekindle.save(b"1", root / "gone" / "x")
    (root / "gone").write_bytes(b"a file in the way")
    assert not drainer.tick()
    store.notes.write_agent_status({"error": drainer.progress.error, "failed": drainer.progress.failed})
    found = rekindle_command("status", "--files")
    assert found.exit_code == 1 and "gone/x: " in found.output
