"""Times, narrow terminals, progress bars, waits and completion: commands as a person at a terminal meets them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from rekindle.cli.main import main
from rekindle.errors import NotDurableError
from rekindle.memory.fault import Fault
from rekindle.memory.status import StatusPage
from tests.stored import job_in, remember, save

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(NamedTuple):
    """The output of a command at a terminal of its own, without colours and cursor movements."""

    code: int
    text: str


_RUN = """
import json, sys
from rekindle.cli.main import main
for words in json.loads(sys.argv[1]):
    main(words, standalone_mode=False)
"""


def at_terminal(*commands: list[object], columns: int = 80, program: str = _RUN) -> Terminal:
    """Runs commands in one process, whose stdout and stderr are a terminal of ``columns``, for a minute at most."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-c", program, json.dumps([[str(word) for word in words] for words in commands])]
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**env, "TERM": "xterm"})
    os.close(theirs)
    ends = threading.Timer(60, process.kill)
    ends.start()
    said = b""
    with suppress(OSError):  # EIO: the command has closed its end
        while data := os.read(ours, 1 << 16):
            said += data
    os.close(ours)
    code = process.wait()
    ends.cancel()
    return Terminal(code, _CONTROL.sub("", said.decode()))


@pytest.fixture
def two_hours_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time that is not UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC-2")
        time.tzset()
        yield
    time.tzset()


def test_ls_tells_when_each_copy_was_saved(root: Path, memory: Path, two_hours_east: None) -> None:
    """Local time for people, ISO with its zone for programs."""
    before = int(time.time())
    save(root, 4)
    receipt = remember(job_in(memory, root), 5)
    os.utime(receipt, (1_700_000_000, 1_700_000_000))
    told = CliRunner().invoke(main, ["ls", str(root), "--json"])
    at = {entry["place"]: datetime.fromisoformat(entry["saved_at"]).timestamp() for entry in json.loads(told.stdout)}
    assert at["memory"] == 1_700_000_000 and before <= at["storage"] <= time.time()
    table = CliRunner().invoke(main, ["ls", str(root)]).stdout
    assert "2023-11-15 00:13:20" in table
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at["storage"])) in table


def test_ls_fits_the_terminal(root: Path, memory: Path) -> None:
    """Columns that people compare stay whole; the words of the others are folded."""
    save(root, 9999999999)
    said = at_terminal(["ls", root], columns=80)
    assert said.code == 0 and max(map(len, said.text.replace("\r", "").splitlines())) <= 80, said.text
    words = said.text.split()
    assert words[7] == "9999999999" and {"storage", "complete", "scratch"} <= set(words)
    datetime.strptime(" ".join(words[8:10]), "%Y-%m-%d %H:%M:%S")


@pytest.mark.parametrize("columns", [80, 60])
def test_status_fits_the_terminal(tmp_path: Path, memory: Path, columns: int) -> None:
    """A long root, many ranks, a fault: no line is too long, no number is cut, and the root can be put together."""
    root = tmp_path / "a project with a long name" / ("b" * 60) / "run-17"
    job = job_in(memory, root, world=8)
    locks = [job.lock_rank(rank, 5.0) for rank in range(8)]
    kept = [StatusPage(job.paths.status_page(rank), 1) for rank in range(8)]  # closed when the test ends
    kept[0].step, kept[0].snapshot, kept[0].longest = 1234567, 1234566, 12.5
    kept[0].note, kept[0].paused = b"evaluation of the whole set", True
    kept[0].write()
    job.paths.fault.write_text(json.dumps(Fault("exit", 7, 1, 1234, f"rank 7 ended: {'words ' * 30}").to_json()))
    remember(job, 1234566, rank=0, world=8)
    said = at_terminal(["status"], columns=columns)
    table, error = said.text.replace("\r", "").split("Error: ")  # an error is one line, which the terminal folds
    assert max(map(len, table.splitlines())) <= columns, table
    assert "".join(str(root).split()) in "".join(table.split()), table
    words = table.split()
    assert {f"7:{os.getpid()}", "1234567", "1234566", "trainers", "evaluation"} <= set(words), table
    assert words.count("words") == 30 and error.startswith(f"{root}: no agent")
    for lock in locks:
        lock.release()


def test_stop_says_what_it_waits_for(root: Path, memory: Path) -> None:
    """A slow drain without an agent: how far it is, what holds it, for how long at most; then, that it was too long."""
    remember(job_in(memory, root, drain_limit=2 << 20), 5, nbytes=16 << 20)
    said = CliRunner().invoke(main, ["stop", str(root), "--timeout", "3"])
    assert said.exit_code == NotDurableError.exit_code
    waits, error = said.stderr.splitlines()
    assert re.match(rf"{root}: storage has .* of 16\.8 MB of step 5, .*/s, as its drain_limit is 2\.1 MB/s; ", waits)
    assert waits.endswith("s more at most")
    assert re.search(r"storage has [\d,]+ of 16,.* bytes of step 5 so far: give it more time", error), error


def test_stop_says_why_storage_takes_nothing(root: Path, memory: Path) -> None:
    remember(job_in(memory, root), 5)
    root.write_text("a file where the directory should be")
    said = CliRunner().invoke(main, ["stop", str(root), "--timeout", "3"])
    assert said.exit_code == NotDurableError.exit_code
    assert said.stderr.startswith(f"{root}: storage takes nothing: ") and "waits 2 s more at most" in said.stderr


def test_bars_are_for_terminals(root: Path, memory: Path) -> None:
    save(root, 5, nbytes=1 << 20)
    out, other = root.parent / "out", root.parent / "other"
    said = at_terminal(["verify", root], ["export", root, out, "--format", "safetensors"], ["import", out, other, 1])
    for told in ("step 5 in storage", "1.1/1.1 MB", "sound", "exporting step 5", "importing step 1", "as v"):
        assert told in said.text, said.text
    piped = CliRunner().invoke(main, ["verify", str(root)])
    assert piped.exit_code == 0 and piped.stderr == "" and "in storage" not in piped.stdout


_WAIT = """
import sys, threading
from rekindle.cli import terminal
with terminal.waiting_for("runs/short"):
    pass
terminal._TELL_FIRST = 0
with terminal.waiting_for("runs/17 [bold]"):
    while type(sys.stdout).__name__ != "FileProxy":  # rich has taken it over
        threading.Event().wait(0.01)
print("listed")
"""


def test_a_command_that_waits_for_storage_shows_it() -> None:
    said = at_terminal(program=_WAIT)
    assert said.code == 0 and "waiting for runs/17 [bold]" in said.text and "short" not in said.text, said.text
    assert said.text.rstrip().endswith("listed")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_command_prints_the_same_script(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = CliRunner().invoke(main, ["completion", shell])
    monkeypatch.setenv("_REKINDLE_COMPLETE", f"{shell}_source")
    assert told.exit_code == 0
    assert told.stdout.split() == CliRunner().invoke(main, [], prog_name="rekindle").stdout.split()
    assert CliRunner().invoke(main, ["completion", "csh"]).exit_code == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_that_completes(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_REKINDLE_COMPLETE", f"{shell}_source")
    script = CliRunner().invoke(main, [], prog_name="rekindle")
    assert script.exit_code == 0 and f"_REKINDLE_COMPLETE={shell}_complete" in script.stdout
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script.stdout, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("rekindle st", {"plain,status", "plain,stop"}),
        ("rekindle export --format s", {"plain,safetensors"}),
        ("rekindle run train", {"file,train"}),
        *((f"rekindle {name} run", {"dir,run"}) for name in ("ls", "verify", "status", "stop", "export", "pin")),
    ],
)
def test_commands_options_and_roots_are_completed(
    words: str, offered: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_REKINDLE_COMPLETE", "bash_complete"), ("COMP_WORDS", words)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert set(CliRunner().invoke(main, [], prog_name="rekindle").stdout.split()) == offered
