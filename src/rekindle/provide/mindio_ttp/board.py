"""Carries the messages of a dump between ranks, as small files of a folder: no server, which could be what failed.

A file has its name when it is whole. ``claim`` lets one rank decide for all: a second one finds the name taken.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from rekindle.memory.lock import Lock

__all__ = ["Board"]


class Board:
    """One start's folder, as one rank sees it. Thread-safe. Raises OSError when the folder can't be used."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self._rank = folder, rank
        self._hosts: dict[int, str] = {}
        """Hosts of the ranks that have been looked at. A rank stays on its host."""
        self._here = socket.gethostname()
        self._place = Lock(folder / f"rank-{rank}.lock")
        """Held as long as this process lives."""
        self._place.acquire()
        self.tell(f"rank-{rank}", {"host": self._here})

    @staticmethod
    def make(above: Path, name: str) -> None:
        """Makes the folder of a start below ``above``, and removes those of earlier ones. For one rank."""
        with suppress(FileNotFoundError):
            for old in above.iterdir():
                shutil.rmtree(old, ignore_errors=True)
        (above / name).mkdir(parents=True)

    def tell(self, name: str, content: Any) -> None:
        """Leaves a message, in place of one of the same name."""
        os.replace(self._write(name, content), self.folder / f"{name}.json")

    def claim(self, name: str, content: Any) -> bool:
        """Leaves a message if there is none of that name. Returns False if there is."""
        written = self._write(name, content)
        try:
            os.link(written, self.folder / f"{name}.json")
        except FileExistsError:
            return False
        finally:
            written.unlink()
        return True

    def _write(self, name: str, content: Any) -> Path:
        path = self.folder / f".{name}-by-{self._rank}"
        path.write_text(json.dumps(content))
        return path

    def read(self, name: str) -> Any:
        """Returns a message; None if there is none."""
        try:
            return json.loads((self.folder / f"{name}.json").read_text())
        except FileNotFoundError:
            return None

    def alive(self, rank: int) -> bool:
        """Returns False if the rank's process has ended. True also for one on another host, of which nothing is known.

        A lock on some shared file systems counts on its own host only.
        """
        if rank not in self._hosts and (told := self.read(f"rank-{rank}")) is not None:
            self._hosts[rank] = told["host"]
        if self._hosts.get(rank) not in (self._here, None):
            return True
        return Lock.holder(self.folder / f"rank-{rank}.lock") is not None
