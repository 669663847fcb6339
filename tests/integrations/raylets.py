"""Raylets of this machine, each a node of a Ray cluster."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.faults.harness import wait_for
from tests.integrations.environments import PROGRAMS, REPO, environment

__all__ = ["LONG", "OURS", "PROMPT", "Cluster"]

LONG = 120.0
"""Seconds that a start of Ray, or of all workers, may take on processors that have other work."""


OURS = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Environment of clusters that only these tests may use. Ray's own choice goes by a file in the home directory."""
PROMPT = {"RAY_worker_niceness": "0"}
"""Environment in which Ray's workers have the processors as others do. Else they start after minutes if it is busy."""


class Cluster:
    """Raylets, the first of which is the head. A memory store on a file system of its own makes each one a node."""

    def __init__(self, place: Path) -> None:
        self.bin = Path(environment("ray")).parent
        self.place = place
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        # Names of sockets are short, and those that Ray makes below this are long.
        self.temporary = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self._raylets: list[subprocess.Popen[bytes]] = []

    def add(self, memory: Path, processors: int = 1) -> None:
        """Starts one more raylet. Returns when it has its sockets: two at once would choose the same names for them."""
        first, before = not self._raylets, self._listening()
        head = ("--head", "--include-dashboard=false", f"--temp-dir={self.temporary}")
        which = (*head, f"--port={self.address.split(':')[1]}") if first else (f"--address={self.address}",)
        alike = ("--block", "--object-store-memory=80000000", "--node-ip-address=127.0.0.1")
        ports = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0")
        with open(self.place / "raylets.log", "ab") as log:
            raylet = subprocess.Popen(
                [str(self.bin / "ray"), "start", *which, f"--num-cpus={processors}", *alike, *ports],
                env=self.environment(REKINDLE_MEMORY=str(memory)),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._raylets.append(raylet)
        wait_for(lambda: len(self._listening() - before) >= 2, LONG, "a raylet has not its two sockets")
        if first:
            wait_for(self._answers, LONG, "Ray's first node does not answer")

    def environment(self, **more: str) -> dict[str, str]:
        """Returns the environment of raylets, and of programs that train on them."""
        path = f"{self.bin}:{os.environ['PATH']}"
        modules = f"{REPO / 'src'}:{PROGRAMS}"
        ours = {"PYTHONPATH": modules, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "PATH": path}
        return {**os.environ, **ours, **OURS, **PROMPT, "RAY_DEDUP_LOGS": "0", "RAY_ADDRESS": self.address, **more}

    def _listening(self) -> set[str]:
        """Returns the sockets of all raylets by inode: a name that a drained node has left is taken again."""
        fields = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        ours = [one for one in fields if len(one) == 8 and one[7].startswith(f"{self.temporary}/")]
        return {inode for *_, flags, _, _, inode, _ in ours if flags == "00010000"}  # they listen

    def _answers(self) -> bool:
        host, port = self.address.split(":")
        with suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return True
        return False

    def preempt(self, node: str, seconds: int) -> None:
        """Tells Ray that a node, by its id, is going to be taken away."""
        assert re.fullmatch("[0-9a-f]+", node)
        why = ("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test")
        which = (f"--address={self.address}", f"--node-id={node}", f"--deadline-remaining-seconds={seconds}")
        done = subprocess.run(
            [str(self.bin / "ray"), "drain-node", *which, *why],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=LONG,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def end(self) -> None:
        """Ends all raylets, the head last."""
        for raylet in self._raylets[::-1]:
            raylet.terminate()  # and it ends the others of its node
            with suppress(subprocess.TimeoutExpired):
                raylet.wait(45)
            with suppress(ProcessLookupError):
                os.killpg(raylet.pid, signal.SIGKILL)
            raylet.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)
