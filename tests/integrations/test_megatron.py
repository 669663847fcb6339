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

STEPS, BROKEN = 8, 5
"""Updates, and the one in which a rank dies."""

DATA, TENSOR, PIPELINE = (2, ()), (2, ("--tensor", 2)), (2, ("--pipeline", 2))
EXPERTS = (2, ("--experts", 4, "--expert", 2))
COPIES = (2, ("--instances", 2))
FOUR = [
    (4, ("--tensor", 2, "--instances", 2)),
    (4, ("--pipeline", 2, "--instances", 2)),
    (4, ("--experts", 4, "--expert", 2, "--instances", 2)),
]
"""Ranks, and options of the program. The last three have a copy of each shard on another rank."""
POINTS = ("forward", "backward", "reduce", "update", "before-step", "after-step")


def train(where: Path, ranks: int, *options: object, restarts: int = 0) -> int:
    """Trains under torchrun, to the end. Returns torchrun's exit code."""
    where.mkdir(exist_ok=True)
    python = environment("megatron")
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with open(where / "out", "a", encoding="utf-8") as out:
        launcher = subprocess.Popen(
            [*command, f"--max-restarts={restarts}", str(PROGRAMS / "train_megatron.py"), *map(str, options)],
            env={**os.environ, "PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=where,
        )
    try:
        return launcher.wait(300)
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


def broken(where: Path, ranks: int, *options: object, rank: int, point: str) -> list[dict[str, Any]]:
    """Returns the ends of a training in which a rank was killed, and the launcher has started all of them again."""
    die = ("--die-at", BROKEN, "--die-in", point, "--die-rank", rank, "--steps", STEPS)
    assert train(where, ranks, where / "run", where, *die, *options, restarts=1) == 0
    assert (where / f"died-{rank}").read_text() == f"{BROKEN} {point}"
    return ends(where, ranks)


def check_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["end"] == theirs["end"]
        assert ours["losses"].items() <= theirs["losses"].items()


@pytest.mark.campaign(seconds=60)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", [DATA, TENSOR, PIPELINE, EXPERTS], ids=str)
def test_killed_at_any_point(
    kind: Any, point: str, memory: Path, tmp_path: Path, unbroken: Callable[..., list[dict[str, Any]]]
) -> None:
    """No completed step is lost: small shards are in memory when ``step()`` returns."""
    ranks, options = kind
    found = broken(tmp_path, ranks, *options, rank=ranks - 1, point=point)
    assert {end["start"] for end in found} == {BROKEN if point == "after-step" else BROKEN - 1}
    check_same(found, unbroken(ranks, *options))


_NEVER = ("--settings", json.dumps({"snapshot_every": 10**9}))
"""Leaves memory without a snapshot: what is found there after a fault comes of the fault."""


@pytest.mark.campaign(seconds=100)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("point", ["forward", "update"])
@pytest.mark.parametrize("kind", FOUR, ids=str)
def test_a_copy_stands_in_for_a_dead_rank(
    kind: Any, point: str, rank: int, memory: Path, tmp_path: Path, unbroken: Callable[..., list[dict[str, Any]]]
) -> None:
    """Nothing is saved before the fault: the step under way comes back from the ranks that live."""
    ranks, options = kind
    found = broken(tmp_path, ranks, *options, *_NEVER, rank=rank, point=point)
    starts = {end["start"] for end in found}
    assert starts == {BROKEN - 1} or (point == "update" and starts == {BROKEN})  # all others may have completed it
    check_same(found, unbroken(ranks, *options))


@pytest.mark.timeout(900)
def test_gathers_during_the_forward_pass(
    memory: Path, tmp_path: Path, unbroken: Callable[..., list[dict[str, Any]]]
) -> None:
    """With ``overlap_param_gather`` the weights of a step are not final when it is saved."""
    found = broken(tmp_path, 2, "--overlap", rank=0, point="forward")
    assert {end["start"] for end in found} == {BROKEN - 1}
    check_same(found, unbroken(2, "--overlap"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("saved", "restored"),
    [(TENSOR, PIPELINE), (PIPELINE, DATA), (DATA, TENSOR), ((2, ("--instances", 2)), (4, ("--tensor", 2)))],
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
    assert {end["start"] for end in ends(second, ranks)} == {3}
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("saved", "restored"), [(TENSOR, PIPELINE), (DATA, DATA), (EXPERTS, (4, ("--experts", 4)))], ids=str
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
