"""A ROOT that is no root: each kind is told apart, with what to say instead, and nothing is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

import rekindle
from rekindle.cli.main import main
from rekindle.format.names import step_dir
from tests.stored import job_in, save

COMMANDS = ["ls", "inspect", "verify", "status", "stop", "prune", "pin", "unpin"]


def told(*arguments: object, code: int = rekindle.NotFoundError.exit_code) -> str:
    """The error that a command ends with."""
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("Error: ") and not result.stdout, result.output
    assert "move away" not in result.stderr
    return result.stderr


def told_of(command: str, root: Path) -> str:
    """The error of a command that is given this root, and a step if it wants one."""
    return told(command, root, *([3] if command in ("pin", "unpin") else []))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_inside_a_root_names_the_root_and_the_step(
    root: Path, memory: Path, tmp_path: Path, command: str
) -> None:
    step = save(root, 100)
    for place in (step, step / "checkpoint.json", step / "shard-00000-of-00001.safetensors"):
        assert f"'rekindle ls {root}' or 'rekindle inspect {root} 100'" in told_of(command, place)
    assert (step / "checkpoint.json").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_what_holds_no_checkpoints_is_told_apart(memory: Path, tmp_path: Path, command: str) -> None:
    nowhere = tmp_path / "no" / "where"
    assert f"there is no such directory; {tmp_path} is there" in told_of(command, nowhere)
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    assert "it is a file: a root is the directory" in told_of(command, file)
    weights = tmp_path / "model.safetensors"
    weights.write_text("")
    assert f"'rekindle import {weights} ROOT STEP' makes a checkpoint" in told_of(command, weights)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "the directory is empty: no job has saved there yet" in told_of(command, empty)
    (empty / "todo.txt").touch()
    assert "it holds todo.txt" in told_of(command, empty)
    (empty / "model.safetensors").touch()
    assert "it is a directory of safetensors files" in told_of(command, empty)
    (empty / ".metadata").touch()
    adopt = f"'rekindle import {empty} ROOT STEP' makes a checkpoint of it (with --allow-pickle)"
    assert adopt in told_of(command, empty)
    assert file.read_text() == "mine"


def test_a_root_of_unfinished_steps_says_so(root: Path, memory: Path) -> None:
    save(root, 7, published=False)
    assert "step 7 is unfinished" in told("ls", root)


def test_a_step_that_is_not_there_names_those_that_are(root: Path, memory: Path) -> None:
    for step in (3, 5):
        save(root, step)
    assert "no checkpoint of step 4: it has 5, 3" in told("inspect", root, 4)


def test_a_parent_of_runs_lists_the_roots_below_it(memory: Path, tmp_path: Path) -> None:
    """Also those that have nothing on storage yet; not those too deep, and never more than a screen of them."""
    runs = tmp_path / "runs"
    found = [runs / "a", runs / "b" / "c"]
    for one in found:
        save(one, 1)
    save(runs / "1" / "2" / "3" / "4" / "too deep", 1)
    (runs / "loop").symlink_to(runs)
    job_in(memory, runs / "live")
    damaged = job_in(memory, runs / "damaged")
    (damaged.path / "job.json").write_text("{")  # can't be read, so it keeps nobody from the others
    found.append(runs / "live")
    text = told("ls", runs)
    assert "it is no root itself, but these below it are" in text
    assert [line.strip() for line in text.splitlines()[1:]] == [str(one) for one in found]
    for number in range(30):
        (runs / f"m{number:02d}" / step_dir(1)).mkdir(parents=True)
    text = told("ls", runs)
    assert len(text.splitlines()) == 12 and text.rstrip().endswith("and perhaps more")


def test_a_search_for_roots_ends_in_a_large_tree(memory: Path, tmp_path: Path) -> None:
    for first in range(40):
        for second in range(40):
            os.makedirs(tmp_path / "runs" / str(first) / str(second))
    assert "the search for one below it took too long" in told("ls", tmp_path / "runs")


def test_the_agent_and_a_drill_say_what_was_meant(root: Path, memory: Path) -> None:
    step = save(root, 100)
    for command in (["agent", step], ["drill", step, "kill"]):
        assert f"'rekindle ls {root}'" in told(*command)
    assert told("agent", root) == f"Error: {root}: has nothing in memory on this node\n"


def test_an_import_never_writes_into_a_step(root: Path, memory: Path, tmp_path: Path) -> None:
    step = save(root, 100)
    before = sorted(os.listdir(step))
    text = told("import", tmp_path, step, 1, code=rekindle.UsageError.exit_code)
    assert f"lies inside the root {root}, in its step 100" in text
    assert sorted(os.listdir(step)) == before


def test_an_object_stores_step_names_its_root(memory: Path) -> None:
    text = told("agent", "s3://bucket/run/step-0000000100.json")
    assert "'rekindle inspect s3://bucket/run 100'" in text
