"""When a silence is a hang: no false alarm over a simulated hour, and none that is missed."""

from __future__ import annotations

import random
from collections import deque

import pytest

from rekindle.agent.watch import allowance


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("typical", [0.002, 0.05, 1.0, 30.0])
def test_no_false_alarm_in_an_hour_of_irregular_steps(seed: int, typical: float) -> None:
    luck = random.Random(seed)
    recent: deque[float] = deque([typical], maxlen=20)
    now = 0.0
    while now < 3600:
        step = luck.uniform(0.1, 2.5) * max(recent)
        step = min(step, 100 * typical) if luck.random() < 0.5 else luck.uniform(0.5, 1.5) * typical
        step = min(step, 2.5 * max(recent))
        limit = allowance(max(recent))
        assert limit is not None and step < limit
        recent.append(step)
        now += step


def test_what_is_allowed() -> None:
    assert allowance(0.0) is None, "nothing is known yet"
    assert allowance(2.0) == 7.0
