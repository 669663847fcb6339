"""Names of files and directories; the same in every store (see docs/format.md)."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from rekindle.errors import UsageError

__all__ = [
    "MAX_STEP",
    "MANIFEST",
    "MANIFEST_KIND",
    "PINNED",
    "MAX_RANKS",
    "STEP_DIR",
    "Root",
    "job_name",
    "receipt_name",
    "canonical_root",
    "root_path",
    "shard_name",
    "parse_shard_name",
    "step_dir",
]

Root: TypeAlias = "Path | str"
"""Where a job keeps its checkpoints: an absolute directory, or the URL of an object store, no slash at its end."""

MANIFEST = "checkpoint.json"
PINNED = "pinned"
"""An empty file beside the manifest: the checkpoint stays whatever retention says."""
MANIFEST_KIND = "rekindle-checkpoint"

STEP_DIR = re.compile(r"step-(?P<step>\d{10})(?:\.(?P<id>[0-9a-f]{16})\.(?P<kind>partial|retired))?\Z", re.ASCII)
"""A step's directory; with a suffix while it is being written, or after it was moved out of a successor's way."""

MAX_STEP = 10**10 - 1
"""What ten digits can hold."""

_SCHEMES = ("s3", "gs", "az")
_UNSAFE = re.compile(r"[^A-Za-z0-9!_.*'()=+@,;/-]")
"""What has another meaning in a URL, or needs an escape there that services and clients disagree on."""

MAX_RANKS = 10**5
"""What five digits can count."""

_SHARD = re.compile(r"shard-(\d{5})-of-(\d{5})\.(safetensors|json)\Z", re.ASCII)


def step_dir(step: int) -> str:
    return f"step-{step:010d}"


def shard_name(rank: int, world: int) -> str:
    return f"shard-{rank:05d}-of-{world:05d}.safetensors"


def receipt_name(rank: int, world: int) -> str:
    return f"shard-{rank:05d}-of-{world:05d}.json"


def parse_shard_name(name: str) -> tuple[int, int, str] | None:
    """(rank, world, extension) of a shard's or receipt's file name, or None for any other name."""
    match = _SHARD.match(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def canonical_root(root: str | os.PathLike[str]) -> Root:
    """What ``root``, a path or a URL, stands for: equal for all ways to write the same one.

    Raises UsageError for a URL that can't be a checkpoint root.
    """
    text = os.fsdecode(root)
    scheme, separator, rest = text.partition("://")
    if not separator and text.partition("/")[0] in {f"{known}:" for known in (*_SCHEMES, "file")}:
        raise UsageError(f"root {text!r}: a URL has two slashes; pass a str: a Path swallows a slash")
    if not separator or scheme == "file":
        return root_path(text)
    parts = rest.split("/")
    while parts and not parts[-1]:
        parts.pop()
    if scheme not in _SCHEMES:
        raise UsageError(f"root {text!r}: only paths and file://, s3://, gs:// and az:// URLs can be checkpoint roots")
    if len(parts) < 2 or not all(parts) or {".", ".."}.intersection(parts) or _UNSAFE.search(rest):
        raise UsageError(f"root {text!r}: is no {scheme}://BUCKET/NAME, of letters, digits and !-_.*'()=+@,; /")
    return f"{scheme}://{'/'.join(parts)}"


def root_path(root: str | os.PathLike[str]) -> Path:
    """The absolute directory that ``root``, a path or a ``file://`` URL, stands for. Raises UsageError for others."""
    text = os.fsdecode(root)
    if "://" in text:
        try:
            url = urlsplit(text)
        except ValueError as error:
            raise UsageError(f"root {text!r}: {error}") from error
        if url.scheme != "file" or url.netloc not in ("", "localhost"):
            raise UsageError(f"{text!r}: only a path or a file:// URL can be a root here")
        if url.query or url.fragment:
            raise UsageError(f"root {text!r}: write ? as %3F and # as %23 in a URL, or give the path")
        text = unquote(url.path)
    if not text:
        raise UsageError("root is empty: give a directory to keep checkpoints in")
    try:
        path = Path(os.path.realpath(os.path.expanduser(text)))
        os.fsencode(path)
    except ValueError as error:  # a NUL in it, or half a character
        raise UsageError(f"root {text!r}: no directory can have this name: {error}") from error
    return path


def job_name(root: Root) -> str:
    """The job's directory in the memory store: the root's name to be recognised by, its hash to be unique.

    It is short because the agent's socket lies in that directory and a socket's path is limited to 107 bytes.
    """
    slug = re.sub(r"[^A-Za-z0-9]+", "-", str(root).rpartition("/")[2]).strip("-")[:24] or "root"
    return f"{slug}-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}"
