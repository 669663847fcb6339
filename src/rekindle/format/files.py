"""Defines Files: access to the files of one checkpoint, in a directory or elsewhere."""

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
    """Finds a checkpoint's files by their names (``format/names.py``). Equal if the files are the same.

    Stateless, so safe to use from any thread. ``str`` gives the place for people to read.
    """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Returns the bytes of a document. Raises FileNotFoundError, another OSError, or CorruptError for a link."""

    def exists(self, name: str) -> bool:
        """True if there is such a file. Raises OSError when that can't be determined."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    @abstractmethod
    def size(self, name: str) -> int:
        """Returns the size of a file in bytes. Raises OSError."""

    @abstractmethod
    def shard(self, rank: int, world: int) -> OpenShard:
        """Opens a rank's shard; in the memory store also pins it.

        Raises FileNotFoundError when it is gone or being recycled, CorruptError when its receipt or size is wrong.
        """

    def named(self, name: str) -> str:
        """Returns the place and name of a file for messages."""
        return f"{self}/{name}"

    def shard_size(self, rank: int, world: int) -> int:
        """Returns the size of a rank's shard in bytes. Raises OSError."""
        return self.size(shard_name(rank, world))


@dataclass(frozen=True)
class Directory(Files):
    """Accesses a checkpoint's files in a directory of a local or mounted file system."""

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
        return OpenShard.open(self.path / receipt_name(rank, world), in_memory=self.in_memory)
