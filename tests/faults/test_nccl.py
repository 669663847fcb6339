"""Settings of torch's NCCL: set for the ranks by ``rekindle run``, asked for by ``guard()``."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rekindle.faults.nccl import SETTINGS
from tests import forked
from tests.faults.test_guard import Play, Trainer, play

__all__ = ["play"]

TELL = "import json, os; print('told', json.dumps({n: os.environ.get(n) for n in %r}))\n" % (SETTINGS,)  # noqa: UP031


def _run(tmp_path: Path, environment: dict[str, str], launcher: str) -> subprocess.CompletedProcess[str]:
    """Runs a script under the real launcher."""
    script = tmp_path / "worker.py"
    script.write_text(TELL)
    rest = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = forked.run(launcher, "run", script, timeout=300, env=rest | environment)
    assert done.returncode == 0, done.stderr
    return done


def _launched(tmp_path: Path, **environment: str) -> dict[str, Any]:
    """Returns what a rank has, under the real launcher, of the settings."""
    done = _run(tmp_path, environment, "rekindle")
    line = next(line for line in done.stdout.splitlines() if "told " in line)
    found: dict[str, Any] = json.loads(line.partition("told ")[2])
    return found


def test_ranks_are_not_ended_by_torch_while_they_secure_their_state(tmp_path: Path) -> None:
    """torchrun itself sets the first to 1."""
    assert _launched(tmp_path) == dict.fromkeys(SETTINGS, "0")


@pytest.mark.campaign(seconds=6)
def test_a_setting_of_the_users_stays(tmp_path: Path) -> None:
    assert _launched(tmp_path, TORCH_NCCL_ASYNC_ERROR_HANDLING="3") == {SETTINGS[0]: "3", SETTINGS[1]: "0"}


@pytest.mark.parametrize(
    ("nccl", "environment", "told"),
    [
        (True, {}, 1),
        (False, {}, 0),
        pytest.param(True, {SETTINGS[1]: "1"}, 1, marks=pytest.mark.campaign),
        pytest.param(True, {SETTINGS[0]: "3"}, 0, marks=pytest.mark.campaign),
    ],
)
def test_the_launcher_says_once_that_nobody_ends_a_hang_outside_of_guard(
    nccl: bool, environment: dict[str, str], told: int, tmp_path: Path
) -> None:
    """A build of torch that says whether it has NCCL: none for the CPU has it."""
    code = (
        f"import torch.distributed as dist, rekindle.__main__ as r; dist.is_nccl_available = lambda: {nccl}; r.main()"
    )
    said = _run(tmp_path, environment, forked.Code(code)).stderr
    assert said.count("outside of guard() nobody ends a job that hangs in a collective") == told, said


def _guarded(trainer: Trainer) -> None:
    """A process group of gloo that says it had NCCL: no build of torch for the CPU has it."""
    import torch.distributed as dist

    backend, *values = json.loads((trainer.root.parent / "settings").read_text())
    for name, value in zip(SETTINGS, values, strict=True):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    dist.init_process_group("gloo", init_method=f"file://{trainer.root}-meeting", rank=0, world_size=1)
    dist.get_backend_config = lambda group=None: backend
    ckpt = trainer.begin()
    with ckpt.guard():
        trainer.train(ckpt, 2)


@pytest.mark.parametrize(
    ("backend", "values", "warned"),
    [
        ("cpu:gloo,cuda:nccl", [None, None], "as {0} and {1} are not 0"),
        ("cpu:gloo,cuda:nccl", ["2", "False"], "as {0} is not 0"),
        ("cuda:nccl", ["0", "1"], "as {1} is not 0"),
        ("cuda:nccl", ["0", "0"], ""),
        ("cpu:gloo,cuda:gloo", [None, None], ""),
    ],
)
def test_guard_warns_of_what_torch_would_do_at_a_fault(
    backend: str, values: list[str | None], warned: str, play: Play, root: Path
) -> None:
    (root.parent / "settings").write_text(json.dumps([backend, *values]))
    codes, _, log = play(_guarded)
    assert codes == [0], log
    assert ("after a fault torch may end ranks" in log) == bool(warned), log
    assert warned.format(*SETTINGS) in log
