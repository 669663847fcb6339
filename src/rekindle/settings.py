"""Holds the options of a ``Checkpointer`` and of a DCP writer, and refuses those that make no sense."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal

from rekindle.common.durations import parse_seconds
from rekindle.common.waste import BUDGET
from rekindle.errors import UsageError
from rekindle.format.metric import MODES, is_metric_name
from rekindle.memory.room import Room
from rekindle.peers.membership import PATIENCE
from rekindle.state.codec import is_numpy
from rekindle.storage.throttle import parse_rate

__all__ = ["Overlap", "Settings", "check_bool", "check_seconds", "check_settings", "plain_bool"]

Overlap = bool | Literal["auto", "verify"]
"""When a save copies what stays as it is until the next update: behind ``step()`` (True, and "verify", which looks for
writers that come too late), inside of it (False), or as the snapshot's size decides ("auto")."""


_LONGEST_FALLBACK = 86400.0
"""Most seconds of ``fallback_after``: threads wait for parts of it, and can't wait for ever."""
_OFTEN = "'auto', or a time such as '30s' or '10min'"
"""Frequencies other than a number of steps."""
_LEAST_PATIENCE = 2.0
"""Least seconds of ``patience``: a node is silent after one, and gets another one to be heard by some other node."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options and their defaults. ``Checkpointer`` describes each. Raises UsageError for the first invalid one."""

    snapshot_every: int | str = "auto"
    snapshot_budget: float = BUDGET
    persist_every: int | str | None = None
    persist_seconds: float = 30.0
    drain_limit: int | str | None = None
    peer_every: int | Literal["auto"] | None = "auto"
    peer_limit: int | str | None = None
    patience: float = PATIENCE
    keep: int | None = None
    keep_every: int | None = None
    keep_best: tuple[str, Literal["min", "max"]] | None = None
    overlap: Overlap = "auto"
    rng: bool = True
    allow_pickle: bool = False
    allow_missing: bool = False
    strict: bool = False
    memory: str | os.PathLike[str] | None = None
    memory_limit: int | None = None
    memory_headroom: int | None = None
    idle_timeout: float = 900.0
    fallback_after: float = 10.0

    def __post_init__(self) -> None:
        for name in ("snapshot_every", "persist_every"):
            _check_frequency(name, getattr(self, name))
        if self.peer_every not in ("auto", None):
            _check_count("peer_every", self.peer_every)
        for name in ("rng", "allow_pickle", "allow_missing", "strict"):
            object.__setattr__(self, name, check_bool(name, getattr(self, name)))  # a frozen class lets nobody else
        object.__setattr__(self, "overlap", plain_bool(self.overlap))
        if self.memory is not None:
            _check_path("memory", self.memory)
        for name in ("keep", "keep_every", "memory_limit", "memory_headroom"):
            value = getattr(self, name)
            if value is not None:
                _check_count(name, value, least=0 if name == "memory_headroom" else 1)
        object.__setattr__(self, "keep_best", _check_best(self.keep_best))
        if not (isinstance(self.overlap, bool) or self.overlap in ("auto", "verify")):
            raise UsageError(f"overlap is {self.overlap!r}: must be 'auto', True, False or 'verify'")
        if not isinstance(self.snapshot_budget, (int, float)) or not 0 < self.snapshot_budget < 1:
            raise UsageError(
                f"snapshot_budget is {self.snapshot_budget!r}: must be a share of training time, such as 0.01"
            )
        check_seconds("fallback_after", self.fallback_after, most=_LONGEST_FALLBACK)
        check_seconds("idle_timeout", self.idle_timeout)
        check_seconds("persist_seconds", self.persist_seconds, zero=True)
        check_seconds("patience", self.patience)
        if self.patience < _LEAST_PATIENCE:
            raise UsageError(f"patience is {self.patience!r}: must be at least {_LEAST_PATIENCE:g} seconds")
        for rate in (self.drain_limit, self.peer_limit):
            parse_rate(rate)  # raises UsageError too

    @property
    def snapshot_seconds(self) -> float | None:
        """Seconds between snapshots; None where steps are counted, or the cost decides."""
        return _time_of(self.snapshot_every)

    @property
    def persist_steps(self) -> int | None:
        """Multiples of this go to storage; None where time decides."""
        return self.persist_every if isinstance(self.persist_every, int) else None

    @property
    def persist_pause(self) -> float:
        """Least seconds between snapshots that go to storage where time decides; with "auto" at first."""
        told = _time_of(self.persist_every)
        return self.persist_seconds if told is None else told

    @property
    def drain_rate(self) -> int | None:
        """``drain_limit`` in bytes per second; None for no limit."""
        return parse_rate(self.drain_limit)

    @property
    def peer_rate(self) -> int | None:
        """``peer_limit`` in bytes per second; None for no limit."""
        return parse_rate(self.peer_limit)

    @property
    def retention(self) -> tuple[int | None, int | None]:
        """``keep`` and ``keep_every``, as ``Store.prune`` takes them."""
        return self.keep, self.keep_every

    @property
    def room(self) -> Room:
        """``memory_limit`` and ``memory_headroom``."""
        return Room(self.memory_limit, self.memory_headroom)

    def agreed(self) -> dict[str, Any]:
        """Options that every rank must have been given alike, since each rank decides by them without asking others."""
        names = (
            *("persist_every", "snapshot_every", "snapshot_budget", "overlap", "persist_seconds", "allow_missing"),
            "peer_every",
        )
        return {name: getattr(self, name) for name in names}


def check_settings(given: Mapping[str, Any]) -> None:
    """Raises UsageError for the first of some keyword arguments of ``Checkpointer`` that is unknown or invalid."""
    names = [field.name for field in fields(Settings)]
    for name in given:
        if name not in names:
            meant = "".join(f"; did you mean {near}?" for near in get_close_matches(name, names, 1))
            raise UsageError(f"rekindle.Checkpointer has no setting {name}{meant}")
    Settings(**given)


def _check_count(name: str, value: object, least: int = 1, *, else_: str = "") -> None:
    """Raise UsageError unless ``value`` is a whole number of at least ``least`` that documents can hold.

    ``else_`` are words on what else it may be.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 63:
        raise UsageError(
            f"{name} is {value!r}: must be a whole number of at least {least}, and less than 2 to the 63rd"
            f"{', ' * bool(else_)}{else_}"
        )


def _check_frequency(name: str, value: object) -> None:
    """Raise UsageError unless ``value`` tells how often something is done. None is the default of ``persist_every``."""
    if value == "auto" or (name == "persist_every" and value is None):
        return
    seconds = _time_of(value)
    if seconds is None or not 0 < seconds < math.inf:  # NaN for other texts
        _check_count(name, value, else_=_OFTEN)


def _time_of(value: object) -> float | None:
    """Returns the seconds of a frequency that is a time; NaN for other texts but "auto", None for all else."""
    return parse_seconds(value) if isinstance(value, str) and value != "auto" else None


def _check_best(value: object) -> tuple[str, str] | None:
    """Returns ``keep_best`` as a tuple. Raises UsageError unless it is the name of a metric, and a mode."""
    if value is None:
        return None
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(pair) != 2 or not is_metric_name(pair[0]) or pair[1] not in MODES:
        raise UsageError(
            f"keep_best is {value!r}: must be the name of a metric, of 1 to 64 ASCII characters, and 'min' or 'max', "
            "as in ('loss', 'min')"
        )
    return pair


def check_bool(name: str, value: object) -> bool:
    """Returns ``value`` if it is True or False, else raises UsageError: texts such as "no" would count as True."""
    plain = plain_bool(value)
    if not isinstance(plain, bool):
        raise UsageError(f"{name} is {value!r}: must be a bool, True or False")
    return plain


def plain_bool(value: Any) -> Any:
    """Returns NumPy's True and False, which comparisons of its numbers give, as Python's; other values unchanged."""
    return bool(value) if is_numpy(value) and value.dtype.kind == "b" and value.shape == () else value


def _check_path(name: str, value: object) -> None:
    """Raise UsageError unless ``value`` is a path in text. It need not exist."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        raise UsageError(f"{name} is {value!r}: must be the path of a directory, as a str or an os.PathLike")


def check_seconds(name: str, value: Any, *, zero: bool = False, most: float = sys.float_info.max) -> None:
    """Raise UsageError unless ``value`` is a time above zero, and at most ``most``; ``zero`` is allowed on demand."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    valid = number and (0 < value <= most or (zero and value == 0))  # integers may be above all floats
    if not valid:
        bound = "" if most == sys.float_info.max else f" and at most {most:.0f}"
        raise UsageError(f"{name} is {value!r}: must be a number of seconds, {'0 or ' * zero}more than 0{bound}")
