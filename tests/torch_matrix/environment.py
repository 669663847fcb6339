"""Makes an environment with one release of torch under one Python, and what Rekindle needs beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["NEWEST", "Environment", "Release", "prepare"]

_SRC = Path(__file__).parents[2] / "src"
NEWEST = "newest"
_NEEDS = ("aiohttp>=3.9", "click>=8.1", "prometheus-client>=0.20", "rich>=13", "xxhash>=3.4", "setuptools")
"""Rekindle's own, and setuptools, which torch.compile imports and old releases don't ask for."""
_OLD_NUMPY = ("2.4", "2.5", "2.6")
_SETUP_WITHIN = 1800.0


class Release(NamedTuple):
    """A release of torch, such as 2.8.0, and a Python, such as 3.11."""

    torch: str
    python: str

    @classmethod
    def parse(cls, text: str) -> Release:
        """Reads RELEASE or RELEASE@PYTHON. Without a Python it is the one that runs this."""
        torch, _, python = text.partition("@")
        return cls(torch, python or f"{sys.version_info.major}.{sys.version_info.minor}")

    def __str__(self) -> str:
        return f"{self.torch}@{self.python}"


class Environment(NamedTuple):
    """One that is ready: its Python, and the release of torch that it has."""

    python: Path
    torch: str
    build: str
    """The same with the build's own part, such as +cpu."""

    def environ(self, memory: Path) -> dict[str, str]:
        """Returns the variables for a process of it: the package is this tree's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "REKINDLE_"))}
        path = os.pathsep.join([str(self.python.parent), kept.get("PATH", "")])
        own = {"PYTHONPATH": str(_SRC), "REKINDLE_MEMORY": str(memory), "OMP_NUM_THREADS": "1", "PATH": path}
        own |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else it starts processes that import all of torch
        return {**kept, **own, "CUDA_VISIBLE_DEVICES": "", "LOGLEVEL": "ERROR", "PYTHONDONTWRITEBYTECODE": ""}


def prepare(release: Release, place: Path) -> Environment:
    """Returns the environment in ``place``, made first if it is not there. Raises RuntimeError if it can't be had."""
    folder = place / f"{release.torch}-py{release.python}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run([str(_interpreter(release.python)), "-m", "venv", str(folder)])
        numpy = "numpy<2.3" if release.torch.startswith(_OLD_NUMPY) else "numpy"
        torch = "torch" if release.torch == NEWEST else f"torch=={release.torch}"
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-cache-dir"]
        _run([*pip, torch, numpy, *_NEEDS])
        (folder / "ready").touch()
    found = _run([str(python), "-c", "import torch; print(torch.__version__)"]).strip()
    return Environment(python, found.partition("+")[0], found)


def _interpreter(version: str) -> Path:
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(sys.executable)
    if found := shutil.which(f"python{version}"):
        works = subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0
        if works:  # and is no shim of pyenv for a version that is not chosen
            return Path(found)
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    if not pyenv:
        raise RuntimeError(f"there is no Python {version} on this machine")
    return pyenv[-1]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SETUP_WITHIN, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
    return done.stdout
