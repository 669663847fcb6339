"""The table of all targets, and one case of one of them, run inside of the fence."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import documents, foreign, stores, talk
from tests.fuzz.choices import Case, Choices
from tests.fuzz.fence import fenced
from tests.fuzz.seeds import scratch_directory

__all__ = ["TARGETS", "Target", "run"]


@dataclass(frozen=True)
class Target:
    """``make`` makes a case of a fuzzer's bytes, ``run`` raises what no case may bring about."""

    make: Callable[[Choices], Case]
    run: Callable[[Case, Path], None]
    does: str
    code: Callable[[Case], bool] = lambda case: False
    """Whether the case allows pickles to be loaded."""


def _is_dcp(case: Case) -> bool:
    return bool(case["form"] == "dcp")


TARGETS = {
    "boxes": Target(documents.boxes.make, documents.boxes.run, "coverage and read plans, against a count by hand"),
    "names": Target(documents.names.make, documents.names.run, "roots, file names, amounts"),
    "stamp": Target(documents.stamp.make, documents.stamp.run, "the head of a document"),
    "status": Target(documents.status.make, documents.status.run, "a status page"),
    "values": Target(documents.values.make, documents.values.run, "typed values"),
    "receipt": Target(documents.receipt.make, documents.receipt.run, "a sealed receipt, and all that is made of one"),
    "checkpoint": Target(stores.checkpoint.make, stores.checkpoint.run, "ls, inspect, verify, export, restore"),
    "memory": Target(stores.memory.make, stores.memory.run, "a job's memory: ls, status, rebuild, drain, restore"),
    "safetensors": Target(foreign.safetensors.make, foreign.safetensors.run, "import of safetensors and an index"),
    "note": Target(foreign.note.make, foreign.note.run, "import of an export of ours", _is_dcp),
    "torchfile": Target(foreign.torchfile.make, foreign.torchfile.run, "import of a torch.save file"),
    "dcp": Target(foreign.dcp.make, foreign.dcp.run, "import of a DCP directory", lambda c: c["allowed"]),
    "http": Target(talk.http.make, talk.http.run, "questions to the agent"),
    "watch": Target(talk.watch.make, talk.watch.run, "what ranks tell the agent"),
    "answer": Target(talk.answer.make, talk.answer.run, "answers of an agent"),
}


def run(target: Target, case: Case) -> None:
    """One case, in a directory of its own. Raises what it has found."""
    place = Path(tempfile.mkdtemp(dir=scratch_directory()))
    try:
        with fenced(place, target.code(case)):
            target.run(case, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
