"""Names the toolchain whose compiled code runs here: versions of compilers, processor, devices. Imports no compiler."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import runpy
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["describe_toolchain", "toolchain_name"]

_PACKAGES = ("triton", "jaxlib", "mindspore")
_PROCESSOR = re.compile(r"^(?:flags|Features)\s*:.*$", re.MULTILINE)
_SHOWN = 80
"""Most characters of a name that are there for people."""


def toolchain_name() -> str:
    """Returns the name of this process's toolchain: what one of that name has compiled runs under every other one.

    Compilers check most of it again, and the whole graph, in their own keys.
    """
    facts = describe_toolchain()
    shown = "-".join(f"{name}-{facts[name]}" for name in ("torch", "triton", "jaxlib", "cuda", "hip") if facts[name])
    shown = re.sub(r"[^A-Za-z0-9.+]+", "-", shown)[:_SHOWN].strip("-.")
    exact = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:12]
    return f"{shown or 'unknown'}-{exact}"


def describe_toolchain() -> dict[str, str]:
    """Returns the facts that compiled code is valid for, by name; empty where there is no such thing."""
    torch = _torch()
    return {
        "torch": torch.get("__version__", ""),
        "torch_git": torch.get("git_version", ""),
        "cuda": torch.get("cuda", ""),
        "hip": torch.get("hip", ""),
        **{name: _version(name) for name in _PACKAGES},
        "python": f"{sys.implementation.cache_tag} {sys.version}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        # Inductor compiles with -march=native: its library ends a process on a processor that lacks an instruction.
        "processor": hashlib.sha256(_processor().encode()).hexdigest(),
        "gpus": ", ".join(_gpus()),
    }


def _torch() -> dict[str, str]:
    """Returns what torch's ``version.py`` says, without the seconds and the memory of importing torch."""
    with suppress(Exception):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            found = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
            return {name: str(value) for name, value in found.items() if value is not None}
    return {}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    with suppress(OSError):
        found = _PROCESSOR.search(Path("/proc/cpuinfo").read_text())
        return found[0] if found else ""
    return platform.processor()


def _gpus() -> list[str]:
    """Returns the models of NVIDIA's devices, as the driver tells them without one being touched."""
    models = set()
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        with suppress(OSError):
            models |= {line.split(":", 1)[1].strip() for line in path.read_text().splitlines() if "Model:" in line}
    return sorted(models)
