"""Keeps the figures of an experiment, each beside the expected one, in a file that outlives whoever measures."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Figure", "Outcome", "Report", "read_report"]


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Report:
    """Takes the figures of a running experiment. Each is in the file when the call returns."""

    def __init__(self, path: Path, seconds: float = 1e9) -> None:
        self._file = path.open("a", buffering=1)
        self._deadline = time.monotonic() + seconds

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
        """Add a figure. ``low`` and ``high`` bound the expected one, inclusively; else ``met`` says if it is that."""
        if isinstance(value, (int, float)) and (low is not None or high is not None):
            met = (low is None or value >= low) and (high is None or value <= high)
            expected = expected or _range(low, high, unit)
        self._write({"figure": asdict(Figure(what, value, unit, expected, met))})

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


def read_report(path: Path) -> tuple[Sequence[Figure], dict[str, Any]]:
    """Returns figures and samples of a report, without the line that a death has cut off."""
    figures, raw = [], {}
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "figure" in line:
            figures.append(Figure(**line["figure"]))
        raw.update(line.get("raw", {}))
    return figures, raw
