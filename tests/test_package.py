"""Builds wheel and sdist, and installs and runs both in environments where this checkout is out of reach."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=170, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the two files. 'build' makes the sdist of the checkout, and the wheel of the sdist."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    # Without isolation: the backend is in the dev extra, so that no test needs the network.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, REPO, cwd=out)
    return out


def one(directory: Path, pattern: str) -> Path:
    (found,) = directory.glob(pattern)
    return found


def test_the_wheel_holds_every_module_the_page_and_the_mark_of_types(built: Path) -> None:
    package = REPO / "src" / "rekindle"
    there = {path.relative_to(package.parent).as_posix() for path in package.rglob("*.py")} | {"rekindle/py.typed"}
    there |= {path.relative_to(package.parent).as_posix() for path in (package / "cli/page/static").iterdir()}
    with zipfile.ZipFile(one(built, "*.whl")) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == there
    assert {name.split("/")[0] for name in packed} == {"rekindle"}, "a foreign name would be installed"


def test_the_sdist_holds_what_its_readers_need(built: Path) -> None:
    with tarfile.open(one(built, "*.tar.gz")) as sdist:
        tops = {name.split("/")[1] for name in sdist.getnames()}
    assert {"src", "tests", "docs", "README.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml"} <= tops
    assert not tops & {".venv", "build", "dist", "shared"}


@pytest.mark.parametrize("pattern", ["*.whl", pytest.param("*.tar.gz", marks=pytest.mark.campaign(seconds=9))])
def test_what_is_installed_runs(pattern: str, built: Path, tmp_path: Path) -> None:
    place = tmp_path / "environment"
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    here = sysconfig.get_path("purelib")
    # Dependencies are those of this environment. It has Rekindle by a .pth file, which is not followed from here.
    purelib = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (purelib / "dependencies.pth").write_text(f"{here}\n")
    install = ["install", "-q", "--no-deps", "--no-index", "--no-build-isolation", one(built, pattern)]
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=tmp_path)
    found = run(python, "-c", "import rekindle; print(rekindle.__file__)", cwd=tmp_path)
    assert Path(found.strip()).parent == purelib / "rekindle"
    for command in ([place / "bin" / "rekindle"], [python, "-m", "rekindle"]):
        assert "Usage: " in run(*command, "--help", cwd=tmp_path)
