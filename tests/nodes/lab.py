"""Nodes on one machine: each has its own network, processes, host name, mounts and memory. For root, on Linux.

A ``Lab`` is a switch, a directory that all nodes have mounted, and the nodes on them. All of it lives in namespaces
that have no names: they end with their processes, and those with the process that made them, however that ends.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["Lab", "Node", "why_not"]

_FIRST_PROCESS = Path(__file__).with_name("first_process.py")
_NETWORK = "10.77.0"
"""Of this lab's switch alone, which nothing else is on."""
_MEMORY = 1 << 30
"""Bytes of a node's /dev/shm."""
_NOBODY = "02:00:00:00:00:fe"
"""Address that no network card has."""
_LIMIT = 30.0
"""Seconds that any of the commands here may take."""
_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")


def why_not() -> str:
    """Reason why there can be no lab here; empty if there can."""
    for command in ("unshare", "nsenter", "ip", "mount"):
        if shutil.which(command) is None:
            return f"there is no {command}"
    if os.getuid() != 0:
        return "only root can make namespaces"
    words = ["unshare", *_NAMESPACES, "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else ""


class Node:
    """One machine of a lab. ``number`` is the last part of its address, by which a launcher orders nodes."""

    def __init__(self, lab: Lab, number: int, *, mounted: bool = True, domain: str = "") -> None:
        self.lab, self.number, self.mounted, self.domain = lab, number, mounted, domain
        self.name = f"node{chr(ord('a') + number - 1)}"
        self.address = f"{_NETWORK}.{number}"
        self._port = f"p-{self.name}"
        self.connected = True
        """False while its cable is out of the switch, or nobody hears what it sends."""
        self.lost_at = math.inf
        """When it was killed; infinite until then."""
        self.silently = False
        """True if it lost its power, so that nobody has heard of its end."""
        self.leaving = False
        """True once it has been told that it will be taken away: no new start may count on it."""
        words = [*_NAMESPACES, "--fork", "--kill-child=KILL", "--", sys.executable, "-I", "-S", str(_FIRST_PROCESS)]
        source = str(lab.storage) if mounted else ""
        words += [self.name, str(lab.hosts), str(_MEMORY), source, str(lab.mount)]
        self._process, self.pid = _begin(words, lab.log)
        self._namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        self._network = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
        """Keeps the network a moment longer than the processes, so that those who die can still say that they end."""
        lab.connect(self._port, self.pid)
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "link", "set", "lo", "up")

    # -- what happens on it -------------------------------------------------------------------------------------------

    def command(self, *words: str) -> list[str]:
        """Command line that runs ``words`` on this node."""
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "--", *words]

    def run(self, *words: str) -> str:
        """Runs a command on this node to its end. Returns what it prints."""
        return _run(*self.command(*words))

    def inside(self, path: str | Path) -> Path:
        """Path by which this process sees a file of the node."""
        return Path(f"/proc/{self.pid}/root{path}")

    def processes(self, having: str = "") -> list[int]:
        """The node's processes, by their numbers outside of it, with ``having`` in their command lines."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(entry / "ns/pid") == self._namespace and having in _command_line(entry):
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self.pid]

    def outside(self, pid: int) -> int | None:
        """Number outside of the node of a process that has ``pid`` on it; None if there is no such process."""
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                if os.readlink(entry / "ns/pid") == self._namespace:
                    (line,) = (s for s in (entry / "status").read_text().splitlines() if s.startswith("NSpid"))
                    if int(line.split()[-1]) == pid:
                        return int(entry.name)
        return None

    @property
    def alive(self) -> bool:
        return self.lost_at == math.inf and self._process.poll() is None

    @property
    def usable(self) -> bool:
        """True if a launcher would start ranks here."""
        return self.alive and self.connected and not self.leaving

    # -- what is done to it -------------------------------------------------------------------------------------------

    def lose_power(self) -> None:
        """Nobody hears of it any more: no connection is closed."""
        self.cut()
        self.kill()

    def kill(self) -> None:
        """All its processes are killed, and the kernel closes their connections."""
        if self.alive:
            # First: whoever sees a process end must see that the node is no more.
            self.lost_at, self.silently = time.monotonic(), not self.connected
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait(_LIMIT)

    def cut(self) -> None:
        """Takes its cable out of the switch."""
        self.lab.switch("ip", "link", "set", self._port, "down")
        self.connected = False

    def heal(self) -> None:
        self.lab.switch("ip", "link", "set", self._port, "up")
        self.connected = True

    def mute(self) -> None:
        """What it sends is lost on the way, and it still hears all others."""
        for other in self.lab.nodes:
            if other is not self:
                self.run("ip", "neigh", "replace", other.address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")
        self.connected = False

    def unmute(self) -> None:
        self.run("ip", "neigh", "flush", "dev", "eth0", "nud", "permanent")
        self.connected = True

    def slow_down(self, rate: str) -> None:
        """Limits its link, to such as "10mbit", in both directions."""
        limit = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "200ms")
        self.lab.switch("tc", "qdisc", "replace", "dev", self._port, *limit)
        self.run("tc", "qdisc", "replace", "dev", "eth0", *limit)

    def unmount(self) -> None:
        """Takes the storage away. The place where it was mounted stays, empty."""
        self.run("umount", "-l", str(self.lab.mount))
        self.mounted = False

    def remount(self) -> None:
        self.run("mount", "--bind", str(self.lab.storage), str(self.lab.mount))
        self.mounted = True

    def down(self) -> None:
        """Ends it, without a trace."""
        self.kill()
        _end(self._process)
        os.close(self._network)


class Lab:
    """A switch and the nodes on it, in ``directory``. Leaving it ends all of it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.nodes = directory, list[Node]()
        self.storage, self.mount = directory / "storage", directory / "mount"
        self.hosts, self.log = directory / "hosts", directory / "namespaces.log"

    def __enter__(self) -> Lab:
        self.storage.mkdir()
        self.mount.mkdir()
        names = [f"{_NETWORK}.{number} node{chr(ord('a') + number - 1)}" for number in range(1, 27)]
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        self._process, self._pid = _begin(["--net", "--", "sh", "-c", "echo $$; exec cat >/dev/null"], self.log)
        try:
            self.switch("ip", "link", "add", "br0", "up", "type", "bridge")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.down()
        _end(self._process)

    def add(self, *, mounted: bool = True, domain: str = "") -> Node:
        """Brings up one more node. No address is used twice. ``domain`` names what fails together with it."""
        node = Node(self, len(self.nodes) + 1, mounted=mounted, domain=domain)
        self.nodes.append(node)
        return node

    def switch(self, *words: str) -> str:
        """Runs a command where the switch is."""
        return _run("nsenter", "-t", str(self._pid), "-n", "--", *words)

    def connect(self, port: str, pid: int) -> None:
        """Leads a cable from the switch to the network of process ``pid``."""
        there = ("type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self.switch("ip", "link", "add", port, *there)
        self.switch("ip", "link", "set", port, "master", "br0", "up")


def _begin(words: list[str], log: Path) -> tuple[subprocess.Popen[str], int]:
    """Starts ``unshare`` with a process that prints one number and ends with its input, so at latest with this one."""
    with log.open("a") as errors:
        process = subprocess.Popen(
            ["unshare", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdout is not None
    if number := process.stdout.readline().strip():
        return process, int(number)
    _end(process)
    raise OSError(f"no namespaces: {log.read_text()}")


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=_LIMIT)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


def _command_line(entry: Path) -> str:
    return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
