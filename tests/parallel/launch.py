"""Functions that run on several ranks, each a fresh process with torch loaded and a process group of its own."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.fork_server import context

__all__ = ["Answer", "on_ranks"]

_GRACE = 5.0
"""Seconds that the others get once a rank has failed: all of them should fail alike."""
_COLLECTIVE = timedelta(seconds=40)
_MEETINGS = 3
"""Times that ranks try to meet."""


@dataclass
class Answer:
    """What a rank has returned, or what it raised."""

    value: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """Name of the error's class; ``Killed`` of a rank that had to be."""
    message: str = ""
    trace: str = ""

    def __getitem__(self, key: str) -> Any:
        assert not self.error, self.trace or self.message
        return self.value[key]


def on_ranks(
    world: int, act: Callable[..., dict[str, Any]], *args: Any, grouped: bool = True, timeout: float = 60.0
) -> list[Answer]:
    """``act(rank, world, *args)`` on each rank; what it returns goes through JSON.

    It must be a function of a module. There is no process group unless ``grouped``. Processes end without tidying up,
    as if killed. Ranks that could not reach each other begin again: Gloo listens at any free port, which a test that
    looks for a server may just be asking.
    """
    for _ in range(_MEETINGS):
        answers = _once(world, act, args, grouped=grouped, timeout=timeout)
        if not any("connectFullMesh failed" in answer.message for answer in answers):
            break
    return answers


def _once(
    world: int, act: Callable[..., dict[str, Any]], args: tuple[Any, ...], *, grouped: bool, timeout: float
) -> list[Answer]:
    with tempfile.TemporaryDirectory(prefix="rekindle-ranks-") as name:
        place = Path(name)
        ranks = [
            context.Process(target=_rank, args=(place, rank, world, grouped, act, args), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        _await(ranks, place, timeout)
        answers = [_answer(place / f"{rank}.json", place / f"{rank}.log") for rank in range(world)]
    told = [
        f"\nrank {n} ended with {p.exitcode}: {a.trace}" for n, (p, a) in enumerate(zip(ranks, answers, strict=True))
    ]
    for killed in [answer for answer in answers if answer.error == "Killed"]:
        killed.trace = "".join(told)  # another one's failure may be the reason
    return answers


def _await(ranks: list[Any], place: Path, timeout: float) -> None:
    deadline, failed = time.monotonic() + timeout, False
    while any(p.is_alive() for p in ranks):
        if not failed and any(p.exitcode not in (None, 0) for p in ranks):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
        if time.monotonic() > deadline:
            for process in ranks:
                process.kill()
        time.sleep(0.005)
    for process in ranks:
        process.join()


def _answer(path: Path, log: Path) -> Answer:
    if not path.exists():
        said = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        return Answer(error="Killed", message="it hung, or died by itself", trace=said)
    return Answer(**json.loads(path.read_text()))


def _rank(
    place: Path, rank: int, world: int, grouped: bool, act: Callable[..., dict[str, Any]], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.dup2(os.open(place / f"{rank}.log", os.O_WRONLY | os.O_CREAT), 2)  # what torch has to say, too
    logging.basicConfig(level=logging.INFO, force=True, format="%(levelname)s %(message)s")
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    answer, code = Answer(), 0
    try:
        if grouped:
            how = {"init_method": f"file://{place}/meeting", "rank": rank, "world_size": world}
            dist.init_process_group("gloo", timeout=_COLLECTIVE, **how)  # type: ignore[arg-type]
        answer.value = act(rank, world, *args)
    except BaseException as error:
        answer = Answer({}, type(error).__name__, str(error), "".join(traceback.format_exception(error))[-4000:])
        code = 1
    temporary = place / f"{rank}.tmp"
    temporary.write_text(json.dumps(vars(answer)))
    temporary.rename(place / f"{rank}.json")
    os._exit(code)
