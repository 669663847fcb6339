"""The real Trainer of Lightning on one and two ranks: killed anywhere it ends as the one that was not killed."""

from __future__ import annotations

import random
import re
import signal
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rekindle.errors import UsageError
from rekindle.integrations.lightning import RekindleCallback
from rekindle.integrations.lightning.closures import run_closure_first
from rekindle.integrations.lightning.packed import Packer
from tests.integrations.environments import REPO, launch, lines, lose_node, needs_lightning

PROGRAM = "train_lightning_callback"
STEPS = {1: 18, 2: 9}
"""Updates by number of ranks, in three epochs."""

End = dict[str, str]

pytestmark = needs_lightning


def train(where: Path, ranks: int, *options: object, root: Path | None = None) -> int:
    """Trains by the plain command: Lightning starts the other ranks. Returns the exit code."""
    where.mkdir(exist_ok=True)
    process = launch(sys.executable, PROGRAM, root or where / "run", "--devices", ranks, *options, where=where)
    try:
        return process.wait(300)
    finally:
        process.kill()


def end_of(*starts: Path) -> End:
    """Returns what the newest start printed at its end, and the log of all of them. Overlaps have to be the same."""
    found: End = {}
    for where in starts:
        printed = lines(where, PROGRAM)
        log = {key: value for key, value in printed.items() if key.startswith("log:")}
        assert {key: found.get(key, log[key]) for key in log} == log
        found |= log
    kept = ("steps:", "weights:", "optimizer:", "schedule:", "newest:")
    return found | {key: value for key, value in printed.items() if key.startswith(kept)}


def began(where: Path) -> int:
    return int(lines(where, PROGRAM)["start:0"].split()[0])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., End]:
    """Returns the end of a training that was not interrupted, and did not know of Rekindle."""

    @cache
    def end(ranks: int, *options: object) -> End:
        where = tmp_path_factory.mktemp("unbroken")
        assert train(where, ranks, *options, "--alone") == 0
        return end_of(where)

    return end


@pytest.mark.timeout(1500)
def test_an_error_in_the_middle_of_an_epoch_and_a_second_fit(memory: Path, tmp_path: Path) -> None:
    step = random.randrange(2, STEPS[1])
    assert train(tmp_path / "all", 1, "--in-one-process", "--die-before", step) == 0, step
    text = (tmp_path / "all" / f"{PROGRAM}-0.out").read_text()
    for what in ("steps", "weights", "optimizer", "schedule", "newest"):
        alone, resumed = re.findall(rf"^{what}:0 (.*)$", text, re.MULTILINE)
        assert alone == resumed, (what, step)
    assert began(tmp_path / "all") == step - 1


@pytest.mark.campaign(seconds=45)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_on_all_ranks(ranks: int, memory: Path, tmp_path: Path, unbroken: Callable[..., End]) -> None:
    """Twice, at random steps; the second start goes on from the first one's."""
    root, broken = tmp_path / "run", sorted(random.sample(range(3, STEPS[ranks] + 1), 2))
    starts = [tmp_path / f"start{number}" for number in range(3)]
    for where, step in zip(starts, broken, strict=False):
        assert train(where, ranks, "--die-before", step, root=root) != 0, broken
    assert train(starts[2], ranks, root=root) == 0, broken
    assert began(starts[2]) in (broken[1] - 1, broken[1] - 2)  # the newest copy may have been under way
    end = unbroken(ranks)
    assert end["steps:0"].startswith(f"[{STEPS[ranks]}, 3,")
    assert end_of(*starts) == end, broken


@pytest.mark.campaign(seconds=30)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("die", [0, 1])
def test_killed_on_one_of_two_ranks(die: int, memory: Path, tmp_path: Path, unbroken: Callable[..., End]) -> None:
    """Rank 0 is the process that was started; it starts rank 1."""
    root, broken = tmp_path / "run", random.randrange(3, STEPS[2] + 1)
    assert train(tmp_path / "broken", 2, "--die-before", broken, "--die-rank", die, root=root) != 0, broken
    assert train(tmp_path / "resumed", 2, root=root) == 0, broken
    assert end_of(tmp_path / "broken", tmp_path / "resumed") == unbroken(2), broken


@pytest.mark.campaign(seconds=50)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("die", [["--die-rank", 1], []], ids=["one", "all"])
@pytest.mark.parametrize("strategy", ["fsdp", "model_parallel"])
def test_killed_with_sharded_weights(
    strategy: str, die: list[object], memory: Path, tmp_path: Path, unbroken: Callable[..., End]
) -> None:
    """Lightning's own strategies, whose shards have no copy: a step that a dead rank had not secured is made again."""
    root, broken, options = tmp_path / "run", random.randrange(4, STEPS[2] + 1), ("--strategy", strategy)
    assert train(tmp_path / "broken", 2, "--die-before", broken, *die, *options, root=root) != 0, broken
    assert train(tmp_path / "resumed", 2, *options, root=root) == 0, broken
    assert began(tmp_path / "resumed") in (broken - 1, broken - 2)
    assert end_of(tmp_path / "broken", tmp_path / "resumed") == unbroken(2, *options), broken


@pytest.mark.campaign(seconds=20)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "options",
    [
        ("--manual",),
        ("--workers", 2),
        ("--workers", 2, "--persistent"),
        ("--iterable",),
        ("--max-steps", 14),
    ],
    ids=str,
)
def test_killed_in_other_trainings(
    options: tuple[object, ...], memory: Path, tmp_path: Path, unbroken: Callable[..., End]
) -> None:
    root, broken = tmp_path / "run", random.randrange(3, 14)
    broken += broken % 2 if "--manual" in options else 0  # two updates for each batch: before the second one
    assert train(tmp_path / "broken", 1, "--die-before", broken, *options, root=root) != 0, broken
    assert train(tmp_path / "resumed", 1, *options, root=root) == 0, broken
    assert end_of(tmp_path / "broken", tmp_path / "resumed") == unbroken(1, *options), broken


@pytest.mark.campaign(seconds=20)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("epochs", ["max_epochs", "max_steps"])
def test_killed_where_an_epoch_ends(epochs: str, memory: Path, tmp_path: Path, unbroken: Callable[..., End]) -> None:
    """The first update of an epoch is not made any more: the state is that of the end of the one before."""
    root, options = tmp_path / "run", ["--max-steps", 16] if epochs == "max_steps" else []
    assert train(tmp_path / "broken", 1, "--die-before", 7, *options, root=root) != 0
    assert train(tmp_path / "resumed", 1, *options, root=root) == 0
    assert end_of(tmp_path / "broken", tmp_path / "resumed") == unbroken(1, *options)


@pytest.mark.campaign(seconds=20)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("step", "options"), [(7, ("--die-before", 8, "--die-validating")), (8, ("--die-before", 9))])
def test_killed_in_a_validation_and_behind_it(
    step: int, options: tuple[object, ...], memory: Path, tmp_path: Path, unbroken: Callable[..., End]
) -> None:
    """A step is secured behind the validation that comes after it, which is not done again."""
    root = tmp_path / "run"
    assert train(tmp_path / "broken", 1, *options, root=root) != 0
    assert train(tmp_path / "resumed", 1, root=root) == 0
    assert began(tmp_path / "resumed") == step
    assert end_of(tmp_path / "broken", tmp_path / "resumed") == unbroken(1)


@pytest.mark.campaign(seconds=25)
@pytest.mark.timeout(1500)
def test_a_run_that_is_over_is_not_trained_on(memory: Path, tmp_path: Path, unbroken: Callable[..., End]) -> None:
    """Nor is one that a callback has stopped, whose state a restart does not reset."""
    root, options = tmp_path / "run", ("--patience", 1)
    assert train(tmp_path / "broken", 1, "--die-before", 3, *options, root=root) != 0
    for start in ("first", "second"):
        assert train(tmp_path / start, 1, *options, root=root) == 0
    end = unbroken(1, *options)
    assert not end["steps:0"].startswith(f"[{STEPS[1]},"), "nothing stopped it"
    assert end_of(tmp_path / "broken", tmp_path / "first") == end
    assert end_of(tmp_path / "second") == {key: value for key, value in end.items() if not key.startswith("log:")}


@pytest.mark.campaign(seconds=40)
@pytest.mark.timeout(1500)
def test_the_newer_one_of_a_checkpoint_of_lightnings_own_and_the_root(memory: Path, tmp_path: Path) -> None:
    root, own = tmp_path / "run", tmp_path / "own"
    assert train(tmp_path / "one", 1, "--die-before", 5, root=root) != 0
    assert train(tmp_path / "older", 1, "--ckpt-path", own / "step=3.ckpt", "--die-before", 6, root=root) != 0
    text = (tmp_path / "older" / f"{PROGRAM}-0.out").read_text()
    assert re.search(r"step=3.ckpt is of step 3, and the newest checkpoint in .* of step 4: .* the latter", text)
    assert train(tmp_path / "alone", 1, "--alone", "--die-before", 10, root=root) != 0
    assert train(tmp_path / "newer", 1, "--ckpt-path", own / "step=9.ckpt", root=root) == 0
    text = (tmp_path / "newer" / f"{PROGRAM}-0.out").read_text()
    assert re.search(r"step=9.ckpt is of step 9, and the newest checkpoint in .* of step 5: .* the former", text)
    assert lines(tmp_path / "newer", PROGRAM)["steps:0"].startswith(f"[{STEPS[1]}, 3,")


@pytest.mark.campaign(seconds=15)
@pytest.mark.timeout(1500)
def test_another_batch_size_is_told(memory: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert train(tmp_path / "broken", 1, "--die-before", 3, root=root) != 0
    assert train(tmp_path / "resumed", 1, "--batch", 8, root=root) == 0
    said = (tmp_path / "resumed" / f"{PROGRAM}-0.out").read_text()
    # The newest copy may have been under way.
    assert re.search("an epoch had 11 steps of 4 samples, and has 6 of 8 now. The [24] steps that are done", said), said


@pytest.mark.campaign(seconds=25)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [1, 2])
def test_told_to_go(ranks: int, memory: Path, tmp_path: Path, unbroken: Callable[..., End]) -> None:
    """Within 30 s of grace the step is on storage: the node is lost then. The exit code is that of the signal."""
    root, broken = tmp_path / "run", random.randrange(3, STEPS[ranks] + 1)
    die = ["--die-before", broken, "--die-rank", 0, "--signal", "TERM"]
    assert train(tmp_path / "broken", ranks, *die, root=root) == 128 + signal.SIGTERM
    lose_node(memory)
    assert train(tmp_path / "resumed", ranks, root=root) == 0
    step, place = lines(tmp_path / "resumed", PROGRAM)["start:0"].split()
    assert place == "storage" and int(step) >= broken - 1, "steps take milliseconds: some more may be made by then"
    assert end_of(tmp_path / "broken", tmp_path / "resumed") == unbroken(ranks), broken


class Quick(NamedTuple):
    """What a short training on three batches an epoch gave."""

    trainer: Any
    callback: RekindleCallback
    warnings: list[str]


def fit(where: Path, *callbacks: Any, ckpt_path: Path | None = None, **options: Any) -> Quick:
    """Trains in this process, with a root below ``where``."""
    import lightning
    from lightning.pytorch.demos.boring_classes import BoringModel

    callback = RekindleCallback(where / "run")
    given = {"max_epochs": 2, "limit_train_batches": 3, "logger": False, **options}
    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=where,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, *callbacks],
        **given,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(BoringModel(), ckpt_path=ckpt_path)
    return Quick(trainer, callback, [str(one.message) for one in caught])


def failing_at(step: int) -> Any:
    from lightning.pytorch.callbacks import Callback

    class Failing(Callback):
        def on_train_batch_start(self, trainer: Any, *others: Any) -> None:
            if trainer.global_step == step:
                raise RuntimeError("as a test wants it")

    return Failing()


def test_a_start_that_trains_nothing_is_told(memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a run that is over; not where there is no data."""
    fit(tmp_path)
    fit(tmp_path, limit_train_batches=0)
    assert "is over" not in caplog.text
    fit(tmp_path)
    assert f"the run in {tmp_path / 'run'} is over: it ended at step 6" in caplog.text
    assert caplog.text.count("is over") == 1


def test_lightnings_word_of_a_place_that_is_lost_is_shown_where_it_is(memory: Path, tmp_path: Path) -> None:
    """The root has the place in the data; Lightning's own checkpoints have not."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    lost = "You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not resumable"
    own = ModelCheckpoint(tmp_path / "own", "{step}", every_n_train_steps=2)
    with pytest.raises(RuntimeError, match="as a test wants it"):
        fit(tmp_path, own, failing_at(2))
    resumed = fit(tmp_path)
    assert resumed.callback.checkpointer is not None
    assert resumed.callback.checkpointer.metrics.restored_step == 2
    assert not [text for text in resumed.warnings if lost in text]
    of_its_own = fit(tmp_path / "other", ckpt_path=tmp_path / "own" / "step=2.ckpt")
    assert [text for text in of_its_own.warnings if lost in text]


def test_the_best_of_model_checkpoint_comes_back_in_a_directory_of_its_own(memory: Path, tmp_path: Path) -> None:
    """In that of a logger's version, which is a new one at each start, Lightning says that it does not."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    for directory in (None, tmp_path / "best"):
        where, found = tmp_path / str(directory is None), []
        for failing in (True, False):
            own = ModelCheckpoint(directory, monitor="step", mode="max", every_n_train_steps=2)
            if failing:
                with pytest.raises(RuntimeError, match="as a test wants it"):
                    fit(where, own, failing_at(3), logger=True)
            else:
                resumed = fit(where, own, logger=True, max_steps=3)
            found.append(own.best_k_models)
        said = [text for text in resumed.warnings if "The dirpath has changed" in text]
        assert (found[1] == found[0], len(said)) == ((False, 1) if directory is None else (True, 0))


def test_two_callbacks_are_refused(memory: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this trainer has two RekindleCallbacks"):
        fit(tmp_path, RekindleCallback(tmp_path / "second"))
    assert not (tmp_path / "run").exists()


def test_an_unknown_setting_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no setting keep_evry; did you mean keep_every"):
        RekindleCallback(tmp_path / "run", keep_evry=2)


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end"])
def test_a_callback_that_is_added_within_a_training_is_refused(hook: str, memory: Path, tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.demos.boring_classes import BoringModel

    def add(trainer: Any, *others: Any) -> None:
        trainer.callbacks.append(RekindleCallback(tmp_path / "run"))

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        callbacks=[LambdaCallback(**{hook: add})],
    )
    with pytest.raises(UsageError, match="added to the trainer when fit"):
        trainer.fit(BoringModel())


def test_a_trial_run_leaves_the_root_alone(memory: Path, tmp_path: Path) -> None:
    fit(tmp_path, fast_dev_run=True)
    assert not (tmp_path / "run").exists()


def test_packed_tensors_come_back_as_they_were() -> None:
    packer = Packer(torch.device("cpu"), allow_pickle=False)
    tree = {
        "of all kinds": [torch.tensor(1.5), torch.tensor([True, False, True]), torch.arange(6).reshape(2, 3)],
        "half": (torch.tensor([1.0, -2.0], dtype=torch.bfloat16), torch.empty(0), None),
        "many": torch.arange(5000.0, dtype=torch.float64),
        7: {"nothing": float("nan"), "bytes": b"\0"},
    }
    text, packed = packer.pack(tree)
    packed = packed.clone()
    packer.pack({"something else": torch.ones(9)})
    found = packer.unpack(text, packed)
    assert repr(found) == repr(tree)
    assert torch.equal(found["many"], tree["many"])  # type: ignore[arg-type]


def test_both_passes_run_before_what_waits_for_an_update() -> None:
    """The weights that come of it are the same to the bit; an optimizer that calls its closure again is left alone."""
    ends, calls = [], list[str]()
    for first in (True, False):
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        if first:
            assert run_closure_first(optimizer) is not None
            optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))

        def closure(layer: torch.nn.Linear = layer, optimizer: torch.optim.Adam = optimizer) -> torch.Tensor:
            calls.append("closure")
            optimizer.zero_grad()
            loss = layer(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure), optimizer.step(closure=closure), optimizer.step()]
        assert losses.pop() is None
        ends.append([*losses, layer.weight])
    assert calls == ["closure", "hook", "closure", "hook", "hook", "closure", "closure"]
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    assert run_closure_first(torch.optim.LBFGS(layer.parameters())) is None


def test_lines_that_a_user_adds() -> None:
    """Two: the import, and the callback."""
    script = (REPO / "examples/train_lightning.py").read_text()
    code = [line.strip() for line in script.split('"""')[2].splitlines() if "rekindle" in line.lower()]
    assert code == [
        "from rekindle.integrations.lightning import RekindleCallback",
        "RekindleCallback(root),",
    ]
