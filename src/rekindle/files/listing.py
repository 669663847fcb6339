"""Lists the files in this node's memory, with their states."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rekindle.errors import FormatError
from rekindle.files.settings import current_settings
from rekindle.format.fields import loads
from rekindle.format.receipt import read_file
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import KeptFile

__all__ = ["FileStatus", "failures", "list_files", "status"]


@dataclass(frozen=True)
class FileStatus:
    """A file in this node's memory."""

    path: str
    """Path or URL that it belongs at."""
    state: Literal["memory", "both"]
    """"memory": on its way. "both": on storage, too."""
    nbytes: int
    saved_at: float
    """Time at which it was saved, in seconds since 1970."""
    problem: str | None
    """Reason why storage lacks it, where an upload has failed."""

    def to_json(self) -> dict[str, Any]:
        """Returns it for ``--json``."""
        return asdict(self)


def status() -> list[FileStatus]:
    """Lists the files in this node's memory, in the order of their saves. Files that memory gave up are not listed."""
    return list_files(FilesDir.below(current_settings().base))


def list_files(store: FilesDir) -> list[FileStatus]:
    """Lists the files of a memory store."""
    if not store.kept_path.is_dir():
        return []
    store.check()
    failed = failures(store)
    return [found for file in store.kept.newest() if (found := _describe(file, failed)) is not None]


def _describe(file: KeptFile, failed: dict[str, str]) -> FileStatus | None:
    stored = file.is_stored()
    try:
        receipt = file.read_receipt()
    except FormatError as error:
        return FileStatus(str(file.receipt), "memory", 0, 0.0, str(error))
    except OSError:  # given up meanwhile
        return None
    problem = None if stored else failed.get(receipt.target)
    return FileStatus(receipt.target, "both" if stored else "memory", receipt.nbytes, receipt.saved_at, problem)


def failures(store: FilesDir) -> dict[str, str]:
    """Maps the paths whose last upload has failed to the reason, by the word of whoever drains."""
    try:
        found = loads(read_file(store.paths.agent_status))["failed"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {str(path): str(why) for path, why in found.items()} if isinstance(found, dict) else {}
