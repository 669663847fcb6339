"""Modules that an agent loads as it starts: each costs its node time and memory for as long as the job lives."""

from __future__ import annotations

import subprocess
import sys

LATER = ("torch", "rekindle.peers", *(f"rekindle.agent.{name}" for name in ("mesh", "mesh_keeper", "neighbour")))
"""Modules of no use to a job on one node. What they need comes with them."""


def test_an_agent_loads_nothing_that_only_several_nodes_need() -> None:
    code = "import sys, rekindle.agent.service; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "rekindle.agent.mesh_loader" in loaded
    assert not set(LATER) & set(loaded)
