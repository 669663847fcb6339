"""The real Trainer on one and two ranks: killed anywhere it ends as the run that was not, by the same command."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from rekindle.faults.torchelastic import SURVIVOR_EXIT
from tests.integrations.environments import REPO, environment, lines, lose_node, ranks_of

PROGRAM = "train_transformers"
STEPS = {1: 22, 2: 12}
"""Updates by number of ranks, in two epochs."""

End = list[dict[str, str]]


def train(where: Path, ranks: int, *options: object, root: Path | None = None) -> list[int]:
    """Trains on that many ranks. Returns their exit codes."""
    where.mkdir(exist_ok=True)
    root = root or where / "run"
    return ranks_of(ranks, environment("transformers"), PROGRAM, root, root.parent / "own", *options, where=where)


def end_of(where: Path, ranks: int) -> End:
    """Returns what each rank printed at its end, but for the step that it began with."""
    found = [lines(where, PROGRAM, rank) for rank in range(ranks)]
    kept = ("weights", "optimizer", "schedule", "log", "train_loss", "callbacks")
    return [{key: printed[key] for key in kept} for printed in found]


def began(where: Path) -> int:
    return int(lines(where, PROGRAM)["start"].split()[0])


def told_to_be_over(where: Path, step: int) -> int:
    """Returns how often a start warned that nothing is left to train."""
    said = (where / f"{PROGRAM}-0.out").read_text()
    return said.count(f"is over: it ended at step {step}, and this start trains nothing")


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
def test_killed_on_all_ranks(ranks: int, memory: Path, tmp_path: Path, unbroken: Callable[..., End]) -> None:
    """Twice, at random steps; the second start goes on from the first one's."""
    root, broken = tmp_path / "run", sorted(random.sample(range(2, STEPS[ranks]), 2))
    for number, step in enumerate(broken):
        codes = train(tmp_path / f"broken{number}", ranks, "--die-before", step, root=root)
        assert 0 not in codes, broken
    assert train(tmp_path / "resumed", ranks, root=root) == [0] * ranks, broken
    assert began(tmp_path / "resumed") == broken[1] - 1
    end = unbroken(ranks)
    assert int(end[0]["train_loss"].split()[1]) == STEPS[ranks]
    assert end_of(tmp_path / "resumed", ranks) == end, broken


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "options",
    [(), ("--unseeded",), ("--workers", 2), ("--trainer", "mixin"), ("--trainer", "sft"), ("--lora",)],
    ids=str,
)
def test_killed_on_one_of_two_ranks(
    options: tuple[object, ...], memory: Path, tmp_path: Path, unbroken: Callable[..., End]
) -> None:
    root, broken = tmp_path / "run", random.randrange(2, STEPS[2])
    train(tmp_path / "broken", 2, "--die-before", broken, "--die-rank", 1, *options, root=root)
    assert train(tmp_path / "resumed", 2, "--resume", *options, root=root) == [0, 0], broken
    assert end_of(tmp_path / "resumed", 2) == unbroken(2, *options), broken


@pytest.mark.timeout(1500)
def test_killed_with_data_without_a_length(memory: Path, tmp_path: Path, unbroken: Callable[..., End]) -> None:
    root, options, broken = tmp_path / "run", ("--stream", "--max-steps", 15), random.randrange(2, 15)
    assert 0 not in train(tmp_path / "broken", 1, "--die-before", broken, *options, root=root)
    assert train(tmp_path / "resumed", 1, *options, root=root) == [0], broken
    assert began(tmp_path / "resumed") == broken - 1
    assert end_of(tmp_path / "resumed", 1) == unbroken(1, *options), broken


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("where", ["the last update of an epoch", "the evaluation behind an epoch"])
def test_killed_where_an_epoch_ends(where: str, memory: Path, tmp_path: Path, unbroken: Callable[..., End]) -> None:
    """A step is secured behind what the Trainer does at an epoch's end, or that would be left out of the log."""
    root = tmp_path / "run"
    die = ["--die-before", 11, *(["--die-evaluating"] if "evaluation" in where else [])]
    assert 0 not in train(tmp_path / "broken", 1, "--strategy", "epoch", *die, root=root)
    assert train(tmp_path / "resumed", 1, "--strategy", "epoch", root=root) == [0]
    assert end_of(tmp_path / "resumed", 1) == unbroken(1, "--strategy", "epoch")


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("options", "steps"), [(("--max-steps", 15), 15), ((), STEPS[1])], ids=["midway", "epoch"])
def test_a_run_that_is_over_is_not_trained_on(
    options: tuple[object, ...], steps: int, memory: Path, tmp_path: Path, unbroken: Callable[..., End]
) -> None:
    """Where its last step lies within an epoch the Trainer itself would train one step more of that. It is told."""
    root = tmp_path / "run"
    for start in ("first", "second"):
        assert train(tmp_path / start, 1, *options, "--resume", root=root) == [0]
    assert began(tmp_path / "second") == steps
    first, second = (end_of(tmp_path / start, 1) for start in ("first", "second"))
    assert first == second == unbroken(1, *options)
    assert [told_to_be_over(tmp_path / start, steps) for start in ("first", "second")] == [0, 1]


@pytest.mark.timeout(1500)
def test_stopped_early_by_a_callback_that_a_restart_does_not_reset(
    memory: Path, tmp_path: Path, unbroken: Callable[..., End]
) -> None:
    root, options = tmp_path / "run", ("--patience", 2)
    assert 0 not in train(tmp_path / "broken", 1, "--die-before", 10, *options, root=root)
    assert train(tmp_path / "resumed", 1, *options, root=root) == [0]
    end = unbroken(1, *options)
    steps = int(end[0]["train_loss"].split()[1])
    assert steps < STEPS[1], "nothing stopped it"
    assert end_of(tmp_path / "resumed", 1) == end
    assert train(tmp_path / "again", 1, *options, root=root) == [0]
    assert [told_to_be_over(tmp_path / start, steps) for start in ("resumed", "again")] == [0, 1]


@pytest.mark.timeout(1500)
def test_a_newer_checkpoint_of_the_trainers_own_is_taken(
    memory: Path, tmp_path: Path, unbroken: Callable[..., End]
) -> None:
    root = tmp_path / "run"
    assert 0 not in train(tmp_path / "one", 1, "--die-before", 4, root=root)
    assert 0 not in train(tmp_path / "alone", 1, "--alone", "--die-before", 10, root=root)
    assert train(tmp_path / "resumed", 1, "--resume", root=root) == [0]
    text = (tmp_path / "resumed" / f"{PROGRAM}-0.out").read_text()
    assert re.search(r"checkpoint-8 is of step 8, and the newest checkpoint in .* of step 3", text)
    assert end_of(tmp_path / "resumed", 1)[0]["schedule"] == unbroken(1)[0]["schedule"]


@pytest.mark.timeout(1500)
def test_another_batch_size_is_told(memory: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert 0 not in train(tmp_path / "broken", 1, "--die-before", 8, root=root)
    assert train(tmp_path / "resumed", 1, "--batch", 4, root=root) == [0]
    said = (tmp_path / "resumed" / f"{PROGRAM}-0.out").read_text()
    # The newest copy may have been under way.
    assert re.search("an epoch had 11 steps of 4 samples, and has 6 of 8 now. The [67] steps that are done", said), said


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [1, 2])
def test_told_to_go(ranks: int, memory: Path, tmp_path: Path, unbroken: Callable[..., End]) -> None:
    """Within 30 s of grace the step is on storage: the node is lost then. The exit code is that of the signal."""
    root, broken = tmp_path / "run", random.randrange(2, STEPS[ranks])
    die = ["--die-before", broken, "--die-rank", 0, "--signal", "TERM"]
    codes = train(tmp_path / "broken", ranks, *die, root=root)
    assert codes == [128 + signal.SIGTERM, SURVIVOR_EXIT][:ranks]
    lose_node(memory)
    assert train(tmp_path / "resumed", ranks, root=root) == [0] * ranks
    assert lines(tmp_path / "resumed", PROGRAM)["start"] in (f"{broken - 1} storage", f"{broken} storage")
    assert end_of(tmp_path / "resumed", ranks) == unbroken(ranks), broken


@pytest.mark.timeout(1500)
def test_told_to_go_before_the_first_update(memory: Path, tmp_path: Path, unbroken: Callable[..., End]) -> None:
    """The restored step is secured again as it was, though the trainer has its counters at zero then."""
    root = tmp_path / "run"
    assert 0 not in train(tmp_path / "broken", 1, "--die-before", 9, root=root)
    assert train(tmp_path / "told", 1, "--end-at-start", root=root) == [128 + signal.SIGTERM]
    assert train(tmp_path / "resumed", 1, root=root) == [0]
    assert end_of(tmp_path / "resumed", 1) == unbroken(1)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--set", "enable_jit_checkpoint"), "TrainingArguments.enable_jit_checkpoint can't be had with Rekindle"),
        (("--set", "auto_find_batch_size"), "TrainingArguments.auto_find_batch_size can't be had with Rekindle"),
        (("--own-loop",), "OwnLoop has a training loop of its own"),
        (("--twice",), "this trainer is attached already"),
        (("--attach-late",), "attach before train(): this trainer trains already"),
        (("--misspelt",), "rekindle.Checkpointer has no setting keep_evry; did you mean keep_every?"),
    ],
)
def test_what_can_not_be_had_is_refused_by_name(options: tuple[str, ...], told: str, tmp_path: Path) -> None:
    assert train(tmp_path / "run", 1, *options) == [1]
    assert f"UsageError: {told}" in (tmp_path / "run" / f"{PROGRAM}-0.out").read_text()


def test_lines_that_a_user_adds() -> None:
    """One, and its import."""
    script = (REPO / "examples/train_transformers.py").read_text()
    code = [line for line in script.split('"""')[2].splitlines() if "rekindle" in line or "attach" in line]
    assert [line.split("(")[0].strip() for line in code] == [
        "from rekindle.integrations.transformers import attach",
        "attach",
    ]
