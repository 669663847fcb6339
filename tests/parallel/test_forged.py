"""Checkpoints that are not what they say are refused by name, and nothing outside of their directory is read."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import rekindle
from tests.parallel.forge import FORGERIES, Place
from tests.parallel.jobs import SAVED, Saved, state_of
from tests.parallel.launch import Answer, on_ranks

STEP = f"step-{SAVED:010}"


@pytest.fixture(scope="module")
def spoilt(saved_by: Callable[[str, int], Saved], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A root for each forgery, which has been done to its only checkpoint. A sound one is there too."""
    good = saved_by("fsdp2", 2).stores.root / STEP
    other = tmp_path_factory.mktemp("other") / "run"
    on_ranks(2, saving_once, other)
    found = {}
    for name, (forge, _) in {"sound": (lambda place: None, ""), **FORGERIES}.items():
        place = tmp_path_factory.mktemp("spoilt")
        root = found[name] = place / "run"
        shutil.copytree(good, root / STEP)
        (place / "outside").mkdir()
        (secret := place / "outside" / "secret").write_bytes(good.joinpath("shard-00001-of-00002.json").read_bytes())
        forge(Place(root / STEP, other / STEP, secret))
    return found


@pytest.fixture(scope="module")
def answers(spoilt: dict[str, Path]) -> list[Answer]:
    """What a single process has to say of all of them."""
    return on_ranks(1, reading, "single", spoilt, grouped=False, timeout=120)


def test_the_sound_one_is_read(answers: list[Answer]) -> None:
    check_sound(answers)


@pytest.mark.parametrize("name", FORGERIES)
def test_refused_by_name(name: str, answers: list[Answer]) -> None:
    check_refused(name, answers)


@pytest.mark.parametrize("name", FORGERIES)
def test_nothing_outside_is_read(name: str, answers: list[Answer], spoilt: dict[str, Path]) -> None:
    check_inside(name, answers, spoilt)


@pytest.mark.campaign(seconds=30)
def test_ranks_of_a_group_read_and_refuse_alike(spoilt: dict[str, Path]) -> None:
    answers = on_ranks(2, reading, "fsdp2", spoilt, timeout=120)
    check_sound(answers)
    for name in FORGERIES:
        check_refused(name, answers)
        check_inside(name, answers, spoilt)


def check_sound(answers: list[Answer]) -> None:
    for answer in answers:
        assert answer["sound"]["error"] == "" and answer["sound"]["step"] == SAVED
        assert any("shard-" in path for path in answer["sound"]["opened"]), "opening goes unnoticed"


def check_refused(name: str, answers: list[Answer]) -> None:
    for answer in answers:
        error, message = answer[name]["error"], answer[name]["message"]
        assert error in rekindle.errors.__all__, f"{name}: {error}: {message}"
        assert FORGERIES[name][1] in message, f"{name}: {message}"


def check_inside(name: str, answers: list[Answer], spoilt: dict[str, Path]) -> None:
    inside = os.path.realpath(spoilt[name]) + os.sep
    for answer in answers:
        # Python and torch may load modules meanwhile; of the test's own directory nothing but the checkpoint is read.
        wrong = [path for path in answer[name]["opened"] if not path.startswith(inside)]
        assert wrong == [], name


# -- what runs on a rank --------------------------------------------------------------------------------------------


def saving_once(rank: int, world: int, root: Path) -> dict[str, Any]:
    """Another run of the same shape: its files differ in nothing that their names tell."""
    from tests.parallel.kinds import build

    part = build("fsdp2", world, seed=5)
    ckpt = rekindle.Checkpointer(root, state_of(part, rank=rank, seen=0), memory="/proc/none")
    for step in range(1, SAVED + 1):
        part.step(step)
    ckpt.save(SAVED, wait="durable")
    return {}


def reading(rank: int, world: int, kind: str, roots: dict[str, Path]) -> dict[str, Any]:
    """Try to restore each of them, straight from storage, and keep an eye on what is opened."""
    import torch.distributed as dist

    from tests.parallel.kinds import build

    opened: list[str] = []
    place = os.path.commonpath(roots.values())

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, bytes)):
            parent, name = os.path.split(os.fsdecode(args[0]))
            path = os.path.join(os.path.realpath(parent), name)
            if not args[2] & os.O_NOFOLLOW:  # else a link is refused by the kernel
                path = os.path.realpath(path)
            if path.startswith(place) and not os.path.isdir(path):
                opened.append(path)

    sys.addaudithook(watch)
    found: dict[str, Any] = {}
    meeting = [uuid4().hex]  # ranks that begin again must not find the addresses of those before them
    if world > 1:
        dist.broadcast_object_list(meeting)
    for name, root in roots.items():
        if world > 1:  # so that a rank that fails alone spoils no more than its own case
            dist.destroy_process_group()
            how = {"init_method": f"file://{root.parent}/meeting-{meeting[0]}", "rank": rank, "world_size": world}
            dist.init_process_group("gloo", timeout=timedelta(seconds=30), **how)  # type: ignore[arg-type]
        part = build(kind, world, seed=99, wrong=True)
        opened.clear()
        answer = found[name] = {"error": "", "message": "", "step": -1}
        try:
            ckpt = rekindle.Checkpointer(root, state_of(part, rank=-1, seen=-1), memory="/proc/none")
            answer["step"] = ckpt.restore()
        except Exception as error:
            answer |= {"error": type(error).__name__, "message": str(error)}
        answer["opened"] = sorted(set(opened))
    return found
