"""Names files and directories, alike in every store (see docs/format.md)."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from rekindle.errors import UsageError

__all__ = [
    "CLAIMS",
    "MAX_CLAIM",
    "MAX_STEP",
    "MANIFEST",
    "MANIFEST_KIND",
    "PINNED",
    "MAX_RANKS",
    "STEP_DIR",
    "Root",
    "is_job_name",
    "job_name",
    "receipt_name",
    "canonical_root",
    "claim_name",
    "parse_claim_name",
    "root_path",
    "shard_name",
    "parse_shard_name",
    "step_dir",
]

Root: TypeAlias = "Path | str"
"""Place of a job's checkpoints: an absolute directory, or the URL of an object store without a slash at its end."""

MANIFEST = "checkpoint.json"
"""File that makes a directory of shards a checkpoint."""
PINNED = "pinned"
"""Empty file beside the manifest, which exempts the checkpoint from retention."""
CLAIMS = "claims"
"""Directory of the claims of starts, beside the checkpoints. A root that has nothing else is empty."""
MANIFEST_KIND = "rekindle-checkpoint"
"""Field ``format`` of a manifest."""

STEP_DIR = re.compile(r"step-(?P<step>\d{10})(?:\.(?P<id>[0-9a-f]{16})\.(?P<kind>partial|retired))?\Z", re.ASCII)
"""Matches the name of a step's directory, with a suffix while it is written or after it was superseded."""

MAX_STEP = 10**10 - 1
"""Largest step, the limit of ten digits."""

_SCHEMES = ("s3", "gs", "az")
_UNSAFE = re.compile(r"[^A-Za-z0-9!_.*'()=+@,;/-]")
"""Matches characters with another meaning in a URL, or with an escape that services and clients disagree on."""

MAX_RANKS = 10**5
"""Most ranks of a job, the limit of five digits."""

MAX_CLAIM = 10**12 - 1
"""Largest number of a claim, the limit of twelve digits."""

_SHARD = re.compile(r"shard-(\d{5})-of-(\d{5})\.(safetensors|json)\Z", re.ASCII)
_CLAIM = re.compile(r"claims/claim-(\d{12})\.json\Z", re.ASCII)


def step_dir(step: int) -> str:
    """Returns the name of a step's directory."""
    return f"step-{step:010d}"


def shard_name(rank: int, world: int) -> str:
    """Returns the file name of a rank's shard."""
    return f"shard-{rank:05d}-of-{world:05d}.safetensors"


def receipt_name(rank: int, world: int) -> str:
    """Returns the file name of a rank's receipt."""
    return f"shard-{rank:05d}-of-{world:05d}.json"


def parse_shard_name(name: str) -> tuple[int, int, str] | None:
    """Returns (rank, world, extension) of a shard's or receipt's file name; None for any other name."""
    match = _SHARD.match(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def claim_name(number: int) -> str:
    """Returns the name of a start's claim, below the root."""
    return f"{CLAIMS}/claim-{number:012d}.json"


def parse_claim_name(name: str) -> int | None:
    """Returns the number of a claim from its name; None for any other name."""
    match = _CLAIM.match(name)
    return int(match[1]) if match else None


def canonical_root(root: str | os.PathLike[str], *, what: str = "root") -> Root:
    """Returns the one form of ``root``, a path or a URL, so that all ways to write it compare equal.

    Raises UsageError for what is neither, and for a URL of another kind. Its message calls it ``what``.
    """
    try:
        text = os.fsdecode(root)
    except TypeError:
        raise UsageError(f"{what} is {root!r}: must be a path or a URL, as a str or an os.PathLike") from None
    scheme, separator, rest = text.partition("://")
    if not separator and text.partition("/")[0] in {f"{known}:" for known in (*_SCHEMES, "file")}:
        raise UsageError(f"{what} {text!r}: a URL has two slashes; pass it as a str: a Path removes one of them")
    if not separator or scheme == "file":
        return root_path(text)
    parts = rest.split("/")
    while parts and not parts[-1]:
        parts.pop()
    if scheme not in _SCHEMES:
        raise UsageError(f"{what} {text!r}: only paths and file://, s3://, gs:// and az:// URLs are known")
    if len(parts) < 2 or not all(parts) or {".", ".."}.intersection(parts) or _UNSAFE.search(rest):
        raise UsageError(f"{what} {text!r}: must be {scheme}://BUCKET/NAME, of letters, digits and !-_.*'()=+@,; /")
    return f"{scheme}://{'/'.join(parts)}"


def root_path(root: str | os.PathLike[str]) -> Path:
    """Returns the absolute directory of ``root``, a path or a ``file://`` URL. Raises UsageError for other URLs."""
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
    except ValueError as error:  # a NUL, or a lone surrogate
        raise UsageError(f"root {text!r}: can't be the name of a directory: {error}") from error
    return path


def is_job_name(name: str) -> bool:
    """Returns True for a name that ``job_name`` may have given."""
    return re.fullmatch(r"[A-Za-z0-9-]{1,24}-[0-9a-f]{12}", name) is not None


def job_name(root: Root) -> str:
    """Returns the name of the job's directory in the memory store: a readable part of the root, and its hash.

    The name is short because the agent's socket lies in that directory, and a socket's path has at most 107 bytes.
    """
    slug = re.sub(r"[^A-Za-z0-9]+", "-", str(root).rpartition("/")[2]).strip("-")[:24] or "root"
    return f"{slug}-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}"
