"""Real Accelerate on one and two ranks: killed anywhere a loop ends as the one that was not, by the same command."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.integrations.environments import REPO, environment, lines, ranks_of

PROGRAM = "train_accelerate"
STEPS = {1: 33, 2: 18}
"""Updates by number of ranks, in three epochs."""

End = list[dict[str, str]]


def train(where: Path, ranks: int, *options: object, root: Path | None = None) -> list[int]:
    """Trains on that many ranks. Returns their exit codes."""
    where.mkdir(exist_ok=True)
    return ranks_of(ranks, environment("transformers"), PROGRAM, root or where / "run", *options, where=where)


def end_of(where: Path, ranks: int) -> End:
    """Returns what each rank printed at its end."""
    found = [lines(where, PROGRAM, rank) for rank in range(ranks)]
    return [{key: one[key] for key in ("steps", "weights", "optimizer", "schedule", "losses")} for one in found]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., End]:
    """Returns the end of a training that was not interrupted, and did not know of Rekindle."""

    @cache
    def end(ranks: int, *options: object) -> End:
        where = tmp_path_factory.mktemp("unbroken")
        assert train(where, ranks, *options, "--alone") == [0] * ranks
        return end_of(where, ranks)

    return end


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("options", [(), ("--unseeded",), ("--workers", 2), ("--iterable",), ("--lora",)], ids=str)
def test_killed_on_all_ranks(
    ranks: int, options: tuple[object, ...], memory: Path, tmp_path: Path, unbroken: Callable[..., End]
) -> None:
    """Twice, at random steps; the second start goes on from the first one's."""
    root, broken = tmp_path / "run", sorted(random.sample(range(4, STEPS[ranks]), 2))
    for number, step in enumerate(broken):
        codes = train(tmp_path / f"broken{number}", ranks, "--die-before", step, *options, root=root)
        assert 0 not in codes, broken
    assert train(tmp_path / "resumed", ranks, *options, root=root) == [0] * ranks, broken
    start = int(lines(tmp_path / "resumed", PROGRAM)["start"].split()[0])
    assert start in (broken[1] - 1, broken[1] - 2)  # the newest copy may have been under way
    end = unbroken(ranks, *options)
    assert int(end[0]["steps"]) == STEPS[ranks]
    assert end_of(tmp_path / "resumed", ranks) == end, broken


@pytest.mark.timeout(1500)
def test_killed_on_one_of_two_ranks(memory: Path, tmp_path: Path, unbroken: Callable[..., End]) -> None:
    root, broken = tmp_path / "run", random.randrange(4, STEPS[2])
    train(tmp_path / "broken", 2, "--die-before", broken, "--die-rank", 1, root=root)
    assert train(tmp_path / "resumed", 2, root=root) == [0, 0], broken
    assert end_of(tmp_path / "resumed", 2) == unbroken(2), broken


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("step", [11, 12, 13])
def test_killed_where_an_epoch_ends(step: int, memory: Path, tmp_path: Path, unbroken: Callable[..., End]) -> None:
    """Before the last update of an epoch, and behind it: what the loop does after an epoch is done in any case."""
    root = tmp_path / "run"
    assert 0 not in train(tmp_path / "broken", 1, "--die-before", step, root=root)
    assert train(tmp_path / "resumed", 1, root=root) == [0]
    assert end_of(tmp_path / "resumed", 1) == unbroken(1)


@pytest.mark.timeout(1500)
def test_another_batch_size_is_told(memory: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert 0 not in train(tmp_path / "broken", 1, "--die-before", 5, root=root)
    assert train(tmp_path / "resumed", 1, "--batch", 4, root=root) == [0]
    said = (tmp_path / "resumed" / f"{PROGRAM}-0.out").read_text()
    # The newest copy may have been under way.
    assert re.search("had 22 steps of 2 samples, and has 11 of 4 now. The [68] steps that are done", said), said


@pytest.mark.timeout(300)
def test_what_comes_after_the_checkpointer_is_refused_by_name(memory: Path, tmp_path: Path) -> None:
    """But for a loader, which may be one of evaluation: one warning."""
    assert train(tmp_path / "run", 1, "--late") == [0]
    said = (tmp_path / "run" / f"{PROGRAM}-0.out").read_text()
    assert said.count("a DataLoaderShard was prepared after checkpointer()") == 1, said
    assert "saved 3" in said
    names = "model (Linear), optimizer (AcceleratedOptimizer), scheduler (AcceleratedScheduler), custom (Seen)"
    told = f"late prepared or registered after checkpointer(), so not saved, and lost at a restart: {names}. Call"
    assert said.count(told) == 3, said


@pytest.mark.timeout(300)
def test_a_step_that_holds_gradients_back_is_refused(memory: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "run", 1, "--every-batch") == [1]
    said = (tmp_path / "run" / f"{PROGRAM}-0.out").read_text()
    assert "UsageError: step() where accumulate() holds gradients back" in said, said


def test_lines_that_a_user_adds() -> None:
    """Four and their import, and one that is changed."""
    script = (REPO / "examples/train_accelerate.py").read_text().split('"""')[2]
    code = [line.strip() for line in script.splitlines() if "rekindle" in line or "ckpt" in line]
    assert len(code) == 5 and code[0].startswith("from rekindle"), code
    assert script.count("range(loader.iteration, EPOCHS)") == script.count("loader.iteration") == 1
