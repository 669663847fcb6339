"""Options: one place for their defaults and checks, which name the option that makes no sense."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from rekindle.memory.job_dir import memory_base
from rekindle.settings import Settings, check_settings


def test_a_checkpointer_takes_every_option_and_has_its_default() -> None:
    parameters = inspect.signature(rekindle.Checkpointer.__init__).parameters.values()
    taken = {one.name: one.default for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    assert taken == {field.name: field.default for field in dataclasses.fields(Settings)}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("snapshot_every", 0, "snapshot_every is 0: must be a whole number of at least 1"),
        ("snapshot_every", "often", "snapshot_every is 'often': must be a whole number"),
        ("snapshot_every", "0s", "snapshot_every is '0s': must be a whole number of at least 1"),
        ("snapshot_every", "30 seconds", "'auto', or a time such as '30s' or '10min'"),
        ("snapshot_every", 30.0, "snapshot_every is 30.0: must be a whole number"),
        ("persist_every", "often", "persist_every is 'often': must be a whole number"),
        ("persist_every", "-1s", "'auto', or a time such as '30s' or '10min'"),
        ("persist_every", True, "persist_every is True: must be a whole number"),
        ("keep", 1 << 63, "less than 2 to the 63rd"),
        ("keep_every", 1.0, "keep_every is 1.0: must be a whole number"),
        ("memory_limit", 0, "memory_limit is 0: must be a whole number of at least 1"),
        ("memory_headroom", -1, "memory_headroom is -1: must be a whole number of at least 0"),
        ("overlap", "late", "overlap is 'late': must be 'auto', True, False or 'verify'"),
        ("snapshot_budget", 1.0, "snapshot_budget is 1.0: must be a share of training time"),
        ("persist_seconds", -1.0, "persist_seconds is -1.0: must be a number of seconds, 0 or more than 0"),
        ("idle_timeout", 0.0, "idle_timeout is 0.0: must be a number of seconds, more than 0"),
        ("fallback_after", float("inf"), "fallback_after is inf: must be a number of seconds"),
        (
            "fallback_after",
            1e300,
            "must be a number of seconds, more than 0 and at most 86400",
        ),
        pytest.param("persist_seconds", 10**400, ": must be a number of seconds, 0 or more than 0", id="no float"),
        pytest.param("idle_timeout", 10**400, ": must be a number of seconds, more than 0", id="no float either"),
        ("drain_limit", "fast", "'fast' is not a rate"),
        ("peer_limit", "fast", "'fast' is not a rate"),
        ("keep_best", "loss", "keep_best is 'loss': must be the name of a metric"),
        ("keep_best", ("loss", "least"), "and 'min' or 'max', as in"),
        ("keep_best", ("", "min"), "must be the name of a metric, of 1 to 64 ASCII characters"),
        ("peer_every", 0, "peer_every is 0: must be a whole number of at least 1"),
        ("peer_every", "often", "peer_every is 'often': must be a whole number"),
        ("patience", 1.5, "patience is 1.5: must be at least 2 seconds"),
        ("patience", "long", "patience is 'long': must be a number of seconds"),
        ("rng", "False", "rng is 'False': must be a bool, True or False"),
        ("allow_pickle", "no", "allow_pickle is 'no': must be a bool"),
        ("allow_missing", 0, "allow_missing is 0: must be a bool"),
        ("strict", "no", "strict is 'no': must be a bool"),
        ("memory", 5, "memory is 5: must be the path of a directory, as a str or an os.PathLike"),
        ("memory", True, "memory is True: must be the path of a directory"),
        ("memory", b"/dev/shm", "memory is b'/dev/shm': must be the path of a directory"),
        ("memory", ["a"], "memory is ['a']: must be the path of a directory"),
        ("memory", "a\0b", "must be the path of a directory"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(option: str, value: object, message: str) -> None:
    given: dict[str, Any] = {option: value}
    with pytest.raises(rekindle.UsageError) as raised:
        Settings(**given)
    assert message in str(raised.value)


def test_what_makes_sense_is_kept_as_it_was_given() -> None:
    settings = Settings(persist_seconds=0, memory_headroom=0, drain_limit="5MB/s", keep=3, peer_limit="2GB/s")
    assert (settings.drain_rate, settings.retention, settings.memory_headroom) == (5_000_000, (3, None), 0)
    assert settings.peer_rate == 2 * 10**9 and Settings(peer_every=None, patience=2).peer_every is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.keep = 4  # type: ignore[misc]


@pytest.mark.parametrize("option", ["rng", "allow_pickle", "allow_missing", "strict", "overlap"])
@pytest.mark.parametrize("value", [True, False])
def test_a_bool_of_numpy_is_one(option: str, value: bool) -> None:
    given: dict[str, Any] = {option: np.bool_(value)}
    assert getattr(Settings(**given), option) is value


def test_how_often_is_a_number_of_steps_a_time_or_found_out() -> None:
    by_time = Settings(snapshot_every="30s", persist_every="1.5h")
    assert (by_time.snapshot_seconds, by_time.persist_steps, by_time.persist_pause) == (30, None, 5400)
    chosen = Settings(snapshot_every="auto", persist_every="auto", persist_seconds=7)
    assert (chosen.snapshot_seconds, chosen.persist_steps, chosen.persist_pause) == (None, None, 7)
    counted = Settings(snapshot_every=3, persist_every=9)
    assert (counted.snapshot_seconds, counted.persist_steps) == (None, 9)


def test_ranks_compare_what_each_decides_by_alone() -> None:
    agreed = Settings(keep=3, persist_every=10).agreed()
    assert agreed["persist_every"] == 10 and "keep" not in agreed


@pytest.mark.parametrize("root", [None, 5, True, ["runs"]])
def test_a_root_that_is_no_path_is_refused(root: Any) -> None:
    with pytest.raises(rekindle.UsageError, match=r"root is .*: must be a path or a URL"):
        rekindle.Checkpointer(root, {})


@pytest.mark.parametrize("text", ["", "two", "0", "-1", "1.5"])
@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_launchers_number_that_is_none_is_refused_by_name(
    name: str, text: str, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(rekindle.UsageError, match=f"environment variable {name} is {text!r}: must be a whole number"):
        rekindle.Checkpointer(root, {})
    assert not root.exists() and not any(memory.rglob("rank-*"))


def test_a_memory_store_may_be_named_from_home(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(memory))
    monkeypatch.setenv("REKINDLE_MEMORY", "~/store")
    assert memory_base().parent == memory / "store"
    assert memory_base("~/other").parent == memory / "other"


@pytest.mark.parametrize("step", [True, 1.0, "1", -1, 10**30])
def test_a_step_to_restore_that_is_no_number_of_one_is_refused(step: Any, root: Path, memory: Path) -> None:
    with (
        rekindle.Checkpointer(root, {"values": rekindle.Values(x=1)}) as ckpt,
        pytest.raises(rekindle.UsageError, match=r"restore\(step=.*: must be None, for the newest checkpoint"),
    ):
        ckpt.restore(step)


@pytest.mark.parametrize("timeout", [None, "60", True, -5, math.nan])
def test_a_timeout_that_is_none_is_refused_before_anything_is_done(timeout: Any, root: Path, memory: Path) -> None:
    with rekindle.Checkpointer(root, {"values": rekindle.Values(x=1)}, persist_every=1000) as ckpt:
        ckpt.restore()
        for use in (lambda: ckpt.save(1, timeout=timeout), lambda: ckpt.close(timeout)):
            with pytest.raises(rekindle.UsageError, match=r"timeout is .*: must be a number of seconds, 0 or more"):
                use()
        assert ckpt.metrics.saves == 0
        ckpt.step(1)  # it is still open
    assert ckpt.metrics.saves == 1


@pytest.mark.parametrize("timeout", [math.inf, 1e10, pytest.param(10**400, id="no float"), 100])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_timeout_without_bound_is_a_timeout(timeout: float, in_memory: bool, root: Path, memory: Path) -> None:
    values = {"values": rekindle.Values(x=1)}
    ckpt = rekindle.Checkpointer(root, values, persist_every=1000, memory=None if in_memory else "/proc")
    ckpt.restore()
    ckpt.save(1, wait="memory", timeout=timeout)
    ckpt.save(2, wait="durable", timeout=timeout)
    ckpt.save(3, pin=True, timeout=timeout)
    ckpt.close(timeout)
    assert ckpt.metrics.failed == 0 and next(entry.step for entry in ckpt.checkpoints()) == 3


@pytest.mark.parametrize(("name", "meant"), [("keep_evry", "; did you mean keep_every?"), ("every_n_train_steps", "")])
def test_a_setting_that_an_adapter_is_given_and_nobody_knows_is_named(name: str, meant: str) -> None:
    with pytest.raises(rekindle.UsageError) as told:
        check_settings({name: 5})
    assert str(told.value) == f"rekindle.Checkpointer has no setting {name}{meant}"
