"""A launcher under test: ``rekindle run`` as a process, and what it says."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rekindle.format.names import root_path
from rekindle.launch.spare import ORDERS
from rekindle.memory.job_dir import JobDir, memory_base
from tests.forked import Program

__all__ = ["WARM", "Job", "Launcher", "children", "descriptors", "parent"]

WARM = "restarts are warm from now on"
"""What the spare says once it is ready."""
_LIMIT = 120.0
_OBEDIENT = Path(__file__).with_name("obedient.py")


class Launcher:
    """``rekindle run`` with these arguments, in ``directory``. Ends it, and looks for what it left, on leaving."""

    def __init__(self, directory: Path, *arguments: object, standalone: bool = True, **environment: str) -> None:
        memory = directory / "memory"
        memory.mkdir(exist_ok=True)
        self.job = JobDir.of(root_path(directory / "root"), memory_base(memory))
        self.lines: list[str] = []
        self._news = threading.Condition()
        null = os.open(os.devnull, os.O_WRONLY)
        self.process = Program(
            "rekindle",
            "run",
            *["--standalone"] * standalone,
            *arguments,
            stdout=null,
            cwd=directory,
            env={**os.environ, "REKINDLE_MEMORY": str(memory), "CUDA_VISIBLE_DEVICES": "", **environment},
            start_new_session=True,
        )
        os.close(null)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(_LIMIT)
        self.read_out()
        if agent := self.job.agent():  # outlives a job that failed
            os.kill(agent, signal.SIGKILL)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()

    def read_out(self) -> None:
        """Wait for the last line of a launcher that ends."""
        self._reader.join(_LIMIT)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def restarts(self) -> list[str]:
        """Lines about restarts."""
        return [line for line in self.lines if "all ranks are started again" in line]

    def wait_for(self, text: str) -> str:
        """Returns the first line with ``text`` in it."""
        with self._news:
            found = self._news.wait_for(lambda: [line for line in self.lines if text in line], _LIMIT)
        assert found, f"{text!r} did not come:\n{self.output}"
        return found[0]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds`` does, which is asked every now and then."""
        done = threading.Event()
        for _ in range(int(_LIMIT / 0.05)):
            if holds():
                return
            done.wait(0.05)
        raise AssertionError(f"it did not come to be:\n{self.output}")

    def spares(self) -> list[int]:
        """Returns the processes that wait to be workers of this launcher."""
        wanted = f'"launcher": {self.process.pid},'.encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                told = (path / "environ").read_bytes()
                asleep = (path / "comm").read_text() == "rekindle-spare\n"
                if asleep and ORDERS.encode() in told and wanted in told:
                    found.append(int(path.name))
        return found


class Job(Launcher):
    """A launcher with the obedient script, or another one that notes its starts."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        options: tuple[str, ...] = (),
        script: Path = _OBEDIENT,
        **environment: str,
    ) -> None:
        super().__init__(directory, *options, script, "root", *arguments, **environment)
        self.directory = directory

    def order(self, what: str) -> None:
        draft = self.directory / "draft"
        draft.write_text(what)
        draft.rename(self.directory / "order")

    def stepped(self, start: int) -> None:
        """Wait until a start of this number has trained."""
        path = self.directory / "stepped"
        self.wait_until(lambda: path.exists() and str(start) in path.read_text().split())

    def make_steps(self, count: int) -> None:
        """Wait until the job has trained so many steps more."""
        first = self._newest()
        self.wait_until(lambda: self._newest() >= first + count)

    def _newest(self) -> int:
        return max((stamp.step for stamp, _ in self.job.snapshots.shard_ids()), default=0)

    @property
    def starts(self) -> list[int]:
        """Processes that have run the script, in order."""
        return [int(line.split()[0]) for line in (self.directory / "starts").read_text().splitlines()]

    @property
    def times(self) -> list[float]:
        """Monotonic times at which they began to."""
        return [float(line.split()[1]) for line in (self.directory / "starts").read_text().splitlines()]

    @property
    def cold(self) -> list[str]:
        """Lines about cold starts."""
        return [line for line in self.lines if "started cold" in line]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid: int) -> list[int]:
    """Child processes, ended ones that nobody has waited for included."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _has_parent(path, pid)]


def descriptors(pid: int) -> int:
    """Number of a process's open files: the fewest of some looks, without those by which it awaits an end just now."""
    return min(_descriptors(pid) for _ in range(5))


def _descriptors(pid: int) -> int:
    time.sleep(0.01)
    count = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += os.readlink(path) != "anon_inode:[pidfd]"
    return count


def _has_parent(path: Path, pid: int) -> bool:
    try:
        return parent(int(path.name)) == pid
    except (FileNotFoundError, ProcessLookupError):
        return False
