"""What each release of torch has to do. A case raises AssertionError unless its fault happened and was survived."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.torch_matrix.environment import Environment

__all__ = ["CASES", "Place"]

_PROGRAMS = Path(__file__).parent / "programs"
KILLS = 20
_APART = 4
"""Steps between two kills."""
STEPS = (KILLS + 1) * _APART
_WITHIN = 480.0
_WARM = "restarts are warm from now on"
_AGAIN = "was killed by SIGKILL: all ranks are started again"


class Place(NamedTuple):
    """An environment, and a directory for what its cases leave."""

    environment: Environment
    directory: Path
    memory: Path

    def launch(self, case: str, *arguments: object) -> Launched:
        """Runs ``rekindle run`` to its end."""
        directory = self.folder(case)
        environ = self.environment.environ(self.memory)
        command = [self.environment.python, "-m", "rekindle", "run", *arguments]
        return Launched.run([*map(str, command)], directory, environ)

    def folder(self, case: str) -> Path:
        made = self.directory / case
        made.mkdir(exist_ok=True)
        return made

    def train(self, case: str, kind: str, kills: dict[int, list[int]], *options: str, **more: Any) -> Launched:
        """Trains with these ranks killed in these steps."""
        directory = self.folder(case)
        task = {"place": str(directory), "kind": kind, "kills": {str(step): ranks for step, ranks in kills.items()}}
        task |= {"steps": STEPS, "options": {"snapshot_every": 1}, "warm": False, "lingers": 0.0, **more}
        ranks = 1 if kind == "compiled" else 2
        return self.launch(case, *options, f"--nproc-per-node={ranks}", _PROGRAMS / "train.py", json.dumps(task))

    def unbroken(self, kind: str) -> dict[tuple[int, int], str]:
        """Returns the digests of a training without a fault, by rank and step."""
        name = f"unbroken-{kind}"
        done = Launched(self.directory / name, 0, "")
        if not (self.directory / name).exists():
            done = self.train(name, kind, {}, "--no-warm", "--max-restarts=0")
        assert done.code == 0, done.end
        return done.digests()


class Launched(NamedTuple):
    """A job that has ended."""

    directory: Path
    code: int
    output: str

    @classmethod
    def run(cls, command: list[str], directory: Path, environ: dict[str, str]) -> Launched:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=directory, env=environ,
            start_new_session=True,
        )  # fmt: skip
        lines: list[str] = []

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if _WARM in line:
                    (directory / "warm").touch()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            code = process.wait(_WITHIN)
        except subprocess.TimeoutExpired:
            code = -1
            lines.append(f"it did not end within {_WITHIN:g} s\n")
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(30)  # an agent that outlives the job may hold the pipe
        (directory / "output").write_text("".join(lines))
        return cls(directory, code, "".join(lines))

    @property
    def end(self) -> str:
        """The launcher's last words, for a person."""
        words = [line for line in self.output.splitlines() if line.startswith("rekindle: ")]
        return " / ".join(words[-3:])[-400:]

    def traces(self, event: str) -> list[dict[str, Any]]:
        found = []
        for rank, path in enumerate(sorted(self.directory.glob("trace-*.jsonl"))):
            found += [{"rank": rank, **json.loads(line)} for line in path.read_text().splitlines()]
        return [each for each in found if each["event"] == event]

    def digests(self) -> dict[tuple[int, int], str]:
        """Returns them by rank and step. Raises AssertionError if a step that was made again is another one."""
        found: dict[tuple[int, int], str] = {}
        for each in self.traces("step"):
            before = found.setdefault((each["rank"], each["step"]), each["digest"])
            assert before == each["digest"], f"step {each['step']} of rank {each['rank']} differs when made again"
        return found

    def check(self, kills: int, restarts: int) -> None:
        """Raises AssertionError unless so many ranks were killed, and each time all were started again, and well."""
        marks = list(self.directory.glob("killed-*"))
        assert len(marks) == kills, f"{len(marks)} of {kills} kills happened: {self.end}"
        again = self.output.count(_AGAIN)
        others = self.output.count("all ranks are started again") - again
        assert again == restarts and not others, f"{again} + {others} restarts after {restarts} kills: {self.end}"
        assert self.code == 0, f"exit code {self.code}: {self.end}"
        assert "reuses its store" not in self.output, "somebody was told to launch with 'rekindle run', who did"

    def equals(self, unbroken: dict[tuple[int, int], str]) -> None:
        """Raises AssertionError unless each step, the last one included, has the unbroken run's bits."""
        mine = self.digests()
        wrong = [key for key, digest in mine.items() if unbroken[key] != digest]
        assert mine.keys() == unbroken.keys() and not wrong, f"other bits at (rank, step) {wrong[:3]}"


def _pauses(done: Launched) -> str:
    """Returns the median of the seconds from a kill to the new start's first step."""
    steps = sorted(done.traces("step"), key=lambda each: each["at"])
    marks = sorted(path.stat().st_mtime for path in done.directory.glob("killed-*"))
    waited = []
    for mark in marks:
        old = {each["pid"] for each in steps if each["at"] <= mark}
        waited += [next(each["at"] for each in steps if each["at"] > mark and each["pid"] not in old) - mark]
    return f"{sorted(waited)[len(waited) // 2]:.1f} s"


def _many_kills(place: Place, *, warm: bool) -> str:
    kills = {_APART * number: [number % 2] for number in range(1, KILLS + 1)}
    name = "warm" if warm else "cold"
    done = place.train(name, "ddp", kills, *[] if warm else ["--no-warm"], warm=warm)
    done.check(KILLS, KILLS)
    starts = [each["warm"] for each in sorted(done.traces("start"), key=lambda each: each["at"])]
    assert starts == [False] * 2 + [warm] * (2 * KILLS), f"{sum(starts)} of {2 * KILLS} ranks were started warm"
    done.equals(place.unbroken("ddp"))
    return f"{KILLS} of {KILLS}, {_pauses(done)}"


def warm_restarts(place: Place) -> str:
    return _many_kills(place, warm=True)


def cold_restarts(place: Place) -> str:
    return _many_kills(place, warm=False)


def gasp(place: Place) -> str:
    """No snapshot is taken: only the survivor can have secured the step."""
    done = place.train("gasp", "ddp", {20: [1]}, "--no-warm", options={"snapshot_every": 10**6}, lingers=1.0)
    done.check(1, 1)
    restored = [each["restored"] for each in done.traces("start")]
    assert sorted(restored) == [0, 0, 19, 19], f"restored {restored}: {done.end}"
    assert "part of step 19 secured in memory" in done.output
    done.equals(place.unbroken("ddp"))
    return "step 19 of 19"


def all_killed(place: Place) -> str:
    done = place.train("all-killed", "ddp", {20: [0, 1]}, "--no-warm")
    done.check(2, 1)
    starts = [(each["restored"], each["place"]) for each in done.traces("start")][1::2]
    assert starts == [(19, "memory")] * 2, f"restored {starts}"
    done.equals(place.unbroken("ddp"))
    return "step 19 of 19"


def fsdp2(place: Place) -> str:
    # FSDP2 of these trains on GPUs only: other DTensors stand in for it, and the cell says so.
    old = place.environment.torch.startswith(("2.4.", "2.5.", "2.6."))
    kind = "tensor parallel" if old else "fsdp2"
    done = place.train(kind, kind, {10: [1], 20: [0, 1]}, "--no-warm")
    done.check(3, 2)
    done.equals(place.unbroken(kind))
    return f"as unbroken{', by tensor parallel' if old else ''}"


def compiled(place: Place) -> str:
    done = place.train("compiled", "compiled", {10: [0]}, "--no-warm")
    done.check(1, 1)
    done.equals(place.unbroken("compiled"))
    return "as unbroken"


def dcp(place: Place) -> str:
    """Saves by both writers, dies, reads by both readers; and DCP's own reads what is exported."""
    directory = place.folder("dcp")
    done = place.launch("dcp", "--no-warm", "--nproc-per-node=2", _PROGRAMS / "dcp.py", directory)
    done.check(2, 1)
    for command in (
        ["-m", "rekindle", "export", "root", "exported", "--format", "dcp"],
        [str(_PROGRAMS / "read_export.py"), str(directory)],
    ):
        _run(place, directory, command)
    return "as saved"


def _run(place: Place, directory: Path, command: list[str]) -> None:
    environ = place.environment.environ(place.memory)
    run = subprocess.run(
        [str(place.environment.python), *command], cwd=directory, env=environ, capture_output=True, text=True,
        timeout=_WITHIN, check=False,
    )  # fmt: skip
    assert run.returncode == 0, " / ".join((run.stderr or run.stdout).strip().splitlines()[-2:])[-300:]


def _stand_in(place: Place, name: str, ranks: int = 1) -> str:
    client = _PROGRAMS / f"{name}_client.py"
    done = place.launch(name, f"--provide={name}", f"--nproc-per-node={ranks}", client, place.folder(name))
    done.check(1, 1)
    return "ok"


def mindio_acp(place: Place) -> str:
    return _stand_in(place, "mindio_acp")


def mindio_ttp(place: Place) -> str:
    return _stand_in(place, "mindio_ttp", ranks=2)


def torch_nebula(place: Place) -> str:
    return _stand_in(place, "torch_nebula")


CASES: dict[str, Callable[[Place], str]] = {
    "warm": warm_restarts,
    "cold": cold_restarts,
    "gasp": gasp,
    "all killed": all_killed,
    "FSDP2": fsdp2,
    "compiled": compiled,
    "DCP": dcp,
    "mindio_acp": mindio_acp,
    "mindio_ttp": mindio_ttp,
    "torch_nebula": torch_nebula,
}
"""By the head of their column."""
