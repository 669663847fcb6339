"""Keeps the figures of an experiment, each beside the expected one, in a file that outlives whoever measures."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Figure", "Found", "NotMeasured", "Outcome", "Report", "read_report"]


class NotMeasured(Exception):
    """What an experiment measures did not happen."""


@dataclass(frozen=True)
class Figure:
    """One measured figure."""

    what: str
    value: float | str
    unit: str = ""
    expected: str = ""
    met: bool | None = None
    """True if the figure is as expected; None if nothing was."""

    @property
    def shown(self) -> str:
        value = self.value if isinstance(self.value, str) else f"{self.value:,.4g}"
        return f"{value} {self.unit}".strip()


@dataclass
class Outcome:
    """What became of an experiment."""

    name: str
    status: str
    """done, failed, out of time, or left out."""
    seconds: float = 0.0
    detail: str = ""
    """The reason of any other status than "done"."""
    figures: list[Figure] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    """Samples, for the file of results only."""
    proofs: list[str] = field(default_factory=list)
    """What has happened, by the experiment's own checks; for the file of results only."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Found:
    """What a report has."""

    figures: list[Figure] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    proofs: list[str] = field(default_factory=list)
    """What has happened, by the experiment's own checks."""
    failures: list[str] = field(default_factory=list)
    """Parts whose subject did not happen, and why."""


class Report:
    """Takes the figures of a running experiment. Each is in the file when the call returns.

    It takes none before a check has shown that what is measured has happened: see ``require``.
    """

    def __init__(self, path: Path, seconds: float = 1e9) -> None:
        self._file = path.open("a", buffering=1)
        self._deadline = time.monotonic() + seconds
        self._proven = False

    def require(self, happened: bool, what: str) -> None:
        """Check that what is measured has happened; figures are taken from then on. Raises NotMeasured if not."""
        if not happened:
            raise NotMeasured(f"did not happen: {what}")
        self._proven = True
        self._write({"proof": what})

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure one of several subjects, which needs a ``require`` of its own.

        If that fails, or anything else does, then the experiment has failed, but its other parts go on.
        """
        before, self._proven = self._proven, False
        try:
            yield
        except Exception as error:
            reason = str(error) if isinstance(error, NotMeasured) else f"{type(error).__name__}: {error}"
            self.failure(f"{name}: {reason}")
        finally:
            self._proven = before

    @property
    def left(self) -> float:
        """Seconds until the experiment is ended from outside."""
        return self._deadline - time.monotonic()

    def figure(
        self,
        what: str,
        value: float | str,
        unit: str = "",
        expected: str = "",
        *,
        low: float | None = None,
        high: float | None = None,
        met: bool | None = None,
    ) -> None:
        """Add a figure. ``low`` and ``high`` bound the expected one, inclusively; else ``met`` says if it is that.

        Raises NotMeasured unless ``require`` has passed before.
        """
        if not self._proven:
            raise NotMeasured(f"{what}: refused, as no check has shown that it was measured")
        if isinstance(value, (int, float)) and (low is not None or high is not None):
            met = (low is None or value >= low) and (high is None or value <= high)
            expected = expected or _range(low, high, unit)
        self._write({"figure": asdict(Figure(what, value, unit, expected, met))})

    def failure(self, reason: str) -> None:
        """Add that what was to be measured did not happen: the experiment has failed."""
        self._write({"failure": reason})

    def left_out(self, what: str, why: str) -> None:
        """Add that ``what`` was not measured."""
        self._write({"figure": asdict(Figure(what, f"left out: {why}"))})

    def raw(self, name: str, samples: Any) -> None:
        """Add samples that only the file of results gets."""
        self._write({"raw": {name: samples}})

    def has_time(self, seconds: float, what: str) -> bool:
        """True if so many seconds are left; else ``what`` is noted as left out."""
        if self.left >= seconds:
            return True
        self.left_out(what, "no time left")
        return False

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def _range(low: float | None, high: float | None, unit: str) -> str:
    if low == high or (low is None and high == 0):
        return f"{high:g} {unit}".strip()
    if low is None:
        return f"at most {high:g} {unit}".strip()
    if high is None:
        return f"at least {low:g} {unit}".strip()
    return f"{low:g} to {high:g} {unit}".strip()


def read_report(path: Path) -> Found:
    """Returns all that is in a report, without the line that a death has cut off."""
    found = Found()
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "figure" in line:
            found.figures.append(Figure(**line["figure"]))
        found.raw.update(line.get("raw", {}))
        found.proofs += [line["proof"]] if "proof" in line else []
        found.failures += [line["failure"]] if "failure" in line else []
    return found
