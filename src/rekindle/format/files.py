"""The files of one checkpoint, wherever they are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import FormatError
from rekindle.format.names import receipt_name, shard_name
from rekindle.format.receipt import read_file
from rekindle.format.shard import OpenShard

__all__ = ["Directory", "Files"]


class Files(ABC):
    """Finds a checkpoint's files by their names (``format/names.py``). Equal when they are the same files.

    Stateless, so safe to use from any thread. ``str`` tells a person where they are.
    """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A whole document. Raises FileNotFoundError, other OSErrors, or CorruptError for a link to elsewhere."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is such a file. Raises OSError when that can't be told."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of a file. Raises OSError."""

    @abstractmethod
    def shard(self, rank: int, world: int) -> OpenShard:
        """Open, and in memory pin, a rank's shard.

        Raises FileNotFoundError when it is gone or just being recycled, CorruptError when receipt or size is wrong.
        """

    def named(self, name: str) -> str:
        """What to call a file when talking to a person."""
        return f"{self}/{name}"

    def shard_size(self, rank: int, world: int) -> int:
        return self.size(shard_name(rank, world))


@dataclass(frozen=True)
class Directory(Files):
    """Files in a directory of this machine, or of a file system that it has mounted."""

    path: Path
    in_memory: bool = False

    def __str__(self) -> str:
        return str(self.path)

    def read(self, name: str) -> bytes:
        if self.path.is_symlink():
            raise FormatError(f"{self.path}: is a symbolic link, not a directory of a checkpoint")
        return read_file(self.path / name)

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def shard(self, rank: int, world: int) -> OpenShard:
        return OpenShard.open(self.path / receipt_name(rank, world), self.in_memory)
