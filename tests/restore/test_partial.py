"""``restore(partial=...)``: what fits is loaded, what doesn't stays; what loads nothing is no restore."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rekindle
from tests.faults.harness import wait_for
from tests.test_checkpointer import Training


@pytest.fixture
def saved(root: Path, memory: Path) -> Training:
    """Step 1 of a model with a head of 3, its optimizer, and values that nobody has any more."""
    training = Training()
    model = torch.nn.Sequential(training.model, torch.nn.Linear(8, 3))
    ckpt = rekindle.Checkpointer(
        root, {"model": model, "optimizer": training.optimizer, "old": rekindle.Values(a=1)}, rng=False
    )
    ckpt.restore()
    training.update()
    ckpt.step(1)
    ckpt.close()
    return training


def changed() -> tuple[Training, torch.nn.Module]:
    again = Training()
    torch.nn.init.zeros_(again.model.weight)
    return again, torch.nn.Sequential(again.model, torch.nn.Linear(8, 5), torch.nn.Linear(5, 1))


def test_what_does_not_fit_is_left_as_it_is_and_all_of_it_stands_in_one_table(
    saved: Training, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    again, new = changed()
    head = new[1].weight.detach().clone()
    ckpt = rekindle.Checkpointer(root, {"model": new, "optimizer": again.optimizer}, rng=False)
    with pytest.raises(rekindle.StateMismatchError, match=r"model\.1\.weight.*restore\(partial=True\)"):
        ckpt.restore()
    assert torch.equal(again.model.weight, torch.zeros(8, 8))
    assert ckpt.restore(partial=True) == 1
    ckpt.close()
    assert torch.equal(again.model.weight, saved.model.weight) and torch.equal(new[1].weight, head)
    tables = [record.getMessage() for record in caplog.records if "in part" in record.getMessage()]
    assert tables == [
        "step 1 was restored in part:\n"
        "  model      1 of 5 loaded\n"
        "  optimizer  1 of 1 loaded\n"
        "  left as it was (4):\n"
        "    model.1.bias: live float32[5], saved float32[3]\n"
        "    model.1.weight: live float32[5, 8], saved float32[3, 8]\n"
        "    model.2.bias\n"
        "    model.2.weight\n"
        "  skipped, not in the live state (1):\n"
        "    'old'"
    ]


def test_parts_that_are_not_named_are_left_as_they_are(
    saved: Training, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    again, new = changed()
    state = {"model": new, "optimizer": again.optimizer, "progress": rekindle.Values(epoch=7)}
    ckpt = rekindle.Checkpointer(root, state)
    assert ckpt.restore(partial=["model"]) == 1
    assert torch.equal(again.model.weight, saved.model.weight)
    assert not again.optimizer.state and state["progress"].epoch == 7  # type: ignore[attr-defined]
    assert "  progress   left as it was, because partial= doesn't name it\n" in caplog.text
    for names in ("model ", ["model", "head"], []):
        with pytest.raises(rekindle.UsageError, match="names of parts of the state, which are 'model', 'opt"):
            ckpt.restore(partial=names)
    ckpt.close()


def test_a_part_of_which_nothing_is_loaded_is_an_error_before_anything_is(saved: Training, root: Path) -> None:
    again, new = changed()
    wrong = {"net": new, "optimizer": again.optimizer}
    ckpt = rekindle.Checkpointer(root, wrong, rng=False)
    with pytest.raises(rekindle.StateMismatchError) as caught:
        ckpt.restore(partial=True)
    assert str(caught.value) == (
        "nothing of 'net' can be loaded from the checkpoint of step 1, which has 'model', 'old', 'optimizer': "
        "restore(partial=['optimizer']) loads these parts and leaves the others as they are"
    )
    assert torch.equal(again.model.weight, torch.zeros(8, 8)) and not again.optimizer.state
    ckpt.close()
    assert sorted(path.name for path in root.glob("step-*")) == ["step-0000000001"]
    ckpt = rekindle.Checkpointer(root, {"model": torch.nn.Linear(2, 2)}, rng=False)
    with pytest.raises(rekindle.StateMismatchError, match=r"nothing of 'model' .*restore\(step=0\) starts anew"):
        ckpt.restore(partial=True)  # all of its names are there, and none of its shapes
    ckpt.close()


@pytest.mark.parametrize("all_loaded", [False, True])
def test_what_was_loaded_in_part_only_is_not_pruned(saved: Training, root: Path, all_loaded: bool) -> None:
    again = Training()
    state: dict[str, object] = {
        "model": torch.nn.Sequential(again.model, torch.nn.Linear(8, 3), *([torch.nn.Linear(3, 3)] * all_loaded)),
        "optimizer": again.optimizer,
    }
    if all_loaded:
        state["old"] = rekindle.Values()
    with rekindle.Checkpointer(root, state, rng=False, keep=1) as ckpt:
        assert ckpt.restore(partial=True) == 1
        for step in (2, 3):
            again.update()
            ckpt.save(step, wait="durable", pin=False, timeout=60)
        assert {one.step for one in ckpt.checkpoints() if one.durable} >= ({3} if all_loaded else {1, 3})
    wait_for(
        lambda: sorted(int(path.name[5:]) for path in root.glob("step-*")) == ([3] if all_loaded else [1, 3]),
        what="retention",
    )


def test_a_table_is_bounded(root: Path, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    def wide(number: int) -> torch.nn.Module:
        return torch.nn.ParameterDict(
            {"same": torch.zeros(1)} | {f"{number}-{i:03}": torch.zeros(1) for i in range(99)}
        )

    ckpt = rekindle.Checkpointer(root, {"model": wide(1)})
    ckpt.restore()
    ckpt.step(1)
    ckpt.close()
    ckpt = rekindle.Checkpointer(root, {"model": wide(2)})
    assert ckpt.restore(partial=True) == 1
    ckpt.close()
    table = next(record.getMessage() for record in caplog.records if "in part" in record.getMessage())
    assert table.count("\n") < 40 and table.count("    and 87 more") == 2 and "1 of 100 loaded" in table


def test_the_old_name_still_works_and_says_so(saved: Training, root: Path) -> None:
    again, new = changed()
    ckpt = rekindle.Checkpointer(root, {"model": new, "optimizer": again.optimizer}, rng=False)
    with pytest.warns(DeprecationWarning, match=r"restore\(partial=True\)"):
        assert ckpt.restore(strict=False) == 1
    ckpt.close()
