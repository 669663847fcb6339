"""Torchtitan's real trainer on one and two ranks: killed anywhere it ends as the run that was not, by its command."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.posix import PosixStore
from tests.conftest import Disk
from tests.faults.harness import end_agent, wait_for
from tests.integrations.environments import PROGRAMS, REPO, environment

PROGRAM = PROGRAMS / "train_torchtitan.py"
LONG = 240.0
"""Seconds that a training may take on processors that have other work."""
JOB = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment of a training. With the last one restarted ranks never meet the addresses of dead ones."""
STEPS = 14
"""Updates: more than one epoch, in the middle of which the last one ends. Steps 1, 4, 8 and 12 are validated."""

KINDS = [(1, ()), (2, ()), (2, ("--replicate",))]
"""Ranks, and options of the program."""
pytestmark = pytest.mark.timeout(900)
End = tuple[dict[str, Any], dict[str, Any]]


@contextmanager
def launched(
    where: Path, ranks: int, *options: object, root: Path | None = None, restarts: int = 0, **checkpoint: object
) -> Iterator[subprocess.Popen[bytes]]:
    """Trains under torchrun, with further options of the manager, and ends it in any case."""
    where.mkdir(exist_ok=True)
    torchrun = [environment("torchtitan"), "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", str(PROGRAM)]
    given = [root or where / "run", where, "--checkpoint", json.dumps(checkpoint), *options]
    path = ":".join(filter(None, (os.environ.get("PYTHONPATH"), str(REPO / "src"))))
    with open(where / "out", "a", encoding="utf-8") as out:
        launcher = subprocess.Popen(
            [*command, *map(str, given)],
            env={**os.environ, "PYTHONPATH": path, **JOB},
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=where,
        )
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            launcher.terminate()  # it ends its ranks
            launcher.wait(60)


def train(where: Path, ranks: int, *options: object, **more: Any) -> int:
    """Trains to the end. Returns torchrun's exit code."""
    with launched(where, ranks, *options, **more) as launcher:
        return launcher.wait(LONG)


def said(where: Path) -> str:
    return (where / "out").read_text()


def results(where: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((where / f"end-{rank}.json").read_text())
    return found


def losses(where: Path, rank: int = 0) -> dict[str, Any]:
    """Maps each step that was logged, or validated, to its losses. A step that was done again has to have the same."""
    found: dict[str, Any] = {}
    for line in (where / f"losses-{rank}.jsonl").read_text().splitlines():
        kind, step, *values = json.loads(line)
        assert found.setdefault(f"{kind} {step}", values) == values, f"{kind} {step} had other losses before"
    return found


def end_of(where: Path, ranks: int) -> list[End]:
    """Returns what each rank ended with, but for the step that it began with."""
    kept = ("weights", "optimizer", "schedule", "data", "trainer", "random")
    return [({key: results(where, rank)[key] for key in kept}, losses(where, rank)) for rank in range(ranks)]


def took_up(where: Path, broken: Path, ranks: int) -> None:
    """Puts the losses of a run that was broken off before those of the one that goes on from it."""
    where.mkdir()
    for rank in range(ranks):
        name = f"losses-{rank}.jsonl"
        (where / name).write_text((broken / name).read_text())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[End]]:
    """Returns the end of a training that was not interrupted, and did not know of Rekindle."""

    @cache
    def end(ranks: int, *options: object) -> list[End]:
        where = tmp_path_factory.mktemp("unbroken")
        assert train(where, ranks, *options, "--alone") == 0
        return end_of(where, ranks)

    return end


@pytest.mark.campaign(seconds=75)
@pytest.mark.parametrize(("ranks", "options"), KINDS, ids=str)
def test_killed_on_all_ranks(
    ranks: int, options: tuple[str, ...], memory: Path, tmp_path: Path, unbroken: Callable[..., list[End]]
) -> None:
    """Twice, at random steps; the second start goes on from the first one's."""
    root, broken = tmp_path / "run", sorted(random.sample(range(3, STEPS), 2))
    first, second, last = (tmp_path / name for name in ("first", "second", "last"))
    assert train(first, ranks, *options, "--die-before", broken[0], root=root) != 0
    took_up(second, first, ranks)
    assert train(second, ranks, *options, "--die-before", broken[1], root=root) != 0
    took_up(last, second, ranks)
    assert train(last, ranks, *options, root=root) == 0, broken
    assert results(last)["start"] in (broken[1] - 1, broken[1] - 2)  # the newest copy may have been under way
    assert results(last)["hooks"] == 2, "no update would wait for a copy"
    assert end_of(last, ranks) == unbroken(ranks, *options), broken


@pytest.mark.campaign(seconds=30)
@pytest.mark.parametrize(("ranks", "options"), KINDS[1:], ids=str)
def test_killed_on_one_of_two_ranks_and_started_again_by_its_launcher(
    ranks: int, options: tuple[str, ...], memory: Path, tmp_path: Path, unbroken: Callable[..., list[End]]
) -> None:
    broken = random.randrange(3, STEPS)
    assert train(tmp_path / "run", ranks, *options, "--die-before", broken, "--die-rank", 1, restarts=1) == 0
    assert results(tmp_path / "run")["start"] in (broken - 1, broken - 2)
    assert end_of(tmp_path / "run", ranks) == unbroken(ranks, *options), broken


@pytest.mark.campaign(seconds=20)
def test_killed_while_validating(memory: Path, tmp_path: Path, unbroken: Callable[..., list[End]]) -> None:
    """A step is secured behind its validation, which draws random numbers of the generators that are saved."""
    assert train(tmp_path / "run", 1, "--die-validating", 8, restarts=1) == 0
    assert results(tmp_path / "run")["start"] == 7
    assert end_of(tmp_path / "run", 1) == unbroken(1)


@pytest.mark.campaign(seconds=25)
@pytest.mark.parametrize("ranks", [1, 2])
def test_told_to_go(ranks: int, memory: Path, tmp_path: Path, unbroken: Callable[..., list[End]]) -> None:
    """The step under way is secured, on the rank that was told and on the others."""
    broken = random.randrange(3, STEPS)
    die = ["--die-before", broken, "--die-rank", 0, "--by", "TERM"]
    assert train(tmp_path / "run", ranks, *die, restarts=1) == 0
    assert results(tmp_path / "run")["start"] in (broken - 1, broken)
    assert end_of(tmp_path / "run", ranks) == unbroken(ranks), broken


@pytest.mark.campaign(seconds=45)
def test_checkpoints_of_torchtitans_own_are_gone_on_from(memory: Path, tmp_path: Path) -> None:
    """Where there are none of Rekindle's, or they are asked for. The last step's is written as ever."""
    root, folder = tmp_path / "run", tmp_path / "run" / "checkpoint"
    assert train(tmp_path / "own", 1, "--own", "--die-before", 7, root=root) != 0
    assert train(tmp_path / "next", 1, "--steps", 6, root=root) == 0
    assert results(tmp_path / "next")["start"] == 4
    assert {path.name for path in folder.iterdir()} == {"step-4", "step-6", "rekindle"}
    assert train(tmp_path / "over", 1, "--steps", 6, root=root) == 0
    assert results(tmp_path / "over")["start"] == 6
    assert results(tmp_path / "over")["weights"] == results(tmp_path / "next")["weights"]
    assert train(tmp_path / "back", 1, "--steps", 6, root=root, load_step=4) == 0
    assert results(tmp_path / "back")["start"] == 4


@pytest.mark.campaign(seconds=25)
def test_a_hugging_face_folder_is_written_at_the_end_and_read_at_the_start(memory: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "out", 2, "--steps", 3, last_save_in_hf=True, last_save_model_only=True) == 0
    folder = tmp_path / "out" / "run" / "checkpoint" / "step-3"
    assert list(folder.glob("*.safetensors"))
    initial = {"initial_load_path": str(folder), "initial_load_in_hf": True}
    assert train(tmp_path / "in", 2, "--steps", 2, **initial) == 0
    assert results(tmp_path / "in")["start"] == 0
    assert results(tmp_path / "in")["loaded"] == results(tmp_path / "out")["weights"]


@pytest.mark.campaign(seconds=10)
def test_an_unknown_setting_is_refused_by_name(memory: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "run", 1, settings={"keep_evry": 2}) != 0
    told = "UsageError: rekindle.Checkpointer has no setting keep_evry; did you mean keep_every?"
    assert told in said(tmp_path / "run")


@pytest.mark.campaign(seconds=25)
def test_options(memory: Path, tmp_path: Path) -> None:
    """Torchtitan's command line takes those of Rekindle's. What is excluded from loading stays as it is at a start."""
    root = tmp_path / "run"
    asked = ["--arguments", "checkpoint.watchdog=70", "checkpoint.interval=2"]
    assert train(tmp_path / "one", 1, "--steps", 6, *asked, root=root, settings={"persist_seconds": 0}) == 0
    steps = {int(path.name[5:]) for path in (root / "checkpoint" / "rekindle").glob("step-*")}
    assert 6 in steps <= {1, 2, 4, 6}  # the first one is saved by an option of torchtitan's own
    excluded = {"exclude_from_loading": ["dataloader", "optimizer"]}
    assert train(tmp_path / "two", 1, "--steps", 6, root=root, **excluded) == 0
    one, two = results(tmp_path / "one"), results(tmp_path / "two")
    assert two["start"] == 6 and two["weights"] == one["weights"]
    assert two["optimizer"] != one["optimizer"] and two["data"] != one["data"]


@contextmanager
def held(where: Path, ranks: int, *updates: int, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Trains, and stands still before the seventh update, and before further ones, until ``go_on``."""
    with launched(where, ranks, "--hold-before", 7, *updates, **more) as launcher:
        wait_until_held(where, ranks, 7, launcher)
        yield launcher


def wait_until_held(where: Path, ranks: int, update: int, launcher: subprocess.Popen[bytes]) -> None:
    marks = [where / f"held-{update}-{rank}" for rank in range(ranks)]
    here = lambda: all(mark.exists() for mark in marks)  # noqa: E731
    wait_for(lambda: here() or launcher.poll() is not None, LONG, f"update {update} is not come to")
    assert here(), said(where)


def go_on(where: Path, update: int) -> None:
    (where / f"go-{update}").touch()


@pytest.mark.campaign(seconds=25)
def test_a_launcher_that_is_told_to_go(memory: Path, tmp_path: Path, unbroken: Callable[..., list[End]]) -> None:
    """As by a cluster, which gives 30 s: the step under way comes to storage, and the job goes on from there."""
    root, first, last = tmp_path / "root", tmp_path / "first", tmp_path / "last"
    kept = root / "checkpoint" / "rekindle"
    with held(first, 2, root=root) as launcher:
        launcher.terminate()
        assert launcher.wait(30) != 0, said(first)
    job = JobDir.of(str(kept), memory_base(memory))
    wait_for(lambda: 6 in {entry.stamp.step for entry in PosixStore(kept).published()}, what="step 6 on storage")
    end_agent(job)
    shutil.rmtree(job.path, ignore_errors=True)  # as with the node
    took_up(last, first, 2)
    assert train(last, 2, root=root) == 0, said(last)
    assert results(last)["start"] == 6
    assert end_of(last, 2) == unbroken(2)


@pytest.mark.campaign(seconds=15)
def test_an_agent_that_is_killed(memory: Path, tmp_path: Path, unbroken: Callable[..., list[End]]) -> None:
    """Training goes on with another one, which carries its end to storage."""
    where, root = tmp_path / "run", tmp_path / "root"
    kept = root / "checkpoint" / "rekindle"
    job = JobDir.of(str(kept), memory_base(memory))
    with held(where, 1, root=root) as launcher:
        before = wait_for(job.agent, what="no agent")
        end_agent(job)
        go_on(where, 7)
        assert launcher.wait(LONG) == 0, said(where)
    assert before and job.agent() != before
    assert end_of(where, 1) == unbroken(1)
    assert max(entry.stamp.step for entry in PosixStore(kept).published()) == STEPS


@pytest.mark.campaign(seconds=15)
def test_storage_that_is_away(memory: Path, disk: Disk, tmp_path: Path, unbroken: Callable[..., list[End]]) -> None:
    """Training goes on without. Storage is back for the last step, which torchtitan writes itself."""
    where = tmp_path / "run"
    with held(where, 1, STEPS, root=disk.root, settings={"persist_seconds": 0}) as launcher:
        kept = PosixStore(disk.source / "run" / "checkpoint" / "rekindle")
        wait_for(lambda: [*kept.published()], LONG, "no step comes to storage")
        disk.unmount()
        go_on(where, 7)
        wait_until_held(where, 1, STEPS, launcher)
        assert max(entry.stamp.step for entry in kept.published()) < 7
        disk.mount()
        go_on(where, STEPS)
        assert launcher.wait(LONG) == 0, said(where)
    assert end_of(where, 1) == unbroken(1)
    assert max(entry.stamp.step for entry in kept.published()) == STEPS


@pytest.mark.campaign(seconds=30)
def test_a_rank_that_is_late_is_waited_for(memory: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "run", 2, "--steps", 2, "--late", 20) == 0
    assert results(tmp_path / "run", 1)["trainer"]["step"] == 2


@pytest.mark.campaign(seconds=20)
def test_a_rank_that_does_not_come_ends_the_job(memory: Path, tmp_path: Path) -> None:
    """torchtitan's own timeout bounds the wait, and the error says what was waited for."""
    asked = ["--arguments", "comm.init_timeout_seconds=10"]
    assert train(tmp_path / "run", 2, "--steps", 2, "--late", 600, *asked) != 0
    assert "did not come" in said(tmp_path / "run")


@pytest.mark.campaign(seconds=10)
def test_another_version_is_named(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed release says of itself that it is a later one."""
    told = tmp_path / "later" / "torchtitan-0.999.0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.999.0\n")
    monkeypatch.setenv("PYTHONPATH", str(told.parent))
    assert train(tmp_path / "run", 1, "--steps", 1) == 0, said(tmp_path / "run")
    assert "torchtitan 0.999.0: Rekindle's adapter was tested with 0.3" in said(tmp_path / "run")


@pytest.mark.campaign(seconds=25)
def test_data_that_does_not_last(memory: Path, tmp_path: Path) -> None:
    """The step that was canceled is not counted: a start that has more data makes it."""
    root, asked = tmp_path / "root", ["--steps", 40, "--arguments", "dataloader.no-infinite"]
    for start in ("first", "second"):
        assert train(tmp_path / start, 1, *asked, root=root, interval=10) == 0, said(tmp_path / start)
    first, second = results(tmp_path / "first"), results(tmp_path / "second")
    completed = max(int(key.split()[1]) for key in losses(tmp_path / "first") if key.startswith("train"))
    assert first["start"] == 0 and 10 < completed < 40 and completed % 10
    assert second["start"] == completed and second["weights"] == first["weights"]


def test_lines_that_a_user_adds() -> None:
    """One, and its import."""
    script = (REPO / "examples/train_torchtitan.py").read_text()
    code = [line.strip() for line in script.split('"""')[2].splitlines() if "ekindle" in line]
    assert [line.split("(")[0] for line in code] == [
        "from rekindle.integrations.torchtitan import RekindleCheckpointManager",
        "config.checkpoint = RekindleCheckpointManager.Config",
    ]
