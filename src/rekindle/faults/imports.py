"""Tells the launcher what a start of the script has imported, so that the next start finds it loaded."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from rekindle.common.environ import LAUNCH
from rekindle.format.receipt import write_atomic

__all__ = ["IMPORTS", "ImportRecord", "imported_files", "note_save"]

IMPORTS = "imports"
"""File in the launcher's directory: modules with their files, and the variables that the script has set."""

_STEPS = 2
"""Steps after which a script has imported what it trains with: torch loads parts of itself at the first update."""


class ImportRecord:
    """Written once in a start, by one rank of each launcher: some 5 ms for 2,000 modules.

    It is due at the second step, or at the first save of a script that tells of its saves only: those are far apart,
    and there are updates between them.
    """

    def __init__(self) -> None:
        place = os.environ.get(LAUNCH)
        self._path = Path(place) / IMPORTS if place and os.environ.get("LOCAL_RANK", "0") == "0" else None
        self._steps: set[int] = set()

    def note_step(self, n: int) -> None:
        """Note that step ``n`` was made or saved. Writes the record once it is due."""
        if self._path is not None:
            self._steps.add(n)
            if len(self._steps) == _STEPS:
                self.write()

    def write(self) -> None:
        """Write the record, unless that was done."""
        if self._path is None:
            return
        with suppress(OSError, ValueError):
            begun = _begun_environment()
            changed = json.loads(self._path.read_bytes())["changed"] if begun is None else _changed_since(begun)
            write_atomic(self._path, json.dumps({"modules": imported_files(), "changed": changed}).encode())
        self._path = None


@cache
def _of_this_process() -> ImportRecord:
    return ImportRecord()


def note_save() -> None:
    """Notes that a checkpoint was saved by a script that tells of its saves only, and has no Checkpointer."""
    _of_this_process().write()


def imported_files() -> dict[str, str]:
    """Returns the file of each module, in the order of their imports; an empty name where it has none."""
    specs = ((name, getattr(module, "__spec__", None)) for name, module in list(sys.modules.items()))
    return {name: str(spec.origin or "") if spec is not None and spec.has_location else "" for name, spec in specs}


def _begun_environment() -> dict[bytes, bytes] | None:
    """Returns the variables that this process was started with.

    None in a warm worker whose kernel doesn't let it show them: it then shows those of the process that it is a copy
    of, which is no rank. What the script sets, a cold start has recorded before.
    """
    block = Path("/proc/self/environ").read_bytes()
    begun = dict(entry.split(b"=", 1) for entry in block.split(b"\0") if b"=" in entry)
    return begun if b"RANK" in begun else None


def _changed_since(begun: dict[bytes, bytes]) -> list[str]:
    now = dict(os.environb)
    return sorted(os.fsdecode(name) for name in begun.keys() | now.keys() if begun.get(name) != now.get(name))
