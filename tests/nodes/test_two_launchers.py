"""Two launchers go on from one start, each with the node that it can reach: one of them is refused."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rekindle.errors import BusyError
from rekindle.storage.claims import newest_claim
from rekindle.storage.posix import PosixStore
from tests.nodes.lab import Lab, Node
from tests.nodes.train import Task

_SCRIPT = Path(__file__).with_name("script.py")
_PORT = 29400
_LIMIT = 150.0
_STEPS = 40


def launch(node: Node, task: Task, endpoint: Node, nodes: str) -> subprocess.Popen[bytes]:
    """``rekindle run`` on one node; its log lies beside the traces of the ranks."""
    traces = Path(task.traces)
    traces.mkdir(exist_ok=True)
    (traces / "task").write_bytes(pickle.dumps(task))
    words = [sys.executable, "-m", "rekindle", "run", "--nnodes", nodes, "--nproc-per-node", "1"]
    words += ["--rdzv-id", "lab", "--rdzv-endpoint", f"{endpoint.address}:{_PORT}", "--local-addr", node.address]
    words += ["--max-restarts", "9", "--restart-pause", "0", str(_SCRIPT), str(traces / "task")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    environment.pop("REKINDLE_MEMORY", None)
    with (traces / f"{node.name}.log").open("ab") as log:
        return subprocess.Popen(node.command(*words), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def logs(directory: Path) -> str:
    return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in sorted(directory.glob("**/*.log")))


def wait_until(holds: Callable[[], bool], directory: Path) -> None:
    deadline = time.monotonic() + _LIMIT
    while not holds():
        assert time.monotonic() < deadline, logs(directory)
        time.sleep(0.1)


def end_launchers(nodes: list[Node], launchers: list[subprocess.Popen[bytes]]) -> None:
    """Kills launchers and ranks. The agents stay, as after any fault."""
    for node in nodes:
        for pid in node.processes(_SCRIPT.name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for process in launchers:
        process.kill()
        process.wait(_LIMIT)


@pytest.mark.campaign(seconds=45)
def test_of_two_launchers_that_go_on_apart_one_is_refused(lab: Lab, tmp_path: Path) -> None:
    nodes = [lab.add(), lab.add()]
    store = PosixStore(lab.storage / "run")
    root, options = str(lab.mount / "run"), {"persist_every": 5}
    whole = Task(root, str(tmp_path / "whole"), world=2, steps=10**6, options=options)
    launchers = [launch(node, whole, nodes[0], "2") for node in nodes]
    try:
        wait_until(lambda: bool(store.published()), tmp_path)
        nodes[1].cut()
        end_launchers(nodes, launchers)
        before = {entry.stamp.incarnation.id for entry in store.published()}
        newest = store.published()[-1].stamp.step
        steps = newest + _STEPS
        sides = [Task(root, str(tmp_path / node.name), world=1, steps=steps, options=options) for node in nodes]
        launchers = [launch(node, side, node, "1:2") for node, side in zip(nodes, sides, strict=True)]
        wait_until(lambda: None not in [process.poll() for process in launchers], tmp_path)
    finally:
        end_launchers(nodes, launchers)
    codes = [process.returncode for process in launchers]
    assert sorted(codes) == [0, BusyError.exit_code], logs(tmp_path)
    winner, loser = (nodes[codes.index(code)] for code in (0, BusyError.exit_code))
    said = (tmp_path / loser.name / f"{loser.name}.log").read_text()
    assert "the job goes on elsewhere, by a start of generation 2, at" in said and f"on {winner.name}" in said
    after = {entry.stamp.incarnation for entry in store.published()}
    successors = [start for start in after if start.id not in before]
    assert [start.generation for start in successors] == [2]
    assert store.published()[-1].stamp.step == steps
    claim = newest_claim(store)
    assert claim is not None and (claim.start, claim.hosts) == (successors[0].id, [winner.name])
