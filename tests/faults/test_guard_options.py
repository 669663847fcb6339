"""Options of ``guard()`` that make no sense are refused before training begins: a fault would be too late."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rekindle


@pytest.fixture
def ckpt(root: Path, memory: Path) -> Any:
    model = torch.nn.Linear(2, 2)
    with rekindle.Checkpointer(root, {"model": model}, memory=memory) as ckpt:
        yield ckpt


SECONDS = "must be a number of seconds, more than 0 and at most 86400"
CALLABLE = "must be a callable or None"
NOTICES = "must be a sequence of signals, paths of files, and callables"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *(("gasp_deadline", value, SECONDS) for value in (math.inf, math.nan, 1e12, 86401, 0, -1, "x", None, True)),
        *(("fence", value, "must be a bool, True or False") for value in ("x", 1, None)),
        *(("on_stop", value, CALLABLE) for value in ([None], "x", False)),
        *((name, [print], CALLABLE) for name in ("on_clean", "on_gasp", "on_exit")),
        *(("notices", value, NOTICES) for value in ("x", b"\x0f", signal.SIGTERM, None, [None], [True], [3.5])),
        ("notices", [signal.SIGTERM, 1000], "1000 is no signal"),
        ("notices", [0], "0 is no signal"),
        *(("watchdog", value, "must be True, False") for value in (math.nan, math.inf, -1, "x", None)),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name_at_once(
    ckpt: rekindle.Checkpointer, option: str, value: object, message: str
) -> None:
    given: dict[str, Any] = {option: value}
    with pytest.raises(rekindle.UsageError) as raised:
        ckpt.guard(**given)
    assert f"{option} is " in str(raised.value) and message in str(raised.value)


@pytest.mark.parametrize(
    "given",
    [
        {"gasp_deadline": 1},
        {"gasp_deadline": 86400.0, "fence": True},
        {"fence": np.True_, "watchdog": np.False_},
        {"watchdog": np.bool_(True)},
        {"notices": ()},
        {"notices": {signal.SIGTERM, "go", Path("now"), bool}},
        {"notices": [int(signal.SIGRTMIN) + 1]},
        {"on_stop": None, "on_clean": print},
    ],
)
def test_an_option_that_makes_sense_is_taken(ckpt: rekindle.Checkpointer, given: dict[str, Any]) -> None:
    with ckpt.guard(**{"watchdog": False} | given):
        pass
