"""Names of files and directories; the same in every store (see docs/format.md)."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rekindle.errors import UsageError

__all__ = [
    "LAST_STEP",
    "MANIFEST",
    "MANIFEST_KIND",
    "STEP_DIR",
    "job_name",
    "receipt_name",
    "root_path",
    "shard_name",
    "shard_pattern",
    "step_dir",
]

MANIFEST = "checkpoint.json"
MANIFEST_KIND = "rekindle-checkpoint"

STEP_DIR = re.compile(r"step-(?P<step>\d{10})(?:\.(?P<id>[0-9a-f]{16})\.(?P<kind>partial|retired))?\Z")
"""A step's directory; with a suffix while it is being written, or after it was moved out of a successor's way."""

LAST_STEP = 10**10 - 1
"""What ten digits can hold."""

_SHARD = re.compile(r"shard-(\d{5})-of-(\d{5})\.(safetensors|json)\Z")


def step_dir(step: int) -> str:
    return f"step-{step:010d}"


def shard_name(rank: int, world: int) -> str:
    return f"shard-{rank:05d}-of-{world:05d}.safetensors"


def receipt_name(rank: int, world: int) -> str:
    return f"shard-{rank:05d}-of-{world:05d}.json"


def shard_pattern(name: str) -> tuple[int, int, str] | None:
    """(rank, world, extension) of a shard's or receipt's file name, or None for any other name."""
    match = _SHARD.match(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def root_path(root: str | os.PathLike[str]) -> Path:
    """The absolute directory that ``root``, a path or a ``file://`` URL, stands for."""
    text = os.fspath(root)
    if "://" in text:
        url = urlsplit(text)
        if url.scheme != "file" or url.netloc not in ("", "localhost"):
            raise UsageError(f"root {text!r}: only paths and file:// URLs can be checkpoint roots")
        text = unquote(url.path)
    if not text:
        raise UsageError("root is empty: give a directory to keep checkpoints in")
    return Path(os.path.realpath(os.path.expanduser(text)))


def job_name(root: Path) -> str:
    """The job's directory in the memory store: the root's name to be recognised by, its hash to be unique.

    It is short because the agent's socket lies in that directory and a socket's path is limited to 107 bytes.
    """
    slug = re.sub(r"[^A-Za-z0-9]+", "-", root.name).strip("-")[:24] or "root"
    return f"{slug}-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}"
