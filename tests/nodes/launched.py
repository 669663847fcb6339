"""A job whose ranks are started by a real launcher on each node, as users do it: ``rekindle run``, or torchrun."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.nodes.job import POLL, Job
from tests.nodes.lab import Lab, Node
from tests.nodes.train import Task

__all__ = ["LaunchedJob"]

_SCRIPT = Path(__file__).with_name("script.py")
_PORT = 29400
_LAUNCHERS = {
    "rekindle run": ["rekindle", "run", "--restart-pause", "0"],
    "torchrun": ["torch.distributed.run", "--rdzv-backend", "rekindle"],
}
"""The module of each launcher, and its own options."""


class LaunchedJob(Job):
    """Has a launcher on each node of the lab that is up. Those beyond the number that the job wants are its spares."""

    def __init__(self, lab: Lab, task: Task, *, launcher: str = "rekindle run", **more: Any) -> None:
        self._launcher = _LAUNCHERS[launcher]
        super().__init__(lab, task, **more)

    def _launch(self) -> None:
        launchers: dict[Node, subprocess.Popen[bytes]] = {}
        try:
            while not self.over.is_set():
                for node in self.lab.nodes:
                    if node not in launchers and node.alive:
                        launchers[node] = self._start_launcher(node)
                done = {row["rank"] for row in self.rows("done")}
                codes = [process.poll() for node, process in launchers.items() if node.alive]
                if len(done) == self.task.world and 0 in codes:
                    return
                assert None in codes, f"all launchers have ended: {codes}\n{self.launcher_logs()}"
                time.sleep(POLL)
        finally:
            for process in launchers.values():
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait()

    def wait_until_warm(self, step: int) -> None:
        """Waits until all launchers have loaded what a restart needs, as they have in any job that runs for longer.

        At most until ``step``: other work may leave them no processor.
        """
        self.wait_until(lambda: self._are_warm() or self.reached(step), f"step {step}")

    def _are_warm(self) -> bool:
        logs = [self.lab.directory / f"launcher-{node.name}.log" for node in self.lab.nodes]
        return all("restarts are warm from now on" in log.read_text() for log in logs)

    def launcher_logs(self) -> str:
        """The last words of all launchers."""
        paths = sorted(self.lab.directory.glob("launcher-*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in paths)

    def _start_launcher(self, node: Node) -> subprocess.Popen[bytes]:
        task = self.lab.directory / "task"
        if not task.exists():
            task.write_bytes(pickle.dumps(self.task))
        words = [sys.executable, "-m", *self._launcher, "--nnodes", str(self.nodes)]
        words += ["--nproc-per-node", str(self.task.world // self.nodes), "--rdzv-id", "lab"]
        endpoints = ",".join(f"{node.address}:{_PORT}" for node in self.lab.nodes[:2])
        words += ["--rdzv-endpoint", endpoints, "--local-addr", node.address]
        words += ["--max-restarts", "9", str(_SCRIPT), str(task)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        environment["REKINDLE_DOMAIN"] = node.domain
        environment.pop("REKINDLE_MEMORY", None)
        with (self.lab.directory / f"launcher-{node.name}.log").open("ab") as log:
            return subprocess.Popen(
                node.command(*words), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
