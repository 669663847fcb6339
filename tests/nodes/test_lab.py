"""The lab itself: what its nodes share and what they don't, how it strikes them, and that nothing of it stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nodes.lab import Lab, Node

REPO = Path(__file__).parents[2]
ASK = "import socket; socket.create_connection(('nodea', 9999), 1).recv(9); print('heard')"
ANSWER = (
    "import socket; s = socket.create_server(('', 9999)); print('up', flush=True)\nwhile 1: s.accept()[0].send(b'x')"
)


def hears(node: Node) -> bool:
    """True if a server on the first node answers."""
    done = subprocess.run(node.command(sys.executable, "-IS", "-c", ASK), capture_output=True, text=True, timeout=30)
    return done.stdout == "heard\n"


def serve(node: Node) -> subprocess.Popen[str]:
    words = node.command(sys.executable, "-IS", "-c", ANSWER)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_nodes_share_storage_and_nothing_else(lab: Lab) -> None:
    one, other = lab.add(), lab.add(mounted=False)
    one.run("touch", "/dev/shm/mine", str(lab.mount / "all"))
    assert one.run("hostname") == "nodea\n" and other.run("hostname") == "nodeb\n"
    assert other.run("ls", "/dev/shm") == "" and [path.name for path in lab.storage.iterdir()] == ["all"]
    assert other.run("ls", str(lab.mount)) == ""
    other.remount()
    assert other.run("ls", str(lab.mount)) == "all\n"
    one.unmount()
    assert one.run("ls", str(lab.mount)) == "" and (lab.storage / "all").exists()
    assert one.inside("/dev/shm/mine").exists() and not list(lab.mount.iterdir())


def test_links_are_cut_muted_and_healed(lab: Lab) -> None:
    one, other = lab.add(), lab.add()
    server = serve(one)
    assert hears(other)
    for break_it, mend in ((other.cut, other.heal), (other.mute, other.unmute), (one.mute, one.unmute)):
        break_it()
        assert not hears(other)
        mend()
        assert hears(other)
    (inner,) = one.processes("9999")
    os.kill(inner, signal.SIGKILL)
    server.communicate(timeout=30)


def test_a_link_is_slowed_down_to_its_rate(lab: Lab) -> None:
    if not shutil.which("tc"):
        pytest.skip("there is no tc")
    one, other = lab.add(), lab.add()
    give = "import socket; s = socket.create_server(('', 9999)); print('up', flush=True); c = s.accept()[0]; "
    give += "c.sendall(bytes(160 << 10))"
    take = "import socket, time; s = socket.create_connection(('nodea', 9999)); began = time.monotonic()\n"
    take += "while s.recv(1 << 16): pass\nprint(time.monotonic() - began)"
    other.slow_down("1mbit")
    server = subprocess.Popen(one.command(sys.executable, "-IS", "-c", give), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "up\n"
    seconds = float(other.run(sys.executable, "-IS", "-c", take))
    server.communicate(timeout=30)
    assert seconds > 0.9  # 32 KiB pass at once, the other 128 at 1 Mbit/s


def test_a_lost_node_says_goodbye_or_does_not(lab: Lab) -> None:
    """The kernel closes the connections of those who are killed; nobody closes those of a node without power."""
    here, killed, powerless = lab.add(), lab.add(), lab.add()
    words = "import socket; s = socket.create_connection(('{}', 9999)); s.recv(9); s.settimeout(2); print(s.recv(9))"
    for node, lose, said in ((killed, killed.kill, "b''\n"), (powerless, powerless.lose_power, "")):
        held = "import socket,time; s = socket.create_server(('', 9999)); print('up', flush=True); c = s.accept()[0]; "
        held += "c.send(b'x'); time.sleep(99)"
        server = subprocess.Popen(node.command(sys.executable, "-IS", "-c", held), stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        client = subprocess.Popen(
            here.command(sys.executable, "-IS", "-c", words.format(node.name) + "\n"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        deadline = time.monotonic() + 30
        while "ESTAB" not in node.run("ss", "-tnH", "sport", "=", "9999") and time.monotonic() < deadline:
            time.sleep(0.01)
        lose()
        assert client.communicate(timeout=30)[0] == said
        server.communicate(timeout=30)
        assert not node.alive


def test_nothing_stays_behind_after_a_failure(lab: Lab, tmp_path: Path) -> None:
    place = tmp_path / "inner"
    place.mkdir()
    with pytest.raises(RuntimeError, match="on purpose"), Lab(place) as inner:
        node = inner.add()
        serve(node)
        pids = [*node.processes(), node.pid]
        assert len(pids) == 2
        raise RuntimeError("on purpose")
    assert gone(pids)
    assert str(place) not in Path("/proc/self/mountinfo").read_text()


def test_nothing_stays_behind_when_the_tests_are_killed(lab: Lab, tmp_path: Path) -> None:
    place = tmp_path / "inner"
    place.mkdir()
    code = (
        "import pathlib, sys; from tests.nodes.lab import Lab; lab = Lab(pathlib.Path(sys.argv[1])).__enter__(); "
        "node = lab.add(); print(node.pid, lab._pid, flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(place)], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    owner.kill()
    owner.communicate(timeout=30)
    assert gone(pids)
