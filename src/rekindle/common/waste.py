"""Computes the share of time that faults and the saves against them take, and the interval at which it is least.

J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974.
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22(3), 2006.

Assumed, as by both: faults come at a constant rate and independently of each other (exponential times between them),
each costs what was trained since the newest save, and a save costs the same every time.
"""

from __future__ import annotations

import math

__all__ = ["BUDGET", "best_interval", "wasted_share"]

BUDGET = 0.01
"""Share of training time that saves of a kind may take, by default."""


def best_interval(cost: float, between_faults: float) -> float:
    """Returns Daly's estimate of the interval with the least waste, in seconds from one save to the next.

    ``cost``: seconds that a save takes from training. ``between_faults``: mean seconds between two faults; ``math.inf``
    for none. Young's estimate is the first factor; the series is that of Daly, whose interval leaves out the cost.
    """
    if cost <= 0:
        return 0.0
    if cost >= 2 * between_faults:
        return between_faults + cost
    share = cost / (2 * between_faults)
    return math.sqrt(2 * cost * between_faults) * (1 + math.sqrt(share) / 3 + share / 9)


def wasted_share(interval: float, cost: float, between_faults: float, behind: float = 0.0) -> float:
    """Returns the expected share of time that saves take, and that is trained in vain before a fault. From 0 to 1.

    ``behind``: seconds from the moment of which a save is to that from which on it counts, such as those of a write
    to storage. The time until training goes on after a fault is not part of it. Exact under what is assumed: between
    two faults the n-th save is there with the probability that none strikes for n intervals and ``behind`` seconds.
    """
    if interval <= cost:
        return 1.0
    if math.isinf(between_faults):
        return cost / interval
    exponent = interval / between_faults
    if exponent > 700:  # beyond a float's range: no save is ever reached
        return 1.0
    saved = math.exp(-behind / between_faults) / math.expm1(exponent)
    return 1 - (interval - cost) / between_faults * saved
