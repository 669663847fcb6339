"""Runs the client program under ``rekindle run --provide mindio_ttp``, and reads what it has told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Run", "begin"]

CLIENT = Path(__file__).parent / "client.py"
STEPS = 8


@dataclass
class Run:
    """One job, from its first start to its end."""

    place: Path
    process: subprocess.Popen[str]

    def finish(self, timeout: float = 500) -> int:
        """Returns the launcher's exit code."""
        try:
            return self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    @property
    def output(self) -> str:
        return (self.place / "out").read_text()

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Lists what the ranks have told, in the order of their clocks; all of it, or the events of these names."""
        lines = (self.place / "events").read_text().splitlines()
        found = sorted(map(json.loads, lines), key=lambda event: event["at"])
        return [event for event in found if not names or event["event"] in names]

    def ends(self) -> list[tuple[str, str]]:
        """Lists the digests of each rank's weights and random generator at the end."""
        found = {event["rank"]: (event["digest"], event["generator"]) for event in self.events("end")}
        return [found[rank] for rank in sorted(found)]


def begin(place: Path, world: int, *fault: object, pause: float = 0.0, **environment: str) -> Run:
    """Starts the program. ``fault``: its kind, the moment and the ranks that it strikes, as the program takes them."""
    place.mkdir()
    (place / "memory").mkdir()
    ours = {
        "REKINDLE_MEMORY": str(place / "memory"),
        "REKINDLE_TTP_ROOT": str(place / "root"),
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m", "rekindle", "run", "--provide", "mindio_ttp", "--standalone", "--nproc-per-node", str(world)]
    with open(place / "out", "w") as out:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(CLIENT), str(place), str(STEPS), str(pause), *map(str, fault)],
            env={**os.environ, **ours, **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return Run(place, process)
