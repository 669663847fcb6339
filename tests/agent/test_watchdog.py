"""When a silence is a hang: no false alarm over a simulated hour, and none that is missed."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from rekindle.agent.watchdog import FAST, PATIENT, silence_floor, silence_limit
from rekindle.errors import UsageError
from rekindle.memory.status import STABLE, TRAINING, Status

PAGE = Status(1, 1, STABLE, TRAINING, 0, 3, 3, -1, 0.0, 0, "", 0.0)


def allowed(floor: float | None, longest: float, pause: float = 0.0) -> float:
    limit = silence_limit([floor], [replace(PAGE, longest=longest, pause=max(pause, longest))])
    assert limit is not None
    return limit.seconds


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
        assert step < allowed(FAST, max(recent))
        recent.append(step)
        now += step


def test_what_is_allowed() -> None:
    assert silence_limit([PATIENT], [PAGE]) is None, "nothing is known yet"
    assert silence_limit([PATIENT, PATIENT], [PAGE, replace(PAGE, longest=1.0)]) is None, "one of them may be compiling"
    assert allowed(FAST, 2.0) == 7.0
    assert allowed(FAST, 2.0, pause=50.0) == 7.0, "such a job declares its pauses"
    assert allowed(PATIENT, 0.01) == 60.0
    assert allowed(PATIENT, 40.0) == 121.0


def test_a_pause_that_was_seen_is_allowed_for_again_within_bounds() -> None:
    assert allowed(PATIENT, 0.01, pause=50.0) == 151.0
    assert allowed(10.0, 0.01, pause=50.0) == 151.0
    assert allowed(PATIENT, 0.01, pause=1000.0) == 1600.0, "each pause would else allow one three times as long"


def test_the_most_patient_rank_speaks_for_all() -> None:
    pages = [replace(PAGE, longest=0.1), replace(PAGE, longest=0.2)]
    limit = silence_limit([FAST, 90.0], pages)
    assert limit is not None and limit.seconds == 90.0 and "watchdog=SECONDS" in limit.why
    assert silence_limit([FAST, None], pages) is None


def test_settings() -> None:
    assert [silence_floor(given) for given in (True, False, "fast", 10, 0.5)] == [PATIENT, None, FAST, 10.0, 0.5]
    for odd in (0, -1, float("nan"), float("inf"), "slow", None, [60]):
        with pytest.raises(UsageError, match="watchdog is"):
            silence_floor(odd)
