"""Computes how often a job should be saved, by what it has measured and by its faults. Pure functions of records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.common.durations import describe_seconds, round_seconds
from rekindle.common.waste import best_interval, wasted_share
from rekindle.memory.history import History, history_of
from rekindle.memory.incident import Incident
from rekindle.memory.prices import Prices
from rekindle.storage.catalog import STORAGE
from rekindle.storage.throttle import drain_interval

__all__ = ["Advice", "Level", "Point", "advise"]

_CURVE = 61
"""Intervals for which the curve is told."""
_WIDTH = 30.0
"""Factor by which the curve goes beyond the shortest and the longest interval of interest."""
_STEP, _BUDGET = "the length of a step", "the budget of training time"
_TENTH = "storage is written to for at most a tenth of the time"


@dataclass(frozen=True)
class Point:
    """Waste of the starts that had one interval, as measured."""

    interval: float
    waste: float
    """Share of their time: saves, and steps that were trained in vain."""
    seconds: float
    """Length of these starts, all in all."""


@dataclass(frozen=True)
class Level:
    """One of the two places that a job goes back to, and how often it gets a checkpoint. Times in seconds."""

    name: str
    cost: float
    """Time that one save takes from training."""
    behind: float
    """Time from a checkpoint's state to the moment from which on it counts."""
    faults: int
    """Faults that went back to this place."""
    between: float
    """Estimate of the time between two of them."""
    least: float
    """Shortest interval that is allowed."""
    bound: str
    """Words on what sets that."""
    now: float | None
    """Interval at present; None if it isn't known yet."""
    best: float
    setting: str
    """The option that brings this interval about."""
    points: Sequence[Point] = ()

    def waste(self, interval: float) -> float:
        """Returns the expected share of time that is wasted with this interval."""
        return wasted_share(interval, self.cost, self.between, self.behind)

    def curve(self) -> list[tuple[float, float]]:
        """Returns intervals and their expected waste, around the present one and the best one."""
        known = [self.best, *(point.interval for point in self.points), *([] if self.now is None else [self.now])]
        low, high = max(min(known) / _WIDTH, 1.05 * self.cost, 1e-6), max(known) * _WIDTH
        factor = (high / low) ** (1 / (_CURVE - 1))
        return [(low * factor**number, self.waste(low * factor**number)) for number in range(_CURVE)]

    def to_json(self) -> dict[str, Any]:
        return {
            **{"cost": self.cost, "behind": self.behind, "faults": self.faults, "seconds_between_faults": self.between},
            **{"least": self.least, "bound": self.bound, "setting": self.setting},
            "now": None if self.now is None else {"interval": self.now, "waste": self.waste(self.now)},
            "best": {"interval": self.best, "waste": self.waste(self.best)},
            "measured": [vars(point) for point in self.points],
            "curve": [list(pair) for pair in self.curve()],
        }


@dataclass(frozen=True)
class Advice:
    """Holds the recommended intervals of a job, and what they are from."""

    history: History
    prices: Prices
    levels: Sequence[Level]

    @property
    def waste_now(self) -> float | None:
        """Expected waste of all levels at their present intervals; None if one isn't known."""
        known = [level.waste(level.now) for level in self.levels if level.now is not None]
        return sum(known) if len(known) == len(self.levels) else None

    @property
    def waste_best(self) -> float:
        return sum(level.waste(level.best) for level in self.levels)

    @property
    def outages(self) -> float:
        """Share of time from faults to the first new steps, which no interval changes."""
        each = self.history.outage
        return each / (self.history.between(self.history.faults) + each)

    def to_json(self) -> dict[str, Any]:
        return {
            "history": vars(self.history),
            "prices": self.prices.to_json(),
            **{level.name: level.to_json() for level in self.levels},
            "waste": {"now": self.waste_now, "best": self.waste_best, "outages": self.outages},
        }


def advise(records: Iterable[Incident], budget: float) -> Advice | None:
    """Returns advice from the records of all hosts, oldest first; None if no start has measured what saves cost.

    ``budget``: share of training time that saves of a kind may take. Storage is not advised on before a write has been
    measured.
    """
    records = list(records)
    priced = [record for record in records if record.prices]
    if not priced:
        return None
    known = {name: price for record in priced for name, price in record.prices.items()}  # the newest of each
    prices, history = _prices_of(known), history_of(records)
    levels = [_snapshots(prices, history, budget, _points(records, storage=False))]
    if prices.drain is not None and prices.drain_cost is not None:
        levels.append(
            _storage(prices, prices.drain, prices.drain_cost, history, budget, _points(records, storage=True))
        )
    return Advice(history, prices, levels)


def _prices_of(known: Mapping[str, float]) -> Prices:
    prices = Prices.from_json(dict(known))
    assert prices is not None  # only records that have some are asked
    return prices


def _snapshots(prices: Prices, history: History, budget: float, points: Sequence[Point]) -> Level:
    least, bound = max((prices.step, _STEP), (prices.snapshot / budget, _BUDGET))
    between = history.between(history.to_snapshots)
    every = max(1, round(max(best_interval(prices.snapshot, between), least) / prices.step))
    return Level(
        name="snapshots",
        cost=prices.snapshot,
        behind=0.0,
        faults=history.to_snapshots,
        between=between,
        least=least,
        bound=bound,
        now=prices.snapshot_gap,
        best=every * prices.step,
        setting=f"snapshot_every={every}",
        points=points,
    )


def _storage(
    prices: Prices, drain: float, cost: float, history: History, budget: float, points: Sequence[Point]
) -> Level:
    least, bound = max((drain_interval(0.0, drain), _TENTH), (cost / budget, _BUDGET))
    between = history.between(history.to_storage)
    best = round_seconds(max(best_interval(cost, between), least))
    return Level(
        name="storage",
        cost=cost,
        behind=drain,
        faults=history.to_storage,
        between=between,
        least=least,
        bound=bound,
        now=prices.drain_gap,
        best=best,
        setting=f'persist_every="{describe_seconds(best)}"',
        points=points,
    )


def _points(records: Sequence[Incident], *, storage: bool) -> list[Point]:
    """Returns what starts have wasted, those of about one interval together."""
    found: dict[float, list[tuple[float, float]]] = {}
    seen: set[str] = set()
    for record in records:
        if record.prices and record.seconds and record.start not in seen:
            seen.add(record.start)
            prices = _prices_of(record.prices)
            gap, cost = prices.snapshot_gap, prices.snapshot
            if storage:
                gap, cost = prices.drain_gap, prices.drain_cost or 0.0
            if gap:
                back = record.is_fault and (record.place == STORAGE) == storage
                vain = (record.lost or 0) * prices.step if back else 0.0
                found.setdefault(round_seconds(gap), []).append((record.seconds, cost / gap * record.seconds + vain))
    return [
        Point(
            interval, sum(wasted for _, wasted in each) / sum(seconds for seconds, _ in each), sum(s for s, _ in each)
        )
        for interval, each in sorted(found.items())
    ]
