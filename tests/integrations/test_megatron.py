"""Megatron-core on two and four ranks of a CPU: killed anywhere it ends as the run that was not, in any layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integrations.environments import PROGRAMS, REPO, environment

pytestmark = pytest.mark.timeout(900)

STEPS = 14
DATA, TENSOR, PIPELINE = (2, ()), (2, ("--tensor", 2)), (2, ("--pipeline", 2))
EXPERTS = (2, ("--experts", 4, "--expert", 2))
FOUR = [
    (4, ("--tensor", 2, "--instances", 2)),
    (4, ("--pipeline", 2, "--instances", 2)),
    (4, ("--experts", 4, "--expert", 2, "--instances", 2)),
]
"""Ranks, and options of the program. Of the last three, ranks 0 and 2 hold the same shards, and so do 1 and 3."""
Death = tuple[int, str, int]
"""Step, point and rank. A launcher's first start dies the first one, the next start the second one, and so on."""


def train(where: Path, ranks: int, *options: object, restarts: int = 0) -> int:
    """Trains to the end. Returns the launcher's exit code."""
    where.mkdir(exist_ok=True)
    command = [environment("megatron"), "-m", "rekindle", "run", "--standalone", f"--nproc-per-node={ranks}"]
    with open(where / "out", "a", encoding="utf-8") as out:
        launcher = subprocess.Popen(
            [*command, f"--max-restarts={restarts}", str(PROGRAMS / "train_megatron.py"), *map(str, options)],
            env={**os.environ, "PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=where,
        )
    try:
        return launcher.wait(600)
    finally:
        if launcher.poll() is None:
            launcher.terminate()  # it ends its ranks
            launcher.wait(60)


def ends(where: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((where / f"end-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Returns the ends of the ranks of a training that was not interrupted, and did not know of Rekindle."""

    @cache
    def end(ranks: int, *options: object) -> list[dict[str, Any]]:
        where = tmp_path_factory.mktemp("unbroken")
        assert train(where, ranks, "none", where, "--alone", "--steps", STEPS, *options) == 0
        return ends(where, ranks)

    return end


def broken(where: Path, ranks: int, *options: object, deaths: list[Death]) -> list[int]:
    """Trains to the end, through all deaths. Returns the step from which each start but the first has gone on."""
    given = ("--deaths", json.dumps(deaths), "--steps", STEPS, *options)
    assert train(where, ranks, where / "run", where, *given, restarts=len(deaths)) == 0, (where / "out").read_text()
    assert all((where / f"died-{number}").exists() for number in range(len(deaths)))
    (starts,) = {(where / f"starts-{rank}").read_text() for rank in range(ranks)}
    first, *others = map(int, starts.split())
    assert first == 0
    return others


def check_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["end"] == theirs["end"]
        assert ours["losses"].items() <= theirs["losses"].items()


@pytest.mark.campaign(seconds=120)
@pytest.mark.parametrize("kind", [DATA, TENSOR, PIPELINE, EXPERTS], ids=str)
def test_killed_at_every_point(
    kind: Any, memory: Path, tmp_path: Path, unbroken: Callable[..., list[dict[str, Any]]]
) -> None:
    """No completed step is lost: small shards are in memory when ``step()`` returns."""
    ranks, options = kind
    points = ["forward", "backward", "reduce", "update"] + ["before-step", "after-step"] * (kind == DATA)
    deaths = [(3 + 2 * number, point, number % ranks) for number, point in enumerate(points)]
    starts = broken(tmp_path, ranks, *options, deaths=deaths)
    assert starts == [step if point == "after-step" else step - 1 for step, point, _ in deaths]
    check_same(ends(tmp_path, ranks), unbroken(ranks, *options))


@pytest.mark.campaign(seconds=120)
@pytest.mark.parametrize("kind", FOUR, ids=str)
def test_a_copy_stands_in_for_any_dead_rank(
    kind: Any, memory: Path, tmp_path: Path, unbroken: Callable[..., list[dict[str, Any]]]
) -> None:
    """No snapshots are taken: the step under way comes back from the ranks that live, which may have completed it."""
    ranks, options = kind
    deaths = [(3, "update", 0), (6, "forward", 1), (9, "forward", 2), (12, "update", 3)]
    settings = ("--settings", json.dumps({"snapshot_every": 10**9}))
    starts = broken(tmp_path, ranks, *options, *settings, deaths=deaths)
    for start, (step, point, _) in zip(starts, deaths, strict=True):
        assert start == step - 1 or (point == "update" and start == step)
    check_same(ends(tmp_path, ranks), unbroken(ranks, *options))


@pytest.mark.campaign(seconds=50)
def test_gathers_during_the_forward_pass(
    memory: Path, tmp_path: Path, unbroken: Callable[..., list[dict[str, Any]]]
) -> None:
    """With ``overlap_param_gather`` the weights of a step are not final when it is saved."""
    starts = broken(tmp_path, 2, "--overlap", deaths=[(5, "forward", 0), (9, "update", 1)])
    assert starts == [4, 8]
    check_same(ends(tmp_path, 2), unbroken(2, "--overlap"))


@pytest.mark.campaign(seconds=35)
@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        (TENSOR, PIPELINE),
        (PIPELINE, (4, ("--tensor", 2))),
        ((2, ("--instances", 2)), TENSOR),
        (EXPERTS, (2, ("--experts", 4))),
    ],
    ids=str,
)
def test_another_layout(saved: Any, restored: Any, memory: Path, tmp_path: Path) -> None:
    """What is restored there and saved again is bit for bit what was saved."""
    first, second = tmp_path / "first", tmp_path / "second"
    ranks, options = saved
    assert train(first, ranks, tmp_path / "run", first, "--steps", 3, *options) == 0
    before = whole(tmp_path / "run", tmp_path / "before", 3)
    ranks, options = restored
    assert train(second, ranks, tmp_path / "run", second, "--steps", 3, "--save-again", 4, *options) == 0
    assert {(second / f"starts-{rank}").read_text() for rank in range(ranks)} == {"3\n"}
    after = whole(tmp_path / "run", tmp_path / "after", 4)
    assert len(before) > 20
    assert before == after


def whole(root: Path, out: Path, step: int) -> dict[str, Any]:
    """Returns each tensor of a checkpoint, whatever the ranks were that saved it."""
    command = [sys.executable, "-m", "rekindle", "export", str(root), str(step), str(out), "--format", "safetensors"]
    subprocess.run(command, check=True)
    return {
        name: tensor.flatten().tolist()
        for file in sorted(out.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.campaign(seconds=35)
@pytest.mark.parametrize(
    ("saved", "restored", "asynchronous"),
    [(TENSOR, PIPELINE, False), (PIPELINE, DATA, True), (EXPERTS, (4, ("--experts", 4, "--expert", 4)), True)],
    ids=str,
)
def test_own_checkpoints(saved: Any, restored: Any, asynchronous: bool, memory: Path, tmp_path: Path) -> None:
    """``dist_checkpointing.save`` and ``load``, after all ranks were killed, in another layout."""
    way = ("--asynchronous",) if asynchronous else ()
    first, second = tmp_path / "first", tmp_path / "second"
    ranks, options = saved
    assert train(first, ranks, tmp_path / "save", first, "--own", "save", *way, *options) != 0
    assert all((first / f"saved-{rank}").exists() for rank in range(ranks)), "it died too early"
    ranks, options = restored
    assert train(second, ranks, tmp_path / "save", second, "--own", "load", *way, *options) == 0
    before, after = (whole(tmp_path / "save", tmp_path / f"out-{step}", step) for step in (3, 4))
    assert len(before) > 20
    assert before == after
