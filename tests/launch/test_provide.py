"""``rekindle run --provide``: stand-ins are importable in that run, cold and warm, and hide nothing."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rekindle
from rekindle.launch import provide as providing
from rekindle.launch.provide import PROVIDE, folder_of, provide, stand_ins
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.job_dir import memory_base
from tests.faults.harness import end_agent
from tests.launch.launcher import WARM, Launcher

_CHILDREN = """
import multiprocessing, subprocess, sys
import torch_nebula

def child():
    import mindio_acp, torch_nebula
    assert torch_nebula.init.__module__ == "rekindle.provide.torch_nebula.settings"

if __name__ == "__main__":
    import torch_nebula as again
    from rekindle.provide import torch_nebula as own
    assert again is own and torch_nebula is own
    subprocess.run([sys.executable, "-c", "import mindio_acp, torch_nebula; torch_nebula.Checkpoint"], check=True)
    started = multiprocessing.get_context("spawn").Process(target=child)
    started.start()
    started.join()
    assert started.exitcode == 0
    open("done", "w").close()
"""


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores what ``provide`` changes."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "/before")


def run(directory: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rekindle", "run", "--standalone", "--max-restarts=0", *map(str, arguments)],
        cwd=directory,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=170,
    )


@pytest.mark.parametrize("by", ["option", pytest.param("environment", marks=pytest.mark.campaign(seconds=8))])
def test_the_script_and_its_children_import_the_stand_in(by: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_CHILDREN)
    if by == "option":
        done = run(tmp_path, "--provide", "torch_nebula", "--provide", "mindio_acp", "script.py")
    else:
        done = run(tmp_path, "-m", "script", **{PROVIDE: "torch_nebula,mindio_acp"})
    assert done.returncode == 0 and (tmp_path / "done").exists(), done.stderr


def test_without_it_there_is_no_such_module(tmp_path: Path) -> None:
    for name in stand_ins():
        found = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, check=False)
        assert f"No module named '{name}'" in found.stderr


def test_a_package_of_that_name_is_not_hidden(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "torch_nebula.py").write_text("")
    (tmp_path / "script.py").write_text("open('ran', 'w').close()")
    done = run(tmp_path, "--provide", "torch_nebula", "script.py", PYTHONPATH=str(real))
    assert done.returncode == rekindle.UsageError.exit_code
    assert str(real / "torch_nebula.py") in done.stderr and "never hidden" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "ran").exists()


def test_a_module_beside_the_script_is_not_hidden(path: None, tmp_path: Path) -> None:
    (tmp_path / "torch_nebula").mkdir()
    provide("torch_nebula", str(tmp_path))  # a mere folder: data, let us say
    (tmp_path / "torch_nebula" / "__init__.py").touch()
    importlib.invalidate_caches()
    with pytest.raises(rekindle.UsageError, match="never hidden"):
        provide("torch_nebula", str(tmp_path))


def test_a_package_that_is_installed_for_editing_is_not_hidden(path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        """Stands behind Python's own finders, as that of an editable install does."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "torch_nebula":
                return importlib.machinery.ModuleSpec(name, None, origin="/elsewhere/nebula/torch_nebula/__init__.py")
            return None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    with pytest.raises(rekindle.UsageError, match="/elsewhere/nebula"):
        provide("torch_nebula", None)


def test_folders_come_first_and_once(path: None) -> None:
    provide("", None)
    assert os.environ["PYTHONPATH"] == "/before"
    for _ in range(2):  # a run within a run
        provide(" torch_nebula,, torch_nebula", None)
        assert os.environ["PYTHONPATH"] == f"{folder_of('torch_nebula')}:/before"
        assert sys.path.count(str(folder_of("torch_nebula"))) == 1


def test_the_path_stays_as_it_was_behind_them(path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder in it is the current one, from which programs import."""
    monkeypatch.setenv("PYTHONPATH", ":/before:")
    provide("torch_nebula", None)
    assert os.environ["PYTHONPATH"] == f"{folder_of('torch_nebula')}::/before:"
    monkeypatch.setenv("PYTHONPATH", "")
    provide("torch_nebula", None)
    assert os.environ["PYTHONPATH"] == str(folder_of("torch_nebula"))


def test_a_package_that_only_the_ranks_would_find_is_not_hidden(
    path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As python -I doesn't look into PYTHONPATH, and the ranks, which it starts, do."""
    (tmp_path / "torch_nebula.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(rekindle.UsageError, match="never hidden"):
        provide("torch_nebula", None)


def test_the_stand_in_by_another_path_is_none_that_would_be_hidden(
    path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(folder_of("torch_nebula"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "link"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "link")])
    provide("torch_nebula", None)


@pytest.mark.parametrize("name", stand_ins())
def test_another_interpreter_keeps_its_own_package(name: str, tmp_path: Path) -> None:
    """One without Rekindle, that a rank starts: here one that doesn't look for installed packages."""
    environment = {**os.environ, "PYTHONPATH": f"{folder_of(name)}:{tmp_path}"}
    command = [sys.executable, "-S", "-c", f"import {name}; print({name}.__file__)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert f"No module named '{name}'" in done.stderr
    (tmp_path / f"{name}.py").touch()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(tmp_path / f"{name}.py"), done.stderr


def test_an_unknown_name_is_told_what_there_is(path: None) -> None:
    with pytest.raises(rekindle.UsageError, match=r"torch_nebla: there is no stand-in.*torch_nebula"):
        provide("torch_nebla", None)


def test_each_stand_in_is_a_package_here() -> None:
    for name in stand_ins():
        assert (providing._FOLDERS.parent / name / "__init__.py").is_file()


_SAVES = {
    "torch_nebula": """
import torch_nebula

torch_nebula.init("nebula")
latest = torch_nebula.get_latest_checkpoint()
found = latest and latest.load("model.pt")
checkpoint = torch_nebula.Checkpoint(f"s{start}", -2)
checkpoint.save("model.pt", int(start))
assert checkpoint.commit()
""",
    "mindio_acp": """
import mindio_acp

found = mindio_acp.load("model.pt") if os.path.exists("model.pt") else None
assert mindio_acp.save(int(start), "model.pt") == 1
""",
}
_SAVES_TWICE = """
import os, sys, time
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
{saves}
open(f"start-{start}", "w").write(f"{found}")
deadline = time.monotonic() + 120
while not os.path.exists(f"go-{start}") and time.monotonic() < deadline:
    time.sleep(0.01)
sys.exit(0 if start == "1" else 9)
"""


@pytest.mark.campaign(15)
@pytest.mark.parametrize("name", ["torch_nebula", "mindio_acp"])
def test_a_restart_of_a_script_that_saves_here_alone_is_warm(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SAVES_TWICE.replace("{saves}", _SAVES[name]))
    with Launcher(tmp_path, "--provide", name, "script.py") as job:
        job.wait_for(WARM)
        (tmp_path / "go-0").touch()
        job.wait_until((tmp_path / "start-1").exists)
        (tmp_path / "go-1").touch()
        assert job.process.wait(120) == 0, job.output
    end_agent(FilesDir.below(memory_base(tmp_path / "memory")))
    assert "started cold" not in job.output
    assert (tmp_path / "start-1").read_text() == "0"
