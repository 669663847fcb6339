"""Programs of other frameworks. Lightning is in ``.venv``; ``make deepspeed`` and the like install what is not."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from rekindle.memory.job_dir import JobDir
from tests.faults.harness import end_agent

__all__ = [
    "PROGRAMS",
    "REPO",
    "environment",
    "launch",
    "lines",
    "lose_node",
    "needs_lightning",
    "pinned",
    "ranks_of",
    "without_ours",
]

REPO = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"

OURS = re.compile(r"rekindle|ckpt|^ *attach\(", re.IGNORECASE)
"""Found in each line of an example that is there for Rekindle."""

needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed: pip install -e '.[dev]'"
)


def environment(name: str) -> str:
    """Returns the Python of a framework's environment, or skips the test."""
    python = Path(os.environ.get(f"REKINDLE_TEST_{name.upper()}", REPO / f".venv-{name}")) / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{name} is not installed: make {name}")
    return str(python)


def pinned() -> dict[str, set[str]]:
    """Maps the frameworks that the tests run with to their pinned versions: those of the Makefile, and Lightning's."""
    lines = re.findall(r"^PACKAGES_\w+ *:= *(.*)$", (REPO / "Makefile").read_text(), re.MULTILINE)
    lines += re.findall(r"lightning==[\d.]+", (REPO / "pyproject.toml").read_text())
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"([\w-]+)(?:\[\w+\])?==([\d.]+)", " ".join(lines)):
        found.setdefault(name, set()).add(version)
    return found


def launch(python: str, program: str, *arguments: object, where: Path, **variables: str) -> subprocess.Popen[str]:
    """Starts a program, whose output goes to a file."""
    rank = variables.get("RANK", "0")
    with open(where / f"{program}-{rank}.out", "a", encoding="utf-8") as out:
        return subprocess.Popen(
            [python, str(PROGRAMS / f"{program}.py"), *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1", **variables},
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=where,
            text=True,
        )


def lines(where: Path, program: str, rank: int = 0) -> dict[str, str]:
    """Maps the first word of each line that a program printed to the rest. Later lines win."""
    text = (where / f"{program}-{rank}.out").read_text(encoding="utf-8")
    return {key: rest for key, _, rest in (line.partition(" ") for line in text.splitlines())}


def ranks_of(count: int, python: str, program: str, *arguments: object, where: Path, **variables: str) -> list[int]:
    """Runs a program on that many ranks to their ends, a single one without a launcher's words. Returns exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    each = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)] if count > 1 else [{}]
    offline = {"HF_HUB_OFFLINE": "1", **variables}
    ranks = [launch(python, program, *arguments, where=where, **offline, **own) for own in each]
    try:
        return [rank.wait(300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def lose_node(memory: Path) -> None:
    """Takes a node away: what its memory has is lost, and its agents are killed."""
    stores = list(memory.glob("rekindle-*"))
    assert stores, "nothing has been in memory"
    for store in stores:
        for directory in store.iterdir():
            end_agent(JobDir(directory))
        shutil.rmtree(store)


def without_ours(script: str) -> str:
    """Returns an example without Rekindle: its lines are left out, and what stood in its blocks moves to the left."""
    left: list[str] = []
    block: int | None = None
    for line in script.splitlines():
        depth = len(line) - len(line.lstrip())
        if block is not None and line.strip() and depth <= block:
            block = None
        if not OURS.search(line):
            left.append(line if block is None else line[4:])
        elif line.lstrip().startswith("with "):
            block = depth
        elif line.strip() == "step = ckpt.restore()":
            left.append(line.replace("ckpt.restore()", "0"))
    return "\n".join(left)
