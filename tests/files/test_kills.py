"""Processes that die at any point: what a save had returned for arrives, and nothing half made is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.common.failpoints import POINTS
from rekindle.memory.files_dir import FilesDir
from rekindle.session import agent_keeper
from rekindle.session.agent_keeper import spawn
from rekindle.storage.path_place import PathPlace
from tests.faults.harness import wait_for
from tests.files.programs import KILLED, arrives, dies_with_its_agent, run

_DIE = "; os.kill(os.getpid(), signal.SIGKILL)"


def left(store: FilesDir) -> list[str]:
    """What memory holds beside whole files, once somebody has swept it."""
    store.sweep()
    names = {path.name for path in store.kept_path.iterdir()} - {"id"}
    whole = {file.data.name for file in store.kept.files()} | {file.receipt.name for file in store.kept.files()}
    return sorted(names - whole - {file.stored.name for file in store.kept.files()})


def test_twenty_of_twenty_arrive_after_a_sigkill_right_after_the_save(store: FilesDir, root: Path) -> None:
    code = (
        "import torch\n"
        "for n in range(20):\n"
        "    torch.manual_seed(n)\n"
        "    rekindle.save({'n': n, 'x': torch.randn(1000 * n)}, f'{sys.argv[1]}/{n}.pt')\n" + _DIE[2:]
    )
    assert run(code, root) == KILLED
    arrives(store)
    for number in range(20):
        torch.manual_seed(number)
        found = torch.load(root / f"{number}.pt", weights_only=True)
        assert found["n"] == number and torch.equal(found["x"], torch.randn(1000 * number))


@pytest.mark.campaign(90)
def test_twenty_programs_that_die_right_after_their_save(store: FilesDir, root: Path) -> None:
    """Each by itself: what one of them saved never waits for another program."""
    code = "import torch; torch.manual_seed(int(sys.argv[2])); rekindle.save(torch.randn(100_000), sys.argv[1])"
    for number in range(20):
        assert run(code + _DIE, root / f"{number}.pt", number) == KILLED
        wait_for((root / f"{number}.pt").exists)
        torch.manual_seed(number)
        assert torch.equal(torch.load(root / f"{number}.pt", weights_only=True), torch.randn(100_000))
        if number % 4 == 0:
            wait_until_gone(store)


def test_a_load_after_the_death_of_the_program_comes_from_memory(
    store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when storage has the file, as long as there is room."""
    assert run("rekindle.save({'step': 7}, sys.argv[1]); rekindle.flush(timeout=60)" + _DIE, root / "x.pt") == KILLED

    def read(self: PathPlace) -> int:
        raise AssertionError("storage was read")

    monkeypatch.setattr(PathPlace, "open", read)
    assert rekindle.load(root / "x.pt") == {"step": 7}


def test_the_first_save_of_a_process_that_dies_at_once_arrives_by_itself(store: FilesDir, root: Path) -> None:
    """Nobody else comes: the agent was started before the save returned."""
    assert run("rekindle.save(b'alone', sys.argv[1])" + _DIE, root / "x") == KILLED
    wait_for((root / "x").exists)
    assert (root / "x").read_bytes() == b"alone"


@pytest.mark.parametrize("point", POINTS["files"])
def test_a_saver_that_dies_at(point: str, store: FilesDir, root: Path) -> None:
    path = root / "x"
    assert run("rekindle.save(b'old', sys.argv[1]); rekindle.flush(timeout=60)", path) == 0
    assert run("rekindle.save(b'new' * 9999, sys.argv[1])", path, point=point) == KILLED
    expected = b"new" * 9999 if point == "files.committed" else b"old"
    assert rekindle.load(path) == expected
    arrives(store)
    assert path.read_bytes() == expected and left(store) == []
    assert list(store.paths.slots.iterdir()) == []


POINTS_OF_AGENTS = [point for point in POINTS["upload"] if point != "upload.evicted"]
PLACED = ("upload.placed", "upload.noted")
"""Points at which storage has the new file."""


def save_with_an_agent_that_dies(store: FilesDir, point: str, target: str | Path) -> bytes:
    """Saves over an older file, which storage has. Returns the bytes; the agent has died at the point by then."""
    assert run("rekindle.save(b'old', sys.argv[1]); rekindle.flush(timeout=60)", target) == 0
    wait_until_gone(store)
    code = dies_with_its_agent("rekindle.save(bytes(range(256)) * 80_000, sys.argv[1])")
    assert run(code, target, point=point) == KILLED
    return bytes(range(256)) * 80_000


@pytest.mark.parametrize("point", POINTS_OF_AGENTS)
def test_an_agent_that_dies_at(point: str, store: FilesDir, root: Path) -> None:
    path = root / "x"
    data = save_with_an_agent_that_dies(store, point, path)
    assert path.read_bytes() == (data if point in PLACED else b"old")
    assert rekindle.load(path) == data
    arrives(store)
    assert path.read_bytes() == data and os.listdir(root) == ["x"] and left(store) == []


def wait_until_gone(store: FilesDir) -> None:
    """Ends the agent: the next program starts one of its own, with its failpoint."""
    agent = store.agent()
    if agent:
        os.kill(agent, signal.SIGKILL)
    wait_for(lambda: store.agent() is None)


def test_a_process_that_dies_while_it_gives_a_file_up(store: FilesDir, root: Path) -> None:
    code = (
        "rekindle.save(bytes(1 << 20), sys.argv[1] + '/a'); rekindle.flush(timeout=60)\n"
        "rekindle.files.configure(limit='1.5MiB')\n"
        "rekindle.save(bytes(1 << 20), sys.argv[1] + '/b')"
    )
    assert run(code, root, point="upload.evicted") == KILLED
    assert rekindle.load(root / "a", raw=True) == bytes(1 << 20)
    assert left(store) == [] and store.kept.files() == []


@pytest.mark.parametrize("point", ["upload.copying", "upload.written"])
def test_a_write_to_storage_that_dies_leaves_the_old_file(point: str, store: FilesDir, root: Path) -> None:
    root.mkdir()
    (root / "x").write_bytes(b"old")
    code = "rekindle.files.configure(limit=1); rekindle.save(b'new' * 3_000_000, sys.argv[1])"
    assert run(code, root / "x", point=point) == KILLED
    assert (root / "x").read_bytes() == b"old" == rekindle.load(root / "x", raw=True)
    assert run(code, root / "x") == 0
    assert (root / "x").read_bytes() == b"new" * 3_000_000
    assert os.listdir(root) == ["x"], "the next writer takes the leftover over"


def test_an_agent_that_is_killed_is_followed_by_another_while_the_program_runs(store: FilesDir, root: Path) -> None:
    rekindle.save(b"one", root / "x")
    first = wait_for(store.agent)
    os.kill(first, signal.SIGKILL)
    rekindle.save(b"two", root / "y")
    rekindle.flush(timeout=60)
    assert (root / "y").read_bytes() == b"two" and store.agent() not in (None, first)


CARRIES = """
import sys, time
import rekindle
from rekindle.session import agent_keeper
agent_keeper._START_WITHIN = 0.1
agent_keeper.delays = lambda within: iter([0.1, 0.1, 0.0, 100.0])  # once it carries anything, it carries on
sys.executable = "/bin/false"
rekindle.save(b"one", sys.argv[1])
time.sleep(100)
"""


def test_a_program_that_carries_files_in_an_agents_place_is_let_live(
    store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives no signs of life, and is not for another program to kill."""
    monkeypatch.setattr(agent_keeper, "_SIGN_WITHIN", 0.5)
    with subprocess.Popen([sys.executable, "-c", CARRIES, str(root / "x")]) as other:
        wait_for(lambda: store.agent() == other.pid and (root / "x").exists())
        rekindle.save(b"two", root / "y")
        rekindle.flush(timeout=60)
        time.sleep(3)  # several looks at what carries
        assert other.poll() is None and store.agent() == other.pid
        other.kill()
    assert (root / "y").read_bytes() == b"two"


def test_a_program_that_is_stopped_while_it_carries_files_is_named(store: FilesDir, root: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CARRIES, str(root / "x")]) as other:
        try:
            wait_for(lambda: store.agent() == other.pid and (root / "x").exists())
            other.send_signal(signal.SIGSTOP)
            rekindle.save(b"two", root / "y")
            stopped = rf"or process {other.pid}, which carries files, is stopped"
            with pytest.raises(rekindle.NotDurableError, match=stopped):
                rekindle.flush(timeout=1)
            other.send_signal(signal.SIGCONT)
            rekindle.flush(timeout=60)
        finally:
            other.kill()
    assert (root / "y").read_bytes() == b"two"


ENDS = CARRIES.replace(
    "time.sleep(100)",
    """
while rekindle.files.client.current_client().store.agent() is None:
    time.sleep(0.01)
for number in range(20):
    rekindle.save(bytes(1 << 20), f"{sys.argv[1]}-{number}")
""",
).replace("import rekindle\n", "import rekindle, rekindle.files.client\n")


def test_a_program_that_carries_files_itself_carries_all_before_it_ends(store: FilesDir, root: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDS, str(root / "x")], check=True, timeout=120)
    assert store.agent() is None
    assert [name for name in range(20) if not (root / f"x-{name}").exists()] == []


def test_memory_that_is_removed_is_told_of_and_made_anew(store: FilesDir, root: Path, monkeypatch) -> None:
    rekindle.save(b"one", root / "x")
    agent = wait_for(store.agent)
    os.kill(agent, signal.SIGSTOP)  # else it may have carried the file by now
    rekindle.save(b"two", root / "y")
    shutil.rmtree(store.path)
    with pytest.raises(rekindle.NotDurableError, match="was removed"):
        rekindle.flush(timeout=5)
    os.kill(agent, signal.SIGKILL)
    rekindle.save(b"three", root / "z")
    rekindle.flush(timeout=60)
    assert (root / "z").read_bytes() == b"three"


@pytest.mark.campaign(seconds=5)
def test_the_agent_stays_while_storage_refuses_a_file(store: FilesDir, root: Path, monkeypatch) -> None:
    """Its memory is the only copy, however long nobody uses it."""
    monkeypatch.setenv("REKINDLE_FILES_IDLE_TIMEOUT", "0.05")
    root.mkdir()
    code = dies_with_its_agent("rekindle.save(b'data', sys.argv[1])")
    assert run(code, root / "later" / "x", point="upload.started") == KILLED
    (root / "later").write_bytes(b"in the way")
    spawn(store)
    wait_for(lambda: [file for file in rekindle.files.status() if file.problem])
    signs = {store.paths.agent_status.stat().st_mtime_ns}
    wait_for(lambda: signs.add(store.paths.agent_status.stat().st_mtime_ns) or len(signs) > 3)
    assert store.agent() and rekindle.load(root / "later" / "x") == b"data"
    (root / "later").unlink()
    wait_for(lambda: not store.path.exists())
    assert (root / "later" / "x").read_bytes() == b"data"


def test_the_agent_gives_memory_back_when_nobody_needs_it(store: FilesDir, root: Path, monkeypatch) -> None:
    monkeypatch.setenv("REKINDLE_FILES_IDLE_TIMEOUT", "0.2")
    assert run("rekindle.save(b'data', sys.argv[1])" + _DIE, root / "x") == KILLED
    wait_for(lambda: not store.path.exists())
    assert (root / "x").read_bytes() == b"data"
